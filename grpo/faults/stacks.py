"""Stacks of a stuck process, written in C by a thread or a signal handler: neither needs the GIL."""

import contextlib
import faulthandler
import os
import signal
from collections.abc import Iterator
from pathlib import Path

MAX_LINES = 60
STACKS_SIGNAL = signal.SIGRTMIN + 7
"""Signal that makes a process write its stacks after `on_signal` was called in it; it ends other processes."""
_on_signal: "Stacks | None" = None


class Stacks:
    """File for this process's stacks. Only one may be armed per process (`faulthandler`)."""

    def __init__(self) -> None:
        self._file = open(os.memfd_create("grpo-stacks"), "w+b", buffering=0)  # noqa: SIM115  closed with this object

    @property
    def fd(self) -> int:
        """Descriptor of an anonymous file; its holder may read it with `read_stacks`."""
        return self._file.fileno()

    @contextlib.contextmanager
    def armed(self, timeout_s: float) -> Iterator[None]:
        """Write the stacks if the block takes longer, even if Python code does not run."""
        empty(self.fd)
        faulthandler.dump_traceback_later(timeout_s, file=self.fd)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()

    def on_signal(self) -> None:
        """Write the stacks on `STACKS_SIGNAL` from now on, whatever thread holds the GIL."""
        global _on_signal
        faulthandler.register(STACKS_SIGNAL, file=self.fd, all_threads=True)
        _on_signal = self  # the signal may come late, and the descriptor must not be another file's by then

    def now(self, first: int) -> str:
        """Return the current stacks; see `read_stacks`."""
        empty(self.fd)
        faulthandler.dump_traceback(file=self.fd)
        return read_stacks(self.fd, first)


def ask_for_stacks(pid: int) -> bool:
    """Ask a process to write its stacks; False if it is gone, or if it has no handler and the signal would end it."""
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        if int(status.partition("SigCgt:")[2].split()[0], 16) >> (STACKS_SIGNAL - 1) & 1:
            os.kill(pid, STACKS_SIGNAL)
            return True
    return False


def empty(fd: int) -> None:
    """Truncate the file; either side may, as both share its position."""
    os.ftruncate(fd, 0)
    os.lseek(fd, 0, os.SEEK_SET)


def read_stacks(fd: int, first: int) -> str:
    """Return the file's content; '' if nothing was written.

    Args:
        first: thread to show first, from `threading.get_ident`; the main thread comes next.
    """
    return arranged(os.pread(fd, 1 << 18, 0).decode(errors="replace"), first)


def where(fd: int | None, first: int) -> str:
    """Return the stacks as the end of a cause; '' without any."""
    stacks = "" if fd is None else read_stacks(fd, first)
    return f"; it was here, the innermost call first:\n{stacks}" if stacks else ""


def arranged(text: str, first: int | None = None) -> str:
    """Arrange faulthandler's output: the main thread before the others, at most `MAX_LINES`.

    Args:
        first: as for `read_stacks`.
    """
    threads = [part.strip("\n") for part in text.split("\n\n") if part.strip()]
    threads.reverse()  # faulthandler writes the main thread last
    if first is not None:
        threads.sort(key=lambda stack: f"0x{first:016x} " not in stack)
    lines = "\n".join(threads).splitlines()
    lines = [line for line in lines if not line.startswith("Timeout (")]
    return "\n".join(lines if len(lines) <= MAX_LINES else [*lines[: MAX_LINES - 1], "  ..."])
