"""A rank's batch of multi-turn rollouts: runs independently, and joins the other ranks at its end."""

import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack
from dataclasses import KW_ONLY, dataclass
from typing import Any, TypeVar

from grpo.faults.failure import StepFailed
from grpo.faults.users_code import NeedsMainThreadError
from grpo.faults.watch import FailureWatch
from grpo.groups.node_groups import MARGIN_S, NodeGroups
from grpo.place.wire import Wire
from grpo.rollout.node import Stalled
from grpo.rollout.turns.channel import TurnChannel
from grpo.rollout.turns.main_calls import MainThread
from grpo.rollout.turns.messages import Answer
from grpo.rollout.turns.report import EpisodesReport

PHASE = "rollout"
POLL_S = 0.2  # interval at which an idle main thread checks for a failure elsewhere
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    batch_s: float
    """Time limit of a batch, from training's request to the end of its last episode, without the restart of engines."""
    turn_s: float
    """Time limit of one turn, in the engines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _End(Wire):
    """Message of a rank that is done, or cannot continue for now."""

    report: EpisodesReport | None = None
    stalled: Stalled | None = None


@dataclass(eq=False)
class EpisodeBatches:
    """Runs batches of episodes; every rank has one, and `run` is collective over the job.

    A rank's episodes run in threads and event loops that no other rank waits for. Its main thread runs the tools that
    require it, and handles the joint steps of all ranks: the end of the batch, and the return of lost engines.
    """

    channel: TurnChannel
    groups: NodeGroups
    watch: FailureWatch
    limits: BatchLimits
    _: KW_ONLY
    revive: Callable[[], None]
    """Brings new engines, with weights, to nodes without any; collective over the job."""
    main: MainThread
    """Runs the episodes' calls in the main thread while it waits for them."""

    def __post_init__(self) -> None:
        self._asked: Callable[[], Collection[Future[Answer]]] = tuple
        self._pending: Callable[[], str] = str
        self._since = self._until = 0.0
        """Start of the ranks' wait for the batch, and its deadline, by time.monotonic()."""
        self._limited = ExitStack()
        """Time limit of code in the main thread."""
        self._trouble: BaseException | None = None
        """Exception from `look`, in case the code has caught it."""

    def run(
        self,
        start: "Callable[[], Future[Result]]",
        report: Callable[[Result], EpisodesReport],
        move: Callable[[NeedsMainThreadError], None] | None = None,
        *,
        asked: "Callable[[], Collection[Future[Answer]]]",
        pending: Callable[[], str],
    ) -> tuple[Result, list[EpisodesReport]]:
        """Run this rank's episodes, and join the other ranks at their end.

        Args:
            start: starts the episodes, unless they have begun before; returns their future.
            report: makes this rank's report from the future's result.
            move: prepares the next `start` for the main thread (`call_here`), after the first future failed because it
                needs the main thread.
            asked: returns its unanswered turns.
            pending: describes the calls its own code waits for.

        Returns:
            The future's result, and the reports of all ranks, in rank order.

        Raises:
            JobFailed: the job has failed elsewhere.
            TimeoutError: a limit was reached; has the cause.
            Exception: raised by the future.
        """
        self.main.begin()
        self._asked, self._pending = asked, pending
        self._since = time.monotonic()
        self._until = self._since + self.limits.batch_s
        self._trouble = None
        future: Future[Result] = Future()
        try:
            future = start()
            mine: EpisodesReport | None = None
            while True:
                if mine is None and self._wait(future):
                    if isinstance(error := future.exception(), NeedsMainThreadError) and move is not None:
                        move(error)
                        future = start()
                    mine = report(future.result())
                if reports := self._go_on(mine):
                    return future.result(), reports
        except BaseException:
            future.cancel()
            if self.channel.is_gone:  # a consequence of a death that has a record
                self.watch.await_cause()
                self.watch.check()
            raise

    def call_here(self, call: Callable[[], Result]) -> "Future[Result]":
        """Run a call in this thread, inside `start`; it calls `look` while it waits. The returned future is done."""
        done: Future[Result] = Future()
        with self._limited:
            self._limited.enter_context(self._limit())
            done.set_result(call())
        if self._trouble is not None:
            raise self._trouble
        return done

    def look(self) -> None:
        """Check limits and failures while code from `call_here` waits. Collective over the job if the node has lost its
        last engine."""
        if self._trouble is not None:
            raise self._trouble
        try:
            self.watch.check()
            if self.channel.is_stalled:
                self._limited.close()
                self._go_on(None)
                self._limited.enter_context(self._limit())
            self._check_limits()
        except BaseException as error:
            self._trouble = error
            raise

    def _go_on(self, mine: EpisodesReport | None) -> list[EpisodesReport]:
        """Call `_meet`; if it returns nothing, wait for new engines, and extend the batch's deadline by that time."""
        begun = time.monotonic()
        if not (reports := self._meet(mine)):
            self.revive()
            self._until += time.monotonic() - begun
        return reports

    def _limit(self) -> AbstractContextManager[None]:
        """Time limit beyond the main thread's own checks: for code that holds the GIL."""
        cause = f"a batch of episodes has not ended after {self.limits.batch_s:g} s (rollout_timeout)"
        return self.watch.limits.around(PHASE, max(0.0, self._until - time.monotonic()) + MARGIN_S, cause)

    def _wait(self, future: "Future[Any]") -> bool:
        """Wait until the episodes have ended; False if the node has no engine left."""
        future.add_done_callback(lambda done: self.main.wake())
        with self._limit():
            while True:
                self.watch.check()
                if future.done():
                    return True
                if self.channel.is_stalled:
                    return False
                self._check_limits()
                self.main.serve(POLL_S, left_s=self._until - time.monotonic(), check=self._check)

    def _check(self) -> None:
        self.watch.check()
        self._check_limits()

    def _check_limits(self) -> None:
        slowest = self.channel.slowest(self._asked(), self._since)
        if slowest is not None and slowest[0] > self.limits.turn_s and not self.channel.is_stalled:
            raise TimeoutError(
                f"the engines of node {self.watch.node} have not answered {slowest[1]} after "
                f"{self.limits.turn_s:g} s (vllm_generate_timeout)"
            )
        if time.monotonic() > self._until:
            waits = f"{slowest[1]}, which an engine samples" if slowest else self._pending() or "the rollout's own code"
            raise TimeoutError(
                f"a batch of episodes has not ended after {self.limits.batch_s:g} s (rollout_timeout) "
                f"[GRPO-608]; it waits for {waits}"
            )

    def _meet(self, mine: EpisodesReport | None) -> list[EpisodesReport]:
        """Exchange the reports of all ranks; [] if a node has no engine left."""
        trouble = self.channel.trouble
        record = None if trouble is None else self.watch.make_record(trouble)
        end = _End(report=mine, stalled=Stalled(for_good=record) if mine is None or record is not None else None)
        ends = self.groups.exchange(self.watch, None, end, _End)
        for each in ends:
            if each.stalled is not None and each.stalled.for_good is not None:
                raise StepFailed(each.stalled.for_good)
        reports = [each.report for each in ends if each.report is not None]
        return reports if len(reports) == len(ends) else []
