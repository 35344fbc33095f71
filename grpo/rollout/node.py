"""A generation batch's way through a node: prompts up to the local main, out to the engines, completions down again."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from grpo.engine.client import EngineError
from grpo.job.failure import JobFailed
from grpo.job.node_groups import NodeGroups
from grpo.job.watch import FailureWatch
from grpo.rollout.balance import NodeBalance, Shares
from grpo.rollout.packing import (
    Completions,
    PackedRows,
    Request,
    check_prompt_lengths,
    collapse,
    concat_rows,
    split_completions,
)
from grpo.rollout.pool import Batch, EnginePool
from grpo.rollout.report import GenerationReport


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pending:
    """A generation batch on its way, as one rank sees it."""

    rows: PackedRows
    """The prompts of this rank."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PendingOnNode(Pending):
    """A generation batch on its way, as a local main sees it."""

    rows_by_rank: Sequence[int]
    """Of the node's ranks."""
    shares: Shares | None
    """What is sampled where, with `vllm_balance_nodes`."""
    batch: Batch | ValueError
    """What the engines were given; or why the prompts were refused before that."""


class NodeSampler:
    """Samples generation batches on the node's engines. Every rank has one; a local main a `LocalMainSampler`."""

    def __init__(self, groups: NodeGroups, watch: FailureWatch) -> None:
        self._groups = groups
        self._watch = watch

    def submit(self, rows: PackedRows, base_seed: int) -> Pending:
        """Start sampling one completion for each prompt of this rank. Collective over the node; over the job with
        `vllm_balance_nodes`.

        What fails here is raised by `collect`, on every rank of the job.

        Args:
            rows: the prompts, with the copies of a prompt next to each other over the node's ranks.
            base_seed: see `grpo.rollout.packing.seed_base`; the same on every rank of the job.
        """
        self._groups.gather(rows.to_message())
        return Pending(rows=rows)

    def collect(self, pending: Pending) -> tuple[Completions, list[GenerationReport]]:
        """Wait for the completions. Collective over the job; data stays in the node.

        Returns:
            Those of this rank's rows, and a report of each node.

        Raises:
            JobFailed: on every rank, when an engine failed on any node.
        """
        reports = self._end_phase(None)
        return Completions.from_message(self._groups.scatter([])), reports

    def drop(self, pending: Pending) -> None:
        """Forget a batch that nobody will collect. Not collective."""

    def _end_phase(self, report: GenerationReport | None) -> list[GenerationReport]:
        # Over all nodes, on gloo: a node that is done early waits here, and not in a collective of the training's
        # NCCL group, whose watchdog would shoot it. And the status goes before the data.
        reports = self._groups.exchange(self._watch, None, report)
        return [report for report in reports if report is not None]


class LocalMainSampler(NodeSampler):
    """The local main's side: what its node's ranks ask for, it has sampled.

    Args:
        max_model_len: tokens of prompt and completion that an engine holds.
        max_tokens: of a completion.
        timeout_s: of a batch, from its submission on.
        balance_nodes: whether prompts may be sampled on other nodes, see `grpo.rollout.balance`.
    """

    def __init__(
        self,
        groups: NodeGroups,
        watch: FailureWatch,
        pool: EnginePool,
        *,
        max_model_len: int,
        max_tokens: int,
        timeout_s: float,
        balance_nodes: bool = False,
    ) -> None:
        super().__init__(groups, watch)
        self._pool = pool
        self._max_model_len = max_model_len
        self._max_tokens = max_tokens
        self._timeout_s = timeout_s
        self._balance = NodeBalance(groups) if balance_nodes and groups.topology.num_nodes > 1 else None
        self._collected_at: float | None = None

    def submit(self, rows: PackedRows, base_seed: int) -> PendingOnNode:
        parts = [PackedRows.from_message(message) for message in self._groups.gather(rows.to_message())]
        requests: list[Request] | None = None
        refusal: ValueError | None = None
        try:
            self._check_lengths(parts)
            requests = collapse(concat_rows(parts), base_seed, self._groups.topology.node)
        except ValueError as error:
            refusal = error
        shares = None if self._balance is None else self._balance.share_out(requests)
        sampled = (requests or []) if shares is None else shares.sampled
        return PendingOnNode(
            rows=rows,
            rows_by_rank=[part.num_rows for part in parts],
            shares=shares,
            batch=refusal or self._pool.submit(sampled),
        )

    def _check_lengths(self, parts: Sequence[PackedRows]) -> None:
        first_row = 0
        for part in parts:
            check_prompt_lengths(
                part, max_model_len=self._max_model_len, max_tokens=self._max_tokens, first_row=first_row
            )
            first_row += part.num_rows

    def collect(self, pending: Pending) -> tuple[Completions, list[GenerationReport]]:
        assert isinstance(pending, PendingOnNode)
        begun = time.monotonic()
        try:
            if isinstance(pending.batch, ValueError):
                raise pending.batch
            completions = self._pool.collect(pending.batch, self._timeout_s, self._watch.check)
        except (EngineError, ValueError) as error:
            self._fail_phase(error)
        except BaseException:  # an interrupted notebook cell, too
            self.drop(pending)
            raise
        reports = self._end_phase(self._report(pending.batch, completions, begun))
        if self._balance is not None and pending.shares is not None:
            self._balance.note([report.tokens_per_s for report in reports])
            completions = self._balance.bring_back(pending.shares, completions)
        parts = split_completions(completions, pending.rows_by_rank)
        return Completions.from_message(self._groups.scatter([part.to_message() for part in parts])), reports

    def _fail_phase(self, error: Exception) -> NoReturn:
        try:
            self._groups.exchange(self._watch, self._watch.make_record(error))
        except JobFailed as failed:
            raise failed from error
        raise AssertionError("a phase that failed on this rank has ended well")

    def _report(self, batch: Batch, completions: Completions, begun: float) -> GenerationReport:
        now = time.monotonic()
        before, self._collected_at = self._collected_at, now
        return GenerationReport(
            generate_s=batch.seconds,
            wait_s=now - begun,
            idle_s=self._pool.take_idle_s(),
            period_s=None if before is None else now - before,
            num_tokens=len(completions.token_ids),
        )

    def drop(self, pending: Pending) -> None:
        if isinstance(pending, PendingOnNode) and isinstance(pending.batch, Batch):
            self._pool.drop(pending.batch)
