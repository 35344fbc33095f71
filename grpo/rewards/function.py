"""One reward function: its deadline, its place on the timeline, and whether it can run beside the main thread."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from trl.trainer.utils import get_callable_name, is_async_callable

from grpo.job.watch import FailureWatch
from grpo.rewards.declared import unit_of
from grpo.timeline.recorder import Recorder
from grpo.timeline.records import SCORE

PHASE = "reward"
_set_handler: Any = signal.signal
_noticed: dict[int, list[int]] = {}
"""By thread: of which signals it has tried to set the handlers."""


class NeedsMainThreadError(Exception):
    """The function does what only the main thread may, so what it brought in another one does not count."""


class RewardFunction:
    """A function as TRL calls it (1.16); past the deadline the job has failed, and shows where the function was.

    Args:
        timeout_s: of one call.
        beside: whether it may run beside the main thread; False: it runs where TRL calls it.
    """

    def __init__(
        self, func: Callable[..., Any], watch: FailureWatch, timeout_s: float, timeline: Recorder, *, beside: bool
    ) -> None:
        self.name = get_callable_name(func)
        self.is_async = is_async_callable(func)
        self.unit = unit_of(func)
        self.runs_beside = beside
        self._func, self._watch, self._timeline = func, watch, timeline
        cause = f"reward function {self.name} has not returned within {timeout_s:g} s (reward_timeout)"
        self._limit = PHASE, timeout_s, cause

    def now(self, arguments: dict[str, Any]) -> Any:
        """In the main thread, which does nothing else meanwhile."""
        with self._timeline.span(SCORE, name=self.name), self._watch.limited(*self._limit):
            return self._func(**arguments)

    def in_thread(self, arguments: dict[str, Any]) -> Any:
        """In any thread.

        Raises:
            NeedsMainThreadError: and what it brings, or raises, is of no worth.
        """
        with _noticing_signals() as noticed, self._span(), self._watch.limits.around(*self._limit):
            try:
                rewards = self._func(**arguments)
            except Exception as error:
                if _is_about_threads(error):
                    raise NeedsMainThreadError(f"{type(error).__name__}: {error}") from error
                raise
            if noticed:
                raise NeedsMainThreadError("it sets a handler of signals")
            return rewards

    async def awaited(self, arguments: dict[str, Any]) -> Any:
        """In an event loop."""
        with self._span(), self._watch.limits.around(*self._limit):
            return await self._func(**arguments)

    def _span(self) -> Any:
        return self._timeline.span(SCORE, f"{PHASE} {self.name}", name=self.name)


def _is_about_threads(error: BaseException | None) -> bool:
    """Whether the error, or what has led to it, speaks of threads: that signals, a connection of SQLite or an event
    loop belong to another one."""
    while error is not None:
        if "thread" in str(error).lower():
            return True
        error = error.__cause__ or error.__context__
    return False


@contextlib.contextmanager
def _noticing_signals() -> Iterator[list[int]]:
    """The signals whose handlers this thread tries to set, which raises; code that sets an alarm may swallow that, and
    take every answer for a wrong one."""
    me = threading.get_ident()
    _noticed[me] = []
    vars(signal)["signal"] = _note
    try:
        yield _noticed[me]
    finally:
        del _noticed[me]
        if not _noticed and vars(signal)["signal"] is _note:
            vars(signal)["signal"] = _set_handler


def _note(number: int, handler: Any) -> Any:
    if (found := _noticed.get(threading.get_ident())) is not None:
        found.append(number)
    return _set_handler(number, handler)
