"""A batch of episodes on a rank: it goes its own way, and meets the others when it is done."""

import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
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
POLL_S = 0.2  # how often the main thread, if no call comes, looks whether the job has failed elsewhere
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    batch_s: float
    """Of a batch, from when training asks for it to the end of its last episode, without what engines took to
    return."""
    turn_s: float
    """Of one turn, in the engines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _End(Wire):
    """What a rank says when it is done, or cannot go on for now."""

    report: EpisodesReport | None = None
    stalled: Stalled | None = None


class EpisodeBatches:
    """Runs batches of episodes; every rank has one, and `run` is collective over the job.

    A rank's episodes run in threads and event loops that no other rank waits for. Its main thread runs the tools
    that belong there, and sees to what all ranks have to do together: the end of the batch, and the return of engines
    that a node has lost.

    Args:
        revive: brings new engines, with weights, to nodes whose engines are all gone; collective over the job.
        main: runs what the episodes call in the main thread, while that waits for them.
    """

    def __init__(
        self,
        channel: TurnChannel,
        groups: NodeGroups,
        watch: FailureWatch,
        limits: BatchLimits,
        *,
        revive: Callable[[], None],
        main: MainThread,
    ) -> None:
        self._channel = channel
        self._groups, self._watch, self._limits = groups, watch, limits
        self._revive, self._main = revive, main
        self._asked: Callable[[], Collection[Future[Answer]]] = tuple
        self._pending: Callable[[], str] = str
        self._since = self._until = 0.0
        """time.monotonic(): since when the ranks wait for the batch, and when it has to have ended."""
        self._limited = ExitStack()
        """The limit on code that runs in the main thread."""
        self._trouble: BaseException | None = None
        """What `look` has raised, which that code may have caught."""

    def run(
        self,
        start: "Callable[[], Future[Result]]",
        report: Callable[[Result], EpisodesReport],
        move: Callable[[NeedsMainThreadError], None] | None = None,
        *,
        asked: "Callable[[], Collection[Future[Answer]]]",
        pending: Callable[[], str],
    ) -> tuple[Result, list[EpisodesReport]]:
        """Have this rank's episodes, and meet the others at their end.

        Args:
            start: begins, or has begun before; the episodes end with the future.
            report: of this rank, made of what the future brings.
            move: sees to it that the next `start` ends in the main thread, where the future of the first has found
                that it has to (`call_here`).
            asked: turns of it that are not answered.
            pending: what its own code waits for, in words.

        Returns:
            What the future brings, and the reports of all ranks, in rank order.

        Raises:
            JobFailed: the job has failed elsewhere.
            TimeoutError: a limit was reached; says by what.
            Exception: what the future brings instead.
        """
        self._main.begin()
        self._asked, self._pending = asked, pending
        self._since = time.monotonic()
        self._until = self._since + self._limits.batch_s
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
            if self._channel.is_gone:  # the consequence of a death that has a record
                self._watch.await_cause()
                self._watch.check()
            raise

    def call_here(self, call: Callable[[], Result]) -> "Future[Result]":
        """Inside of `start`: a call in this thread, which has `look` called while it waits. Its future has ended."""
        done: Future[Result] = Future()
        with self._limited:
            self._limited.enter_context(self._limit())
            done.set_result(call())
        if self._trouble is not None:
            raise self._trouble
        return done

    def look(self) -> None:
        """From `call_here`: what the main thread sees to while it waits. Collective over the job if the node has lost
        its last engine."""
        if self._trouble is not None:
            raise self._trouble
        try:
            self._watch.check()
            if self._channel.is_stalled:
                self._limited.close()
                self._go_on(None)
                self._limited.enter_context(self._limit())
            self._check_limits()
        except BaseException as error:
            self._trouble = error
            raise

    def _go_on(self, mine: EpisodesReport | None) -> list[EpisodesReport]:
        """As `_meet`; if there is nothing, the nodes have engines again, and the batch as much time as before."""
        begun = time.monotonic()
        if not (reports := self._meet(mine)):
            self._revive()
            self._until += time.monotonic() - begun
        return reports

    def _limit(self) -> AbstractContextManager[None]:
        """Above what the main thread looks at by itself: for code that holds the interpreter's lock."""
        cause = f"a batch of episodes has not ended after {self._limits.batch_s:g} s (rollout_timeout)"
        return self._watch.limits.around(PHASE, max(0.0, self._until - time.monotonic()) + MARGIN_S, cause)

    def _wait(self, future: "Future[Any]") -> bool:
        """Until the episodes have ended, or the node has no engine left."""
        future.add_done_callback(lambda done: self._main.wake())
        with self._limit():
            while True:
                self._watch.check()
                if future.done():
                    return True
                if self._channel.is_stalled:
                    return False
                self._check_limits()
                self._main.serve(POLL_S, left_s=self._until - time.monotonic(), check=self._check)

    def _check(self) -> None:
        self._watch.check()
        self._check_limits()

    def _check_limits(self) -> None:
        slowest = self._channel.slowest(self._asked(), self._since)
        if slowest is not None and slowest[0] > self._limits.turn_s and not self._channel.is_stalled:
            raise TimeoutError(
                f"the engines of node {self._watch.node} have not answered {slowest[1]} after "
                f"{self._limits.turn_s:g} s (vllm_generate_timeout)"
            )
        if time.monotonic() > self._until:
            waits = f"{slowest[1]}, which an engine samples" if slowest else self._pending() or "the rollout's own code"
            raise TimeoutError(
                f"a batch of episodes has not ended after {self._limits.batch_s:g} s (rollout_timeout) "
                f"[GRPO-608]; it waits for {waits}"
            )

    def _meet(self, mine: EpisodesReport | None) -> list[EpisodesReport]:
        """The reports of all ranks, or nothing if a node has no engine left."""
        trouble = self._channel.trouble
        record = None if trouble is None else self._watch.make_record(trouble)
        end = _End(report=mine, stalled=Stalled(for_good=record) if mine is None or record is not None else None)
        ends = self._groups.exchange(self._watch, None, end, _End)
        for each in ends:
            if each.stalled is not None and each.stalled.for_good is not None:
                raise StepFailed(each.stalled.for_good)
        reports = [each.report for each in ends if each.report is not None]
        return reports if len(reports) == len(ends) else []
