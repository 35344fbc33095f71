"""One reward function: its deadline, its timeline span, and its thread."""

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
    """Reward function, called as in TRL (1.16). A missed deadline fails the job, with the stack of the function.

    Args:
        timeout_s: of one call.
        beside: it may run outside the main thread; False: it runs where TRL calls it.
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
        self._raised = f"{self._label} failed [GRPO-623]: "

    def call_here(self, arguments: dict[str, Any]) -> list[Any]:
        """Call it in the main thread, which is blocked meanwhile."""
        with (
            self._timeline.span(SCORE, name=self.name),
            self._watch.limited(*self._limit),
            own_streams(self._label),
            exits_as_errors(self._raised, in_main_thread=True),
        ):
            return list(self._func(**arguments))

    def call_in_thread(self, arguments: dict[str, Any], limit: ExitStack) -> list[Any]:
        """Call it in any thread.

        Args:
            limit: holds the deadline; close it to stop waiting for the call.

        Raises:
            NeedsMainThreadError: its result or exception is discarded.
        """
        with self._span(), limit, noticing_main_thread():
            limit.enter_context(self._watch.limits.around(*self._limit))
            with own_streams(self._label), exits_as_errors(self._raised):
                return list(self._func(**arguments))

    async def call_async(self, arguments: dict[str, Any], limit: ExitStack) -> list[Any]:
        """Call it in an event loop; otherwise as `call_in_thread`."""
        with self._span(), limit:
            limit.enter_context(self._watch.limits.around(*self._limit))
            with own_streams(self._label), exits_as_errors(self._raised):
                return list(await self._func(**arguments))

    def _span(self) -> Any:
        return self._timeline.span(SCORE, f"{PHASE} {self.name}", name=self.name)
