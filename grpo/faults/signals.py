"""SIGUSR1 and SIGTERM as requests to stop: the scheduler's way to say that the time is up."""

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

LEAD_VARIABLE = "GRPO_STOP_LEAD_S"  # how long before the end of its time the scheduler says so
LEAD_MARGIN_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequest:
    """Somebody wants a checkpoint and an end."""

    why: str
    requeue: bool
    """False when a person asked."""


class StopSignals:
    """Which of the two this process has got.

    SIGUSR1 always asks for a stop. SIGTERM does while training runs (between `open` and `close`), where it can be
    answered with a checkpoint; at any other time it ends the process as ever.

    Args:
        sigterm: whether to take SIGTERM at all.
    """

    def __init__(self, *, sigterm: bool = True) -> None:
        self.request: StopRequest | None = None
        self.look: Callable[[], StopRequest | None] = lambda: None
        """Asked for what no signal has brought, before a failure is believed."""
        self.is_open = False
        self.is_hurried = False
        """Whether SIGTERM has come, which does not say how much time is left."""
        self._numbers = [signal.SIGUSR1, *([signal.SIGTERM] if sigterm else [])]
        self._taken: dict[int, Any] = {}  # what was there before, by signal
        self._waker: int | None = None

    def take(self, waker: int | None = None) -> None:
        """Install the handlers, where the script has none of its own. From the main thread; elsewhere nothing happens.

        Those of a trainer before this one are released.

        Args:
            waker: a non-blocking socket's file descriptor that gets the number of a signal at once, even while the main
                thread is stuck in C code. Whoever reads it decides what SIGTERM means.
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
            # A launcher that ignores SIGUSR1, so as not to die of it, has its ranks inherit that.
            free = (signal.SIG_DFL, signal.SIG_IGN) if number == signal.SIGUSR1 else (signal.SIG_DFL,)
            if (before := signal.getsignal(number)) in free:
                signal.signal(number, self._handle)
                self._taken[number] = before

    def holds(self, number: int) -> bool:
        """Whether the handler of signal `number` is ours; one that was installed after ours decides for itself."""
        return number in self._taken and signal.getsignal(number) == self._handle

    def note(self, number: int) -> None:
        """Signal `number` has come. From any thread."""
        self.is_hurried = self.is_hurried or number == signal.SIGTERM
        if self.request is None and (number == signal.SIGUSR1 or self.is_open):
            self.request = StopRequest(why=f"got {signal.Signals(number).name}", requeue=True)
            _log.info("a stop is asked for: %s", self.request.why, extra=FILE_ONLY)

    def was_asked(self, patience_s: float) -> bool:
        """Whether somebody has asked, by signal or otherwise; waits for a signal that may be on its way."""
        deadline = time.monotonic() + patience_s
        while self.request is None and time.monotonic() < deadline:
            time.sleep(0.05)
        if self.request is None:
            self.request = self.look()
        return self.request is not None

    def open(self) -> None:
        """From now on SIGTERM asks for a stop."""
        self.is_open = True

    def close(self) -> None:
        """From now on SIGTERM ends the process."""
        self.is_open = False

    def release(self) -> None:
        """Give the signals back. From the main thread."""
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
        """In a forked child, a data-loader worker say: SIGTERM ends it, and nothing wakes the parent's watch."""
        with contextlib.suppress(ValueError):  # forked from another thread than the main one
            if self._waker is not None:
                signal.set_wakeup_fd(-1)
            for number in self._taken:
                # A stop that was asked of all processes is no reason for a worker to die before its trainer.
                signal.signal(number, signal.SIG_IGN if number == signal.SIGUSR1 else signal.SIG_DFL)


_current: StopSignals | None = None
"""Whose handlers are installed: a process has one trainer after the other."""


def _restore_in_child() -> None:
    if _current is not None:
        _current.restore_in_child()


@contextlib.contextmanager
def exiting_on_sigterm() -> Iterator[None]:
    """A command that a batch system ends by SIGTERM leaves nothing half written: it ends as by `sys.exit(143)`."""
    inherited = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, inherited)


class StopLead:
    """Whether the scheduler's signal comes early enough for what follows it: a generation batch, and a save.

    Args:
        lead: what `GRPO_STOP_LEAD_S` says; None: nothing.
        warn: is given the sentence when the lead turns out to be too short.
    """

    def __init__(self, lead: str | None, warn: Callable[[str], None]) -> None:
        self._lead_s = float(lead) if lead else None
        self._warn = warn
        self._batch_begun: float | None = None
        self.longest_batch_s = 0.0
        self.save_s = 0.0
        """Of the last save, until it was complete."""

    def batch_ended(self, now: float) -> None:
        """At the end of a generation batch's training; `now` by time.monotonic()."""
        if self._batch_begun is not None and now - self._batch_begun > self.longest_batch_s:
            self.longest_batch_s = now - self._batch_begun
            self._check()
        self._batch_begun = now

    def saved(self, begun: float, now: float) -> None:
        """The ranks have written a checkpoint; that counts to no batch."""
        self._batch_begun = now
        self.completed(begun, now)

    def completed(self, begun: float, now: float) -> None:
        """A checkpoint is complete: a stop waits that long. From any thread."""
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
