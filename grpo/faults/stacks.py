"""The stacks of a process that is stuck, written by a thread in C: it needs no interpreter lock."""

import contextlib
import faulthandler
import os
from collections.abc import Iterator

MAX_LINES = 60
_STDERR = 2


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
        self._empty()
        faulthandler.dump_traceback_later(timeout_s, file=self.fd)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()

    def now(self, first: int) -> str:
        """As they are at this moment; see `read_stacks`."""
        self._empty()
        faulthandler.dump_traceback(file=self.fd)
        return read_stacks(self.fd, first)

    def _empty(self) -> None:
        os.ftruncate(self.fd, 0)
        os.lseek(self.fd, 0, os.SEEK_SET)


@contextlib.contextmanager
def ending_process(timeout_s: float) -> Iterator[None]:
    """The process shows its stacks on stderr and ends with exit code 1 if the inside takes longer: the last resort
    where nobody else can end it."""
    faulthandler.dump_traceback_later(timeout_s, file=_STDERR, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def read_stacks(fd: int, first: int) -> str:
    """What is in the file; '' while nothing was written.

    Args:
        first: the thread that is shown first, as `threading.get_ident` names it; the main thread's comes next.
    """
    return arranged(os.pread(fd, 1 << 18, 0).decode(errors="replace"), first)


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
