"""The processes of a session, and what an engine's leave behind: an engine host leads a session of its own.

For whoever ends engines: their client, the host itself, the node's sentinel. Loads nothing.
"""

import contextlib
import os
import select
import shutil
import signal
import time
from collections.abc import Iterable
from pathlib import Path

END_S = 10.0
REMOVAL_S = 2.0
_ENDED = ("", "Z", "X")


def process_state(pid: int) -> str:
    """The letter that stands for it in /proc/PID/stat: `T` is stopped, `t` held by a debugger; '' when it is gone."""
    return next(iter(_stat_of(pid)), "")


def _stat_of(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the command, which may itself hold spaces and parentheses."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def session_members(session_id: int) -> list[int]:
    """Pids of the live processes in the session `session_id`."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if _session_of(pid) == session_id and process_state(pid) not in _ENDED]


def stopped_members(session_id: int, among: Iterable[int]) -> list[int]:
    """Those of the processes in the session that have been stopped, and not by a debugger."""
    return [pid for pid in among if process_state(pid) == "T" and _session_of(pid) == session_id]


def _session_of(pid: int) -> int | None:
    """Of a process that is there."""
    try:
        return os.getsid(pid)
    except OSError:
        return None


def end_session(session_id: int, private_folder: Path) -> None:
    """SIGKILL every process of an engine's session but the caller's own, and remove what they leave behind."""
    deadline = time.monotonic() + END_S
    while (others := set(session_members(session_id)) - {os.getpid()}) and time.monotonic() < deadline:
        for pid in others:  # again: dying, or started while we looked
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    remove_traces(private_folder)


def remove_traces(private_folder: Path) -> None:
    """Remove an engine's private folder, and the shared memory that bears its name or that of a file in it.

    Again while it is there: who goes on for a moment, the caller's own threads, may put something into it meanwhile.
    """
    for named in (private_folder, *private_folder.glob("vllm_dist_*")):  # the latter by vLLM's CPU workers
        for prefix in ("", "sem."):
            for segment in Path("/dev/shm").glob(f"{prefix}{named.name}-*"):
                segment.unlink(missing_ok=True)
    deadline = time.monotonic() + REMOVAL_S
    shutil.rmtree(private_folder, ignore_errors=True)
    while private_folder.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
        shutil.rmtree(private_folder, ignore_errors=True)


def signal_that_ended(pid: int) -> signal.Signals | None:
    """The signal that ended a process whose parent has not reaped it yet; None for another end, or an unknown one."""
    with contextlib.suppress(IndexError, ValueError):  # it is gone; it ended by itself
        return signal.Signals(int(_stat_of(pid)[-1]) & 0x7F)
    return None


class WatchedProcess:
    """A process of this node, by a descriptor that no other process can come to have. It need not be there any more."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.stopped_since_s: float | None = None
        self.ended_by: signal.Signals | None = None
        self._open()

    def _open(self) -> None:
        self.descriptor: int | None = None
        with contextlib.suppress(ProcessLookupError):
            self.descriptor = os.pidfd_open(self.pid)

    @property
    def is_dead(self) -> bool:
        return self.descriptor is None

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether it has ended by then."""
        while self.descriptor is not None:
            poll = select.poll()  # `select` takes no descriptor above 1023
            poll.register(self.descriptor, select.POLLIN)
            if not poll.poll(None if timeout_s is None else timeout_s * 1000):
                return False
            if process_state(self.pid) in _ENDED:
                break
            self._open()  # somebody has closed our descriptor: vLLM's forked workers close some twice, by number
        return True

    def is_stopped(self) -> bool:
        """By SIGSTOP or another signal of job control, and not by a debugger."""
        return not self.is_dead and process_state(self.pid) == "T"

    def stopped_for_s(self, now_s: float) -> float:
        if not self.is_stopped():
            self.stopped_since_s = None
            return 0.0
        if self.stopped_since_s is None:
            self.stopped_since_s = now_s
        return now_s - self.stopped_since_s

    def kill(self) -> None:
        assert self.descriptor is not None, "it is dead"
        with contextlib.suppress(ProcessLookupError):
            try:
                signal.pidfd_send_signal(self.descriptor, signal.SIGKILL)
            except PermissionError:  # containers may know no pidfd_send_signal
                os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        if self.descriptor is not None:
            self.ended_by = signal_that_ended(self.pid)
            with contextlib.suppress(OSError):
                os.close(self.descriptor)
        self.descriptor = None
