"""The process of an engine host, as the local main holds it: with its socket, its session and its private folder."""

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path

from grpo.engine.lifetime import end_session
from grpo.engine.plugin import FIRST_OUTPUT, HOST_MARK

SEND_TIMEOUT_S = 60  # a host that is stopped, or swapped out, does not read


class HostProcess:
    """A host from its first moment on: it imports vLLM, and waits on its socket for what it is to run.

    Started from the main thread. What it writes until then goes into its private folder.

    Args:
        environment: as `engine_environment` makes it.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = dict(environment)
        # vLLM's processes meet at sockets and files in the folder for temporary files, and a killed one leaves them
        # there. Not under output_dir: the path of a socket has 107 bytes at most.
        self.private_folder = Path(tempfile.mkdtemp(prefix="grpo-engine-"))
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_TIMEOUT_S, 0))
        with (self.private_folder / FIRST_OUTPUT).open("wb") as output, theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "grpo.engine.host", str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self.private(environment),
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self.connection = Connection(ours.detach())

    @property
    def pid(self) -> int:
        """Also the id of the session that holds all processes of this engine."""
        return self._process.pid

    def private(self, environment: Mapping[str, str]) -> dict[str, str]:
        """`environment` with this host's own folder in it."""
        return {**environment, HOST_MARK: str(self.private_folder), "TMPDIR": str(self.private_folder)}

    def is_running(self) -> bool:
        return self._process.poll() is None

    def wait(self) -> int:
        """Wait for its end. Returns its exit code, or less than 0, the signal that killed it."""
        return self._process.wait()

    def end(self) -> None:
        """Kill it and everything that it started, and remove what they leave behind. Safe to call twice."""
        end_session(self.pid, self.private_folder)

    def close(self) -> None:
        """As `end`, with the socket; nobody else waits for it any more."""
        with deaf_to_sigchld():
            self.end()
            self.wait()
        self.connection.close()

    def first_output(self) -> bytes:
        """What it has written before it took up its log; nothing from then on."""
        try:
            return (self.private_folder / FIRST_OUTPUT).read_bytes()
        except FileNotFoundError:
            return b""


@contextlib.contextmanager
def deaf_to_sigchld() -> Iterator[None]:
    """Keep what handles SIGCHLD from interrupting us.

    torch's handler raises in the main thread at the end of any child, ours too, once one of its data-loader workers was
    killed (torch 2.13, `_set_SIGCHLD_handler`): an engine would be left half ended.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, handler)
