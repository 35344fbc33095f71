"""A rank's conversations put together: who brings its turns to the engines, its seeds, and what a batch leaves."""

import contextlib
import logging
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from grpo.faults.failure import FailureKind
from grpo.faults.users_code import NeedsMainThreadError, Worker, exits_as_errors, noticing_main_thread, own_streams
from grpo.faults.watch import FailureWatch
from grpo.groups.node_groups import NodeGroups
from grpo.place.log import EVERY_RANK
from grpo.rollout.ahead import GenerationBatch, GenerationBatches, PolicyLag
from grpo.rollout.packing import REFUSED, engine_id, pack_completions
from grpo.rollout.pool import EnginePool
from grpo.rollout.report import Period
from grpo.rollout.turns.batch import Conversations, Limits
from grpo.rollout.turns.broker import TurnBroker
from grpo.rollout.turns.channel import TurnChannel
from grpo.rollout.turns.report import ConversationReport, conversation_metrics, of_nodes, serial_tools
from grpo.rollout.turns.rollouts import Rollouts
from grpo.rollout.turns.sampler import Sampler
from grpo.rollout.turns.talk import Talk

Result = TypeVar("Result")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """What came of one of the rank's prompts."""

    token_ids: Sequence[int]
    """[T], what tools said included."""
    logprobs: Sequence[float] | np.ndarray
    """[T]"""
    refusal: str | None = None
    """Why no engine took its prompt."""
    failure: str | None = None
    """Why its rollout function gives nothing that may be trained on."""


class RankConversations:
    """Holds a rank's conversations, batch by batch.

    Args:
        pool, broker: on the local main.
        address: of the node's broker, elsewhere.
        batches: gives each batch the seed that it would have had without turns.
        revive: see `Conversations`.
        max_model_len: tokens that every engine of the job holds.
    """

    def __init__(
        self,
        rollouts: Rollouts,
        groups: NodeGroups,
        watch: FailureWatch,
        batches: GenerationBatches,
        limits: Limits,
        *,
        pool: EnginePool | None,
        broker: TurnBroker | None,
        address: str | None,
        max_model_len: int,
        revive: Callable[[], None],
    ) -> None:
        self.sampler: Sampler | None = None
        """Of the batch that is under way."""
        self._broker, self._pool, self._watch, self._batches = broker, pool, watch, batches
        if broker is not None:
            broker.accept()
            self._channel = TurnChannel(broker.connect())
        else:
            assert address is not None, "the node's local main says where it listens"
            self._channel = TurnChannel.to(address)
        self._rank, self._node = groups.topology.rank, groups.topology.node
        self._conversations = Conversations(
            self._channel,
            groups,
            watch,
            limits,
            revive=revive,
            main=rollouts.tools.main,
            pending=rollouts.pending,
        )
        self._rollouts, self._max_model_len = rollouts, max_model_len
        self._let_go = weakref.finalize(self, _let_go, rollouts, self._channel)  # also of a trainer that nobody closes
        self._let_go.atexit = False
        self._worker: Worker | None = None
        """Calls a rollout function: what it keeps for its thread holds from batch to batch."""
        self._rolls_here = False
        """Whether it is called in the main thread."""
        self._period, self._has_advised = Period(), False
        self.metrics: dict[str, float] = {}
        """Of the last batch, over the job."""

    @property
    def is_function(self) -> bool:
        """Whether the user's own function holds the conversations."""
        return self._rollouts.is_function

    def talk(self, prompts: Sequence[list[int]]) -> tuple[list[Talk], dict[str, int], GenerationBatch]:
        """A conversation for each of the rank's prompts, and the calls of tools. Collective over the job."""
        talks, batch = self._hold(
            partial(self._rollouts.start, prompts),
            lambda talks, sampler: [Row(talk.token_ids, talk.logprobs, talk.refusal) for talk in talks],
            len(prompts),
        )
        return talks, dict(self._rollouts.tools.counts), batch

    def roll_out(self, func: Callable[[], dict[str, Any]], num_rows: int) -> tuple[dict[str, Any], GenerationBatch]:
        """What a function of the user's gives TRL: `prompt_ids`, `completion_ids`, `logprobs` and more. Collective.

        A row for which it gives a text in `failed` is left out, as one is that no engine took.

        Raises:
            ValueError: it gives something else, or not `num_rows` of each.
        """

        def start(sampler: Sampler) -> "Future[dict[str, Any]]":
            if self._rolls_here:
                return self._conversations.call_here(partial(_call, func, in_main_thread=True))
            self._worker = self._worker or Worker("grpo-rollout", self._rollouts.prepare)
            return self._worker.run(partial(_call, func, in_main_thread=False))

        return self._hold(
            start, lambda output, sampler: _rows_of(output, num_rows, sampler.refused), num_rows, self._roll_here
        )

    def _roll_here(self, error: NeedsMainThreadError) -> None:
        self._rolls_here = True
        _log.warning(
            "rank %d: WARNING: rollout_func cannot run beside the main thread: %s; it begins again in the main thread, "
            "with the same random numbers, and is called there from now on",
            self._rank,
            error,
            extra=EVERY_RANK,
        )

    def _hold(
        self,
        start: "Callable[[Sampler], Future[Result]]",
        rows_of: Callable[[Result, Sampler], Sequence[Row]],
        num_rows: int,
        move: Callable[[NeedsMainThreadError], None] | None = None,
    ) -> tuple[Result, GenerationBatch]:
        """One batch. Collective over the job.

        Args:
            start, move: see `Conversations.run`.
            rows_of: the rank's rows of what the future brings.
        """
        now, base_seed = self._batches.next_base_seed()
        begun = time.monotonic()
        rows: list[Row] = []
        samplers: list[Sampler] = []

        def begin() -> "Future[Result]":
            for sampler in samplers:  # of a call that begins again
                sampler.close()
            self.sampler = Sampler(
                self._channel,
                base_seed=base_seed,
                rank=self._rank,
                num_rows=num_rows,
                max_model_len=self._max_model_len,
                look=self._conversations.look,
                sampling=now.sampling,
            )
            samplers.append(self.sampler)
            return start(self.sampler)

        def report(result: Result) -> ConversationReport:
            rows.extend(rows_of(result, samplers[-1]))
            return self._report(samplers[-1], rows, begun)

        try:
            result, reports = self._conversations.run(begin, report, move)
        finally:
            self.sampler = None
            for each in samplers:
                each.close()
        sampler = samplers[-1]
        self.metrics = conversation_metrics(reports)
        if not self._has_advised and (advice := serial_tools(reports)) is not None:
            self._has_advised = True
            _log.warning(advice)
        versions = [sampler.policy_versions.get(row, now.step) for row in range(len(rows))]
        engines = [sampler.engines.get(row, engine_id(self._node, 0)) for row in range(len(rows))]
        for number, row in enumerate(rows):
            if row.refusal is not None or row.failure is not None:
                versions[number] = engines[number] = REFUSED
        return result, GenerationBatch(
            completions=pack_completions(
                [row.token_ids for row in rows], [row.logprobs for row in rows], versions, engines
            ),
            reports=of_nodes(reports),
            policy_version=now.step,
            lag=PolicyLag(versions=0.0, steps=0.0),
        )

    def delivered(self) -> None:
        """All engines of the job have new weights. On every rank, before the local main's pool takes the engines up."""
        if self._broker is not None:
            self._broker.deliveries += 1
        self._channel.delivered()

    def close(self) -> None:
        """End threads and connections. Safe to call twice."""
        self._let_go()
        if self._broker is not None:
            self._broker.close()

    def _report(self, sampler: Sampler, rows: Sequence[Row], begun: float) -> ConversationReport:
        refusals = [row.refusal for row in rows if row.refusal is not None]
        tools = {f"tool_{name}": count for name, count in self._rollouts.tools.counts.items()}
        report = ConversationReport(
            node=self._node,
            first_ask=sampler.first_ask,
            last_answer=sampler.last_answer,
            wait_s=time.monotonic() - begun,
            tools_s=self._rollouts.tools.main.busy_s,
            num_conversations=len(rows),
            num_refused=len(refusals),
            num_failed=sum(row.failure is not None for row in rows),
            refusal=self._watch.make_record(refusals[0]) if refusals else None,
            counts={**sampler.counts, **tools},
        )
        if self._pool is None:
            return report
        num_not_finite, not_finite = self._pool.accounts.take_not_finite()
        return replace(
            report,
            num_not_finite=num_not_finite,
            not_finite=self._watch.make_record(not_finite, kind=FailureKind.ENGINE) if not_finite else None,
            idle_s=self._pool.accounts.take_idle_s(),
            period_s=self._period.take_s(),
            num_reissued=self._pool.take_num_reissued(),
        )


def _call(func: Callable[[], Result], *, in_main_thread: bool) -> Result:
    """A rollout function, where it is called."""
    with (
        contextlib.nullcontext() if in_main_thread else noticing_main_thread(),
        own_streams("rollout_func"),
        exits_as_errors("rollout_func ended by ", in_main_thread=in_main_thread),
    ):
        return func()


def _let_go(rollouts: Rollouts, channel: TurnChannel) -> None:
    """Ends the threads of both, and those of the broker that serve this channel."""
    rollouts.close()
    channel.close()


def _rows_of(output: Any, num_rows: int, refused: dict[int, str]) -> list[Row]:
    """The completions of a rollout function, which has to give what TRL trains on."""
    if not isinstance(output, dict):
        raise ValueError(f"rollout_func returned {type(output).__name__}: it has to return a dict of lists")
    for name in ("prompt_ids", "completion_ids", "logprobs"):
        if name not in output:
            raise ValueError(f"rollout_func returned no {name!r}, but {', '.join(map(repr, output)) or 'nothing'}")
        values = output[name]
        if (name != "logprobs" or values is not None) and len(values) != num_rows:
            raise ValueError(f"rollout_func returned {len(values)} {name} for {num_rows} prompts: give one for each")
    failed = {row: why for row, why in enumerate(output.get("failed") or []) if why is not None}
    left_out = {**failed, **refused}
    empty = [row for row, ids in enumerate(output["completion_ids"]) if not len(ids) and row not in left_out]
    if empty:
        raise ValueError(f"rollout_func returned no tokens for row {empty[0]}: give at least the end token")
    wanted = [len(ids) for ids in output["completion_ids"]]
    for name in ("logprobs", "env_mask"):
        if output.get(name) is not None and (found := [len(row) for row in output[name]]) != wanted:
            raise ValueError(
                f"rollout_func returned {name} of {found[:8]} tokens for completion_ids of {wanted[:8]} (the first "
                "rows): give one for each token"
            )
    rows = [Row(ids, np.zeros(len(ids))) for ids in output["completion_ids"]]
    return [
        Row([], [], refusal=refused.get(number), failure=failed.get(number)) if number in left_out else row
        for number, row in enumerate(rows)
    ]
