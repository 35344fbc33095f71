"""A generation batch's way through a node: prompts up to the local main, out to the engines, completions down again."""

import time
from dataclasses import dataclass

from grpo.engine.client import EngineError
from grpo.job.failure import FailureRecord, JobFailed
from grpo.job.node_groups import NodeGroups
from grpo.job.topology import NodeTopology
from grpo.job.watch import FailureWatch
from grpo.rollout.balance import NodeBalance, Shares
from grpo.rollout.packing import (
    Completions,
    PackedRows,
    check_prompt_lengths,
    collapse,
    concat_rows,
    from_message,
    pack_rows,
    rows_from_message,
    rows_to_message,
    split_completions,
    to_lists,
    to_message,
)
from grpo.rollout.pool import Batch, EnginePool


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationReport:
    """What one generation batch cost a node."""

    generate_s: float
    """From its submission to its last completion, in the engines."""
    wait_s: float
    """Of these, the seconds in which the ranks did nothing but wait for it."""
    idle_s: float
    """Since the batch before, the seconds in which an engine had neither anything to sample nor weights to load; mean
    over the node's engines."""
    period_s: float | None
    """Since the batch before was collected, whatever was done; None for the first."""
    num_tokens: int
    """Completion tokens that the node's engines sampled."""

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.generate_s if self.num_tokens else 0.0


@dataclass(slots=True, kw_only=True, eq=False)
class Rollout:
    """A generation batch on its way, as one rank sees it."""

    prompts: list[list[int]]
    """Token ids of this rank's rows."""
    rows_by_rank: list[int] | None = None
    """Of the node's ranks; on the local main."""
    shares: Shares | None = None
    """What is sampled where; on the local main, with `vllm_balance_nodes`."""
    batch: Batch | None = None
    """On the local main, unless it failed before anything was sent."""
    failure: FailureRecord | None = None
    cause: Exception | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sampled:
    """The completions of one rank's rows."""

    completion_ids: list[list[int]]
    engine_logprobs: list[list[float]]
    """Natural log, one for each token."""
    reports: list[GenerationReport]
    """Of each node."""


class NodeSampler:
    """Samples generation batches on the node's engines. Every rank has one.

    Args:
        pool: on the local main.
        max_model_len: tokens of prompt and completion that an engine holds; on the local main.
        balance_nodes: whether prompts may be sampled on other nodes, see `grpo.rollout.balance`.
    """

    def __init__(
        self,
        groups: NodeGroups,
        watch: FailureWatch,
        topology: NodeTopology,
        pool: EnginePool | None,
        *,
        max_model_len: int,
        max_tokens: int,
        timeout_s: float,
        balance_nodes: bool = False,
    ) -> None:
        self._groups = groups
        self._watch = watch
        self._topology = topology
        self._pool = pool
        self._max_model_len = max_model_len
        self._max_tokens = max_tokens
        self._timeout_s = timeout_s
        self._balance = NodeBalance(groups) if balance_nodes and pool is not None and topology.num_nodes > 1 else None
        self._collected_at: float | None = None

    def submit(self, prompts: list[list[int]], base_seed: int) -> Rollout:
        """Start sampling one completion for each prompt of this rank. Collective over the node; over the job with
        `balance_nodes`.

        What fails here is raised by `collect`, on every rank of the job.

        Args:
            prompts: token ids, with the copies of a prompt next to each other over the node's ranks.
            base_seed: see `grpo.rollout.packing.seed_base`; the same on every rank of the job.
        """
        messages = self._groups.gather(rows_to_message(pack_rows(prompts)))
        rollout = Rollout(prompts=prompts)
        if self._pool is None:
            return rollout
        assert messages is not None
        parts = [rows_from_message(message) for message in messages]
        rollout.rows_by_rank = [part.num_rows for part in parts]
        requests = None
        try:
            self._check_lengths(parts)
            requests = collapse(concat_rows(parts), base_seed, self._topology.node)
        except ValueError as error:
            rollout.failure, rollout.cause = self._watch.make_record(error), error
        if self._balance is not None:
            rollout.shares = self._balance.share_out(requests)
        if rollout.failure is None:
            assert requests is not None
            rollout.batch = self._pool.submit(rollout.shares.sampled if rollout.shares is not None else requests)
        return rollout

    def _check_lengths(self, parts: list[PackedRows]) -> None:
        first_row = 0
        for part in parts:
            check_prompt_lengths(
                part, max_model_len=self._max_model_len, max_tokens=self._max_tokens, first_row=first_row
            )
            first_row += part.num_rows

    def collect(self, rollout: Rollout) -> Sampled:
        """Wait for the completions. Collective over the job; data stays in the node.

        Raises:
            JobFailed: on every rank, when an engine failed on any node.
        """
        begun = time.monotonic()
        completions, report = None, None
        if rollout.batch is not None:
            assert self._pool is not None
            try:
                completions = self._pool.collect(rollout.batch, self._timeout_s, self._watch.check)
                report = self._report(rollout.batch, completions, begun)
            except EngineError as error:
                rollout.failure, rollout.cause = self._watch.make_record(error), error
            except BaseException:  # an interrupted notebook cell, too
                self._pool.drop(rollout.batch)
                raise
        # Over all nodes, on gloo: a node that is done early waits here, and not in a collective of the training's
        # NCCL group, whose watchdog would shoot it. And the status goes before the data.
        try:
            reports = self._groups.exchange(self._watch, rollout.failure, report)
        except JobFailed as failed:
            raise failed from rollout.cause
        of_nodes = [report for report in reports if report is not None]
        messages = None
        if rollout.rows_by_rank is not None:
            assert completions is not None
            if self._balance is not None:
                assert rollout.shares is not None
                self._balance.note([report.tokens_per_s for report in of_nodes])
                completions = self._balance.bring_back(rollout.shares, completions)
            messages = [to_message(part) for part in split_completions(completions, rollout.rows_by_rank)]
        own = from_message(self._groups.scatter(messages), len(rollout.prompts))
        completion_ids, logprob_rows = to_lists(own)
        return Sampled(
            completion_ids=completion_ids,
            engine_logprobs=logprob_rows,
            reports=of_nodes,
        )

    def _report(self, batch: Batch, completions: Completions, begun: float) -> GenerationReport:
        assert self._pool is not None
        now = time.monotonic()
        before, self._collected_at = self._collected_at, now
        return GenerationReport(
            generate_s=batch.seconds,
            wait_s=now - begun,
            idle_s=self._pool.take_idle_s(),
            period_s=None if before is None else now - before,
            num_tokens=len(completions.token_ids),
        )

    def drop(self, rollout: Rollout) -> None:
        """Forget a batch that nobody will collect. Not collective."""
        if rollout.batch is not None and self._pool is not None:
            self._pool.drop(rollout.batch)
