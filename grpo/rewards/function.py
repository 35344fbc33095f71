"""One reward function: its deadline, its place on the timeline, and whether it can run beside the main thread."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from trl.trainer.utils import get_callable_name, is_async_callable

from grpo.faults.users_code import exits_as_errors, noticing_main_thread, own_streams
from grpo.faults.watch import FailureWatch
from grpo.record.timeline.recorder import Recorder
from grpo.record.timeline.records import SCORE
from grpo.rewards.declared import declared_of

PHASE = "reward"


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
        self.unit, self.scores_ahead = declared_of(func)
        self.runs_beside = beside
        self._func, self._watch, self._timeline = func, watch, timeline
        cause = f"reward function {self.name} has not returned within {timeout_s:g} s (reward_timeout) [GRPO-607]"
        self._limit = PHASE, timeout_s, cause
        self._label = f"reward function {self.name}"
        self._raised = f"{self._label} raised "

    def call_here(self, arguments: dict[str, Any]) -> list[Any]:
        """In the main thread, which does nothing else meanwhile."""
        with (
            self._timeline.span(SCORE, name=self.name),
            self._watch.limited(*self._limit),
            own_streams(self._label),
            exits_as_errors(self._raised, in_main_thread=True),
        ):
            return list(self._func(**arguments))

    def call_in_thread(self, arguments: dict[str, Any], limit: ExitStack) -> list[Any]:
        """In any thread.

        Args:
            limit: holds the deadline; whoever closes it waits for the call no more.

        Raises:
            NeedsMainThreadError: and what it brings, or raises, is of no worth.
        """
        with self._span(), limit, noticing_main_thread():
            limit.enter_context(self._watch.limits.around(*self._limit))
            with own_streams(self._label), exits_as_errors(self._raised):
                return list(self._func(**arguments))

    async def call_async(self, arguments: dict[str, Any], limit: ExitStack) -> list[Any]:
        """In an event loop; otherwise as `call_in_thread`."""
        with self._span(), limit:
            limit.enter_context(self._watch.limits.around(*self._limit))
            with own_streams(self._label), exits_as_errors(self._raised):
                return list(await self._func(**arguments))

    def _span(self) -> Any:
        return self._timeline.span(SCORE, f"{PHASE} {self.name}", name=self.name)
