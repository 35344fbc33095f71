"""The stacks of a process that is stuck, written in C, by a thread or a signal's handler: neither needs the GIL."""

import contextlib
import faulthandler
import os
import signal
from collections.abc import Iterator
from pathlib import Path

MAX_LINES = 60
STACKS_SIGNAL = signal.SIGRTMIN + 7
"""Makes a process write its stacks, once `on_signal` was called in it; ends any other process."""
_on_signal: "Stacks | None" = None


class Stacks:
    """Where this process's stacks go. One at a time may be armed in a process (`faulthandler`)."""

    def __init__(self) -> None:
        self._file = open(os.memfd_create("grpo-stacks"), "w+b", buffering=0)  # noqa: SIM115  goes with this object

    @property
    def fd(self) -> int:
        """Of a file without a name; who has the descriptor may read it with `read_stacks`."""
        return self._file.fileno()

    @contextlib.contextmanager
    def armed(self, timeout_s: float) -> Iterator[None]:
        """They are written if the inside takes longer; Python code need not run for that."""
        empty(self.fd)
        faulthandler.dump_traceback_later(timeout_s, file=self.fd)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()

    def on_signal(self) -> None:
        """From now on they are also written on `STACKS_SIGNAL`, whatever thread holds the interpreter's lock."""
        global _on_signal
        faulthandler.register(STACKS_SIGNAL, file=self.fd, all_threads=True)
        _on_signal = self  # the signal may come late, and the descriptor must not be another file's by then

    def now(self, first: int) -> str:
        """As they are at this moment; see `read_stacks`."""
        empty(self.fd)
        faulthandler.dump_traceback(file=self.fd)
        return read_stacks(self.fd, first)


def ask_for_stacks(pid: int) -> bool:
    """Have a process write its stacks; False where it is gone or writes none, and the signal would end it."""
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        if int(status.partition("SigCgt:")[2].split()[0], 16) >> (STACKS_SIGNAL - 1) & 1:
            os.kill(pid, STACKS_SIGNAL)
            return True
    return False


def empty(fd: int) -> None:
    """Of what was written before; by either side, which share the place in it."""
    os.ftruncate(fd, 0)
    os.lseek(fd, 0, os.SEEK_SET)


def read_stacks(fd: int, first: int) -> str:
    """What is in the file; '' while nothing was written.

    Args:
        first: the thread that is shown first, as `threading.get_ident` names it; the main thread's comes next.
    """
    return arranged(os.pread(fd, 1 << 18, 0).decode(errors="replace"), first)


def where(fd: int | None, first: int) -> str:
    """For the end of a cause: what `read_stacks` finds, if anything."""
    stacks = "" if fd is None else read_stacks(fd, first)
    return f"; it was here, the innermost call first:\n{stacks}" if stacks else ""


def arranged(text: str, first: int | None = None) -> str:
    """What faulthandler has written of a process's threads, the main thread's before the others', bounded.

    Args:
        first: as for `read_stacks`.
    """
    threads = [part.strip("\n") for part in text.split("\n\n") if part.strip()]
    threads.reverse()  # faulthandler writes the main thread's last
    if first is not None:
        threads.sort(key=lambda stack: f"0x{first:016x} " not in stack)
    lines = "\n".join(threads).splitlines()
    lines = [line for line in lines if not line.startswith("Timeout (")]
    return "\n".join(lines if len(lines) <= MAX_LINES else [*lines[: MAX_LINES - 1], "  ..."])
