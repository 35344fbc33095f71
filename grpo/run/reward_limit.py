"""Reward functions with a deadline: code of the user's, which may wait for a service, a lock or a child for good."""

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from torch import nn
from trl.trainer.utils import get_callable_name, is_async_callable

from grpo.job.watch import FailureWatch
from grpo.timeline.recorder import Recorder
from grpo.timeline.records import SCORE

PHASE = "reward"


def limited_rewards(
    funcs: Sequence[Any], watch: FailureWatch, timeout_s: float, timeline: Recorder | None = None
) -> list[Any]:
    """Reward functions as TRL calls them (1.16), in a phase of their own; past the deadline the job has failed.

    Only the functions: a rank that waits for the rewards of another one is in TRL's code. Models are left as they are.

    Args:
        timeout_s: of one call; of all calls that are awaited together, where functions are `async`.
        timeline: where each call is recorded; of `async` functions, which overlap, on a lane of their own.
    """
    timeline = timeline or Recorder()
    together = _Together(watch, timeout_s, timeline)
    limited: list[Any] = []
    for func in funcs:
        if isinstance(func, nn.Module):
            limited.append(func)
        elif is_async_callable(func):
            limited.append(together.around(func))
        else:
            limited.append(_around(func, watch, timeout_s, timeline))
    return limited


def _cause(name: str, timeout_s: float) -> str:
    return f"reward function {name} has not returned within {timeout_s:g} s (reward_timeout)"


def _around(func: Callable[..., Any], watch: FailureWatch, timeout_s: float, timeline: Recorder) -> Callable[..., Any]:
    name = get_callable_name(func)
    cause = _cause(name, timeout_s)

    @functools.wraps(func, updated=())
    def limited(*args: Any, **kwargs: Any) -> Any:
        with timeline.span(SCORE, name=name), watch.limited(PHASE, timeout_s, cause):
            return func(*args, **kwargs)

    return limited


class _Together:
    """Functions that are awaited in one event loop, side by side: a process has one deadline at a time."""

    def __init__(self, watch: FailureWatch, timeout_s: float, timeline: Recorder) -> None:
        self._watch, self._timeout_s, self._timeline = watch, timeout_s, timeline
        self._names: list[str] = []
        self._running = 0
        self._limit = ExitStack()

    def around(self, func: Callable[..., Any]) -> Callable[..., Any]:
        name = get_callable_name(func)
        self._names.append(name)

        @functools.wraps(func, updated=())
        async def limited(*args: Any, **kwargs: Any) -> Any:
            if not self._running:
                cause = _cause(" or ".join(self._names), self._timeout_s)
                self._limit.enter_context(self._watch.limited(PHASE, self._timeout_s, cause))
            self._running += 1
            try:
                with self._timeline.span(SCORE, f"reward {name}", name=name):
                    return await func(*args, **kwargs)
            finally:
                self._running -= 1
                if not self._running:
                    self._limit.close()

        return limited
