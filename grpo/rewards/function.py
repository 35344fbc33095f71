"""One reward function: its deadline, its place on the timeline, and whether it can run beside the main thread."""

import contextlib
import functools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

from trl.trainer.utils import get_callable_name, is_async_callable

from grpo.faults.foreign import with_causes
from grpo.faults.watch import FailureWatch
from grpo.faults.worker import exits_as_errors
from grpo.record.timeline.recorder import Recorder
from grpo.record.timeline.records import SCORE
from grpo.rewards.declared import unit_of

PHASE = "reward"
_PATCHED = ("signal", "alarm", "setitimer")
_originals: dict[str, Any] = {}
_patching = threading.Lock()
_noticed: dict[int, list[str]] = {}
"""By thread: what it has tried to do with signals."""


def _forget_in_child() -> None:
    """A forked child, of a pool that a reward function has, say: signals are its own, and nobody holds the lock."""
    global _patching
    _patching = threading.Lock()
    _noticed.clear()
    vars(signal).update(_originals)


os.register_at_fork(after_in_child=_forget_in_child)

_MAIN_THREAD = ("main thread", "same thread", "event loop in thread", "threaded environment")
"""What errors say of code that another thread may not run: signals, SQLite, asyncio, verifiers of mathematics."""


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
        cause = f"reward function {self.name} has not returned within {timeout_s:g} s (reward_timeout) [GRPO-607]"
        self._limit = PHASE, timeout_s, cause
        self._told = f"reward function {self.name} raised "

    def call_here(self, arguments: dict[str, Any]) -> list[Any]:
        """In the main thread, which does nothing else meanwhile."""
        with (
            self._timeline.span(SCORE, name=self.name),
            self._watch.limited(*self._limit),
            exits_as_errors(self._told, in_main_thread=True),
        ):
            return list(self._func(**arguments))

    def call_in_thread(self, arguments: dict[str, Any], limit: ExitStack) -> list[Any]:
        """In any thread.

        Args:
            limit: holds the deadline; whoever closes it waits for the call no more.

        Raises:
            NeedsMainThreadError: and what it brings, or raises, is of no worth.
        """
        with _noticing_signals() as noticed, self._span(), limit:
            limit.enter_context(self._watch.limits.around(*self._limit))
            try:
                with exits_as_errors(self._told):
                    rewards = list(self._func(**arguments))
            except Exception as error:
                if noticed or _is_of_main_thread(error):
                    raise NeedsMainThreadError(f"{type(error).__name__}: {error}") from error
                raise
            if noticed:
                raise NeedsMainThreadError(f"it calls signal.{noticed[0]}")
            return rewards

    async def call_async(self, arguments: dict[str, Any], limit: ExitStack) -> list[Any]:
        """In an event loop; otherwise as `call_in_thread`."""
        with self._span(), limit:
            limit.enter_context(self._watch.limits.around(*self._limit))
            with exits_as_errors(self._told):
                return list(await self._func(**arguments))

    def _span(self) -> Any:
        return self._timeline.span(SCORE, f"{PHASE} {self.name}", name=self.name)


def _is_of_main_thread(error: BaseException) -> bool:
    """Whether the error, or what has led to it, says that only the main thread may do this."""
    return any(words in str(cause) for cause in with_causes(error) for words in _MAIN_THREAD)


@contextlib.contextmanager
def _noticing_signals() -> Iterator[list[str]]:
    """What this thread tries to do with signals, which raises. Code that sets an alarm may swallow that, and take every
    answer for a wrong one; the alarm itself would strike the main thread."""
    me = threading.get_ident()
    with _patching:
        if not _noticed:
            _originals.update({name: getattr(signal, name) for name in _PATCHED})
            vars(signal).update({name: functools.partial(_note, name) for name in _PATCHED})
        found = _noticed[me] = []
    try:
        yield found
    finally:
        with _patching:
            _noticed.pop(me, None)
            if not _noticed:
                vars(signal).update(_originals)


def _note(name: str, *arguments: Any) -> Any:
    if (found := _noticed.get(threading.get_ident())) is not None:
        found.append(name)
        raise ValueError("signal only works in main thread of the main interpreter")
    return _originals[name](*arguments)
