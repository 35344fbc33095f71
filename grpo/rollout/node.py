"""A generation batch on a node: prompts to the local main, on to the engines, completions back to the ranks."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from types import MappingProxyType
from typing import Any

from grpo.engine.client import EngineError
from grpo.faults.failure import FailureKind, FailureRecord, JobFailed, StepFailed
from grpo.faults.watch import FailureWatch
from grpo.groups.node_groups import NodeGroups
from grpo.place.wire import Wire
from grpo.rollout.balance import NodeBalance, Shares
from grpo.rollout.batch import Batch
from grpo.rollout.packing import Completions, concat_completions, split_completions
from grpo.rollout.partial import Kept
from grpo.rollout.pool import EnginePool
from grpo.rollout.prompts import Prompts, collapse, concat_prompts
from grpo.rollout.report import GenerationReport, Period
from grpo.rollout.search import DeadlyRequests

NO_SAMPLING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pending:
    """A submitted generation batch, on a local main."""

    rows_by_rank: Sequence[int]
    """Number of rows of each of the node's ranks."""
    shares: Shares
    """Distribution of its requests over nodes."""
    batch: Batch
    """Requests in this node's engines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stalled(Wire):
    """A node without engines and with missing completions."""

    for_good: FailureRecord | None = None
    """Reason why it should get no engine again."""


def _none_comes() -> None:
    raise EngineError("a node has lost its last engine, and no other one is started")


@dataclass(eq=False)
class NodeSampler:
    """Samples generation batches on the node's engines. Every rank has one; a local main has a `LocalMainSampler`."""

    groups: NodeGroups
    watch: FailureWatch
    _: KW_ONLY
    revive: Callable[[], None] = _none_comes
    """Brings new engines, with weights, to nodes without any; collective over the job."""

    def submit(
        self,
        prompts: Prompts,
        base_seed: int,
        *,
        order: int = 0,
        sampling: Mapping[str, Any] = NO_SAMPLING,
        kept: Kept | None = None,
    ) -> Pending | None:
        """Start sampling one completion for each prompt of this rank. Collective over the node; over the job if prompts
        move between nodes.

        `collect` raises errors that occur here, on every rank of the job.

        Args:
            prompts: copies of a prompt are adjacent over the node's ranks. All ranks have the same number, in the order
                of the job's batch.
            base_seed: see `grpo.rollout.packing.seed_base`; the same on every rank of the job.
            order: see `Batch`.
            sampling: vLLM arguments, overriding the engines'; the same on every rank of the job.
            kept: this rank's rows of the batch from a checkpoint; on every rank, or on none.

        Returns:
            A handle to collect or drop on the local main; None on other ranks.
        """
        self.groups.gather(prompts.to_message())
        if kept is not None:
            self.groups.gather(kept.completions.to_message())
        return None

    def collect(self, pending: Pending | None) -> tuple[Completions, list[GenerationReport]]:
        """Wait for the completions. Collective over the job; data stays in the node.

        Returns:
            Completions of this rank's rows, and a report of each node.

        Raises:
            JobFailed: on every rank, if an engine failed on any node.
        """
        while not (reports := self._end_phase(None)):
            self.revive()
        return Completions.from_message(self.groups.scatter([])), reports

    def so_far(self, pending: Sequence[Pending | None]) -> list[Completions]:
        """Return this rank's rows of each batch in their present state (`Batch.so_far`); engines continue. Collective
        over the node; over the job if prompts move between nodes."""
        return [Completions.from_message(self.groups.scatter([])) for _ in pending]

    def is_finished(self, pending: Pending | None) -> bool:
        """True if all its completions are on this node."""
        return True

    def is_stuck(self, pending: Pending | None) -> bool:
        """True if `collect` would raise, or wait for new engines."""
        return False

    def drop(self, pending: Pending | None) -> None:
        """Drop a batch without collecting it. Not collective."""

    def _end_phase(self, report: GenerationReport | Stalled | None) -> list[GenerationReport]:
        """Exchange reports between all nodes; [] if one has no engine left."""
        # Over all nodes, on gloo: a node that is done early waits here, and not in a collective of training's NCCL
        # group, whose watchdog would abort it. The status is sent before the data.
        of_ranks = self.groups.exchange(self.watch, None, report, GenerationReport | Stalled | None)
        of_nodes = [each for each in of_ranks if each is not None]
        stalled = [each for each in of_nodes if isinstance(each, Stalled)]
        for each in stalled:
            if each.for_good is not None:
                raise StepFailed(each.for_good)
        return [] if stalled else of_nodes


@dataclass(eq=False)
class LocalMainSampler(NodeSampler):
    """The local main's part: samples the requests of its node's ranks."""

    pool: EnginePool
    _: KW_ONLY
    timeout_s: float
    """Time limit of a batch, from its submission."""
    balance: NodeBalance | None = None
    """Balancing between nodes, if prompts may be sampled on other nodes."""
    overlaps: bool = False
    """Several batches are in progress: then a batch's time counts from the ranks' wait for it, and the speed of engines
    from the last batch."""

    def __post_init__(self) -> None:
        self._period = Period()
        self._sampled = 0, 0.0

    def submit(
        self,
        prompts: Prompts,
        base_seed: int,
        *,
        order: int = 0,
        sampling: Mapping[str, Any] = NO_SAMPLING,
        kept: Kept | None = None,
    ) -> Pending:
        parts = [Prompts.from_message(message) for message in self.groups.gather(prompts.to_message())]
        of_node = concat_prompts(parts)
        # All ranks have the same number of rows; nodes may have different numbers of ranks.
        first_row = self.groups.topology.node_ranks.start * (of_node.rows.num_rows // len(parts))
        requests = collapse(of_node, base_seed, first_row, sampling)
        shares = Shares(asked=requests, moves=[], sampled=requests)
        if kept is not None:  # on the node that has it
            messages = self.groups.gather(kept.completions.to_message())
            whole = concat_completions([Completions.from_message(message) for message in messages])
            kept = replace(kept, completions=whole)
        elif self.balance is not None:
            shares = self.balance.share_out(requests, owed=self.pool.num_owed)
        return Pending(
            rows_by_rank=[part.rows.num_rows for part in parts],
            shares=shares,
            batch=self.pool.submit(shares.sampled, order=order, kept=kept),
        )

    def collect(self, pending: Pending | None) -> tuple[Completions, list[GenerationReport]]:
        assert pending is not None, "the local main has submitted one"
        begun, completions, report = time.monotonic(), None, None
        if self.overlaps:
            pending.batch.asked_at = begun
        while True:
            if completions is None and (completions := self._wait_for(pending)) is not None:
                report = self._report(pending, completions, begun)
            if reports := self._end_phase(report or Stalled()):
                break
            self.revive()
        assert completions is not None, "all nodes are done, but this one"
        if self.balance is not None:
            self.balance.note([report.tokens_per_s for report in reports])
            completions = self.balance.bring_back(pending.shares, completions)
        parts = split_completions(completions, pending.rows_by_rank)
        return Completions.from_message(self.groups.scatter([part.to_message() for part in parts])), reports

    def _wait_for(self, pending: Pending) -> Completions | None:
        """Wait for the node's completions; None if no engine is left for some of them."""
        try:
            return self.pool.collect(pending.batch, self.timeout_s, self.watch.check)
        except DeadlyRequests as error:
            self._end_phase(Stalled(for_good=self.watch.make_record(error)))
            raise
        except EngineError as error:
            try:
                self.groups.exchange(self.watch, self.watch.make_record(error))
            except JobFailed as failed:
                raise failed from error
            raise AssertionError("a phase that failed on this rank has ended well") from error
        except BaseException:  # an interrupted notebook cell, too
            self.drop(pending)
            raise

    def _report(self, pending: Pending, completions: Completions, begun: float) -> GenerationReport:
        refusals = pending.batch.refusals
        accounts = self.pool.accounts
        num_not_finite, not_finite = accounts.take_not_finite()
        sampled = accounts.take_sampled()
        if sampled[0]:  # at the end of training the last batches may be complete already
            self._sampled = sampled
        num_sampled, sampling_s = self._sampled
        return GenerationReport(
            generate_s=pending.batch.seconds,
            wait_s=time.monotonic() - begun,
            idle_s=accounts.take_idle_s(),
            period_s=self._period.take_s(),
            num_tokens=len(completions.token_ids),
            num_completions=completions.num_completions,
            num_reissued=self.pool.take_num_reissued(),
            newer=pending.batch.newer,
            num_sampled=num_sampled if self.overlaps or pending.batch.resumed is not None else None,
            sampling_s=sampling_s,
            num_refused=len(refusals),
            refusal=self.watch.make_record(refusals[0]) if refusals else None,
            num_not_finite=num_not_finite,
            not_finite=self.watch.make_record(not_finite, kind=FailureKind.ENGINE) if not_finite else None,
        )

    def so_far(self, pending: Sequence[Pending | None]) -> list[Completions]:
        found = []
        batches = [each for each in pending if each is not None]
        assert len(batches) == len(pending), "the local main has submitted them"
        for each, completions in zip(batches, self.pool.so_far([each.batch for each in batches]), strict=True):
            if self.balance is not None:
                completions = self.balance.bring_back(each.shares, completions)
            parts = split_completions(completions, each.rows_by_rank)
            found.append(Completions.from_message(self.groups.scatter([part.to_message() for part in parts])))
        return found

    def is_finished(self, pending: Pending | None) -> bool:
        return pending is None or pending.batch.is_finished  # None: it was resumed

    def is_stuck(self, pending: Pending | None) -> bool:
        is_late = pending is not None and time.monotonic() > pending.batch.asked_at + self.timeout_s
        return is_late or self.pool.is_in_trouble

    def drop(self, pending: Pending | None) -> None:
        if pending is not None:
            self.pool.drop(pending.batch)
