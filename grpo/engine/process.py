"""The process of an engine host, held by the local main with its socket, session and private folder."""

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path

from grpo.engine.compile_caches import end_late
from grpo.engine.plugin import FIRST_OUTPUT, HOST_MARK
from grpo.engine.progress import EngineProgress
from grpo.faults.sessions import WatchedProcess, end_session, remove_traces, session_members, stopped_members

SEND_TIMEOUT_S = 60  # a host that is stopped, or swapped out, does not read
END_S = 30.0  # from SIGKILL to the end of a process not held by a driver
CHECK_S = 2.0  # between checks of its processes
CHECKS_PER_LISTING = 15


class HostProcess:
    """A host from its start: it imports vLLM, and waits on its socket for an engine to run.

    Its output until then goes to its private folder. From any thread: an engine's own starts its successor.

    Args:
        environment: from `engine_environment`.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = dict(environment)
        # vLLM's processes use sockets and files in the temporary folder, and a killed one leaves them there. Not under
        # output_dir: a socket's path has at most 107 bytes.
        self.private_folder = Path(tempfile.mkdtemp(prefix="grpo-engine-"))
        self.progress = EngineProgress()
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_TIMEOUT_S, 0))
        numbers = (theirs.fileno(), os.getpid(), self.progress.fd)
        try:
            with (self.private_folder / FIRST_OUTPUT).open("wb") as output, theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "grpo.engine.host", *map(str, numbers)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=self.private(environment),
                    pass_fds=[theirs.fileno(), self.progress.fd],
                    start_new_session=True,
                )
        except BaseException:  # no space, or no more processes
            ours.close()
            remove_traces(self.private_folder)
            raise
        self.connection = Connection(ours.detach())

    @property
    def pid(self) -> int:
        """Pid; also the id of the session of all processes of this engine."""
        return self._process.pid

    def private(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return `environment` with this host's own folder."""
        return {**environment, HOST_MARK: str(self.private_folder), "TMPDIR": str(self.private_folder)}

    def stacks(self) -> str:
        """Return the stacks of all its processes that support it, the host's last."""
        return self.progress.stacks(sorted(session_members(self.pid), key=lambda pid: (pid == self.pid, pid)))

    def is_running(self) -> bool:
        return self._process.poll() is None

    def wait_for_end(
        self, stopped_timeout_s: float, look: Callable[[float], str | None] = lambda passed_s: None
    ) -> str | None:
        """Wait until it ends, one of its processes has been stopped for too long, or `look` finds a fault.

        Args:
            look: called repeatedly, with the seconds since the last call.

        Returns:
            The fault; None if the host has ended.
        """
        host = WatchedProcess(self.pid)
        try:
            members, looks = [self.pid], 0
            stopped_s: dict[int, float] = {}
            while not host.wait(CHECK_S):
                if looks % CHECKS_PER_LISTING == 0:  # listing all processes of a large node takes a while
                    members = session_members(self.pid)
                looks += 1
                # Counted by looks, not by the clock: while we were stopped ourselves we did not see it.
                stopped_s = {pid: stopped_s.get(pid, 0.0) + CHECK_S for pid in stopped_members(self.pid, members)}
                if over := [pid for pid, seconds in stopped_s.items() if seconds > stopped_timeout_s]:
                    return f"its process {over[0]} was stopped (SIGSTOP?) for {stopped_timeout_s:.0f} s"
                if fault := look(CHECK_S):
                    return fault
            return None
        finally:
            host.close()

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for its end. Returns its exit code; negative: the number of the signal.

        Raises:
            subprocess.TimeoutExpired: it still exists.
        """
        return self._process.wait(timeout_s)

    def end(self) -> None:
        """Kill it and all its processes, and remove their leftovers. Safe to call twice."""
        end_session(self.pid, self.private_folder)

    def end_late(self) -> None:
        """Call `end` for a host not ready in time; keeps its compiled files."""
        end_late(lambda: session_members(self.pid), self.private_folder, self.end)

    def close(self) -> None:
        """Call `end` and close the socket; for a host without another waiting thread."""
        with deaf_to_sigchld():
            self.end()
            self.wait(END_S)
        self.connection.close()

    def first_output(self) -> bytes:
        """Output before it opened its log; empty afterwards."""
        try:
            return (self.private_folder / FIRST_OUTPUT).read_bytes()
        except FileNotFoundError:
            return b""


@contextlib.contextmanager
def deaf_to_sigchld() -> Iterator[None]:
    """Disable SIGCHLD handlers in a `with` block.

    After one of its data-loader workers was killed, torch's handler raises in the main thread at the end of any child,
    ours too (torch 2.13, `_set_SIGCHLD_handler`): an engine would be left half ended.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, handler)
