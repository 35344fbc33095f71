"""Processes of an engine's session, and their leftovers: an engine host is a session leader.

Used to end engines by their client, the host itself and the node's sentinel. Loads no library.
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
    """State letter in /proc/PID/stat: `T` is stopped, `t` held by a debugger; '' if the process is gone."""
    return next(iter(_stat_of(pid)), "")


def _stat_of(pid: int) -> list[str]:
    """Fields of /proc/PID/stat after the command, which may itself contain spaces and parentheses."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def session_members(session_id: int) -> list[int]:
    """Pids of the live processes in the session `session_id`."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if _session_of(pid) == session_id and process_state(pid) not in _ENDED]


def stopped_members(session_id: int, among: Iterable[int]) -> list[int]:
    """Filter `among` for stopped processes in the session, except by a debugger."""
    return [pid for pid in among if process_state(pid) == "T" and _session_of(pid) == session_id]


def _session_of(pid: int) -> int | None:
    """Session of a process; None if it is gone."""
    try:
        return os.getsid(pid)
    except OSError:
        return None


def end_session(session_id: int, private_folder: Path) -> None:
    """SIGKILL every process of an engine's session except the caller, and remove their leftovers."""
    deadline = time.monotonic() + END_S
    while (others := set(session_members(session_id)) - {os.getpid()}) and time.monotonic() < deadline:
        for pid in others:  # repeatedly: dying ones, and ones started in the meantime
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    remove_traces(private_folder)


def remove_traces(private_folder: Path) -> None:
    """Remove an engine's private folder, and shared memory named after it or a file in it.

    Repeats while it exists: processes or threads about to end may still write into it.
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
    """Signal that ended a process not reaped yet by its parent; None for another end, or if unknown."""
    with contextlib.suppress(IndexError, ValueError):  # it is gone; it ended by itself
        return signal.Signals(int(_stat_of(pid)[-1]) & 0x7F)
    return None


class WatchedProcess:
    """A local process held by pidfd, so that reuse of its pid cannot confuse it. It may have ended already."""

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
        """Wait for its end; False on timeout."""
        while self.descriptor is not None:
            poll = select.poll()  # `select` takes no descriptor above 1023
            poll.register(self.descriptor, select.POLLIN)
            if not poll.poll(None if timeout_s is None else timeout_s * 1000):
                return False
            if process_state(self.pid) in _ENDED:
                break
            self._open()  # our descriptor was closed by other code: vLLM's forked workers close some twice, by number
        return True

    def is_stopped(self) -> bool:
        """True if stopped by SIGSTOP or another signal of job control, except by a debugger."""
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
            except PermissionError:  # containers may not allow pidfd_send_signal
                os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        if self.descriptor is not None:
            self.ended_by = signal_that_ended(self.pid)
            with contextlib.suppress(OSError):
                os.close(self.descriptor)
        self.descriptor = None
