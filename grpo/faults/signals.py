"""SIGUSR1 and SIGTERM as stop requests: schedulers send them before a job's time is up."""

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from grpo.place.log import FILE_ONLY

_log = logging.getLogger(__name__)

LEAD_VARIABLE = "GRPO_STOP_LEAD_S"  # seconds between the scheduler's signal and the end of the job
LEAD_MARGIN_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequest:
    """A request for a checkpoint and an end."""

    why: str
    requeue: bool
    """False if a person asked."""


class StopSignals:
    """Stop signals received by this process.

    SIGUSR1 always requests a stop. SIGTERM does so while training runs (between `open` and `close`), when a checkpoint
    can follow; at any other time it ends the process as usual.

    Args:
        sigterm: True to handle SIGTERM.
    """

    def __init__(self, *, sigterm: bool = True) -> None:
        self.request: StopRequest | None = None
        self.look: Callable[[], StopRequest | None] = lambda: None
        """Returns a stop request by other means than a signal; called before a failure is reported."""
        self.is_open = False
        self.is_hurried = False
        """True once SIGTERM has come, which does not say how much time is left."""
        self._numbers = [signal.SIGUSR1, *([signal.SIGTERM] if sigterm else [])]
        self._taken: dict[int, Any] = {}  # previous handlers by signal
        self._waker: int | None = None

    def take(self, waker: int | None = None) -> None:
        """Install the handlers for signals without a handler of the script. Main thread only; has no effect in others.

        Releases the handlers of an earlier trainer.

        Args:
            waker: file descriptor of a non-blocking socket that gets the number of a signal at once, even while the
                main thread is stuck in C code. Its reader decides the meaning of SIGTERM.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        global _current
        if _current is None:
            os.register_at_fork(after_in_child=_restore_in_child)
        else:
            _current.release()
        _current = self
        if waker is not None:
            previous = signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
            if previous != -1:
                signal.set_wakeup_fd(previous)
                return
            self._waker = waker
        for number in self._numbers:
            # A launcher that ignores SIGUSR1 for its own safety passes that on to its ranks.
            free = (signal.SIG_DFL, signal.SIG_IGN) if number == signal.SIGUSR1 else (signal.SIG_DFL,)
            if (before := signal.getsignal(number)) in free:
                signal.signal(number, self._handle)
                self._taken[number] = before

    def holds(self, number: int) -> bool:
        """True if the handler of signal `number` is ours; a handler installed later decides for itself."""
        return number in self._taken and signal.getsignal(number) == self._handle

    def note(self, number: int) -> None:
        """Record signal `number`. From any thread."""
        self.is_hurried = self.is_hurried or number == signal.SIGTERM
        if self.request is None and (number == signal.SIGUSR1 or self.is_open):
            self.request = StopRequest(why=f"got {signal.Signals(number).name}", requeue=True)
            _log.info("a stop is asked for: %s", self.request.why, extra=FILE_ONLY)

    def was_asked(self, patience_s: float) -> bool:
        """True if a stop was requested, by signal or otherwise; waits for a signal that may be on its way."""
        deadline = time.monotonic() + patience_s
        while self.request is None and time.monotonic() < deadline:
            time.sleep(0.05)
        if self.request is None:
            self.request = self.look()
        return self.request is not None

    def open(self) -> None:
        """Let SIGTERM request a stop from now on."""
        self.is_open = True

    def close(self) -> None:
        """Let SIGTERM end the process from now on."""
        self.is_open = False

    def release(self) -> None:
        """Restore the previous handlers. Main thread only."""
        if self._waker is not None:
            signal.set_wakeup_fd(-1)
            self._waker = None
        for number, before in self._taken.items():
            if self.holds(number):
                signal.signal(number, before)
        self._taken.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM and not self.is_open and self._waker is None:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        self.note(number)

    def restore_in_child(self) -> None:
        """Reset signals in a forked child, such as a data-loader worker: SIGTERM ends it, and nothing wakes the
        parent's watch."""
        with contextlib.suppress(ValueError):  # forked from another thread than the main one
            if self._waker is not None:
                signal.set_wakeup_fd(-1)
            for number in self._taken:
                # A stop requested of all processes must not kill a worker before its trainer.
                signal.signal(number, signal.SIG_IGN if number == signal.SIGUSR1 else signal.SIG_DFL)


_current: StopSignals | None = None
"""Object with the installed handlers; a process has one trainer at a time."""


def _restore_in_child() -> None:
    if _current is not None:
        _current.restore_in_child()


@contextlib.contextmanager
def exiting_on_sigterm() -> Iterator[None]:
    """Exit by `sys.exit(143)` on SIGTERM in a `with` block, so that a command leaves no half-written files."""
    inherited = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, inherited)


class StopLead:
    """Check that the scheduler's signal comes early enough for a generation batch and a save.

    Args:
        lead: value of `GRPO_STOP_LEAD_S`, or None.
        warn: called with the warning if the lead is too short.
    """

    def __init__(self, lead: str | None, warn: Callable[[str], None]) -> None:
        self._lead_s = float(lead) if lead else None
        self._warn = warn
        self._batch_begun: float | None = None
        self.longest_batch_s = 0.0
        self.save_s = 0.0
        """Duration of the last save, until it was complete."""

    def batch_ended(self, now: float) -> None:
        """Note the end of a generation batch's training; `now` by time.monotonic()."""
        if self._batch_begun is not None and now - self._batch_begun > self.longest_batch_s:
            self.longest_batch_s = now - self._batch_begun
            self._check()
        self._batch_begun = now

    def saved(self, begun: float, now: float) -> None:
        """Note a written checkpoint; its time counts to no batch."""
        self._batch_begun = now
        self.completed(begun, now)

    def completed(self, begun: float, now: float) -> None:
        """Note a complete checkpoint: a stop waits for it. From any thread."""
        self.save_s = now - begun
        self._check()

    def _check(self) -> None:
        needed_s = self.longest_batch_s + self.save_s + LEAD_MARGIN_S
        if self._lead_s is not None and self._lead_s < needed_s:
            self._warn(
                f"WARNING: the scheduler's signal comes {self._lead_s:.0f} s before the end ({LEAD_VARIABLE}), but a "
                f"generation batch took {self.longest_batch_s:.0f} s and a save {self.save_s:.0f} s [GRPO-709]: give "
                f"it at least {needed_s:.0f} s (#SBATCH --signal=B:USR1@{needed_s:.0f})"
            )
