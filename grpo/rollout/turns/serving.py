"""Multi-turn rollouts of a rank put together: connection to the engines, seeds, and results of a batch."""

import contextlib
import contextvars
import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Any, TypeVar

from grpo.faults.failure import FailureKind
from grpo.faults.users_code import NeedsMainThreadError, Worker, exits_as_errors, noticing_main_thread, own_streams
from grpo.faults.watch import FailureWatch
from grpo.groups.node_groups import NodeGroups
from grpo.place.log import EVERY_RANK
from grpo.rollout.ahead import OTHER_PROMPTS, GenerationBatch, GenerationBatches, PolicyLag, Progress, order_of
from grpo.rollout.packing import REFUSED, engine_id, pack_completions
from grpo.rollout.pool import EnginePool
from grpo.rollout.report import Period
from grpo.rollout.turns.batch import BatchLimits, EpisodeBatches
from grpo.rollout.turns.broker import TurnBroker
from grpo.rollout.turns.channel import TurnChannel
from grpo.rollout.turns.episode import Episode
from grpo.rollout.turns.outputs import Row, rows_of
from grpo.rollout.turns.report import EpisodesReport, episode_metrics, of_nodes, serial_tools
from grpo.rollout.turns.rollouts import Planned, Rollouts
from grpo.rollout.turns.sampler import CURRENT, Sampler
from grpo.rollout.turns.tools import ToolRunner

Result = TypeVar("Result")
_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class _Live:
    """A batch of episodes from its start until training takes it."""

    planned: Planned
    at: Progress
    """Progress of training at its start."""
    number: int
    """Number that determines its seed."""
    sampler: Sampler
    tools: ToolRunner
    future: "Future[Any] | None" = None
    """Future of its episodes, if started ahead of training's request."""
    result: Any = None
    """Result of the future, once all ranks have theirs."""
    rows: Sequence[Row] = ()
    reports: Sequence[EpisodesReport] = ()
    """Reports of all ranks, afterwards."""


@dataclass(eq=False)
class RankEpisodes:
    """Runs a rank's episodes, batch by batch."""

    rollouts: Rollouts
    groups: NodeGroups
    watch: FailureWatch
    batches: GenerationBatches
    """Provides the seed each batch would have without turns."""
    limits: BatchLimits
    _: KW_ONLY
    lookahead: int = 0
    """Batches started ahead of training's request, if `Rollouts.planned` provides them."""
    pool: EnginePool | None
    """On the local main."""
    broker: TurnBroker | None
    """On the local main."""
    address: str | None
    """Address of the node's broker, on other ranks."""
    max_model_len: int
    """Longest sequence of every engine of the job, in tokens."""
    revive: Callable[[], None]
    """See `EpisodeBatches`."""

    def __post_init__(self) -> None:
        self._taken_now: Sampler | None = None
        if self.broker is not None:
            self.broker.accept()
            self._channel = TurnChannel(self.broker.connect())
        else:
            assert self.address is not None, "the node's local main says where it listens"
            self._channel = TurnChannel.to(self.address)
        self._rank, self._node = self.groups.topology.rank, self.groups.topology.node
        self._episode_batches = EpisodeBatches(
            self._channel, self.groups, self.watch, self.limits, revive=self.revive, main=self.rollouts.tools.main
        )
        self._num_places = 0
        self._ahead: deque[_Live] = deque()
        # also of a trainer that is never closed
        self._let_go = weakref.finalize(self, _let_go, self.rollouts, self._channel)
        self._let_go.atexit = False
        self._workers: dict[int, Worker] = {}
        """Threads for a rollout function; its thread-local state persists between batches. One for each batch that may
        be in progress, and one for evaluations."""
        self._rolls_here = False
        """True if it is called in the main thread."""
        self._period, self._has_advised = Period(), False
        self.metrics: dict[str, float] = {}
        """Metrics of the last batch, over the job."""

    @property
    def sampler(self) -> Sampler | None:
        """Sampler of the current batch, for code inside a rollout function or its threads."""
        return CURRENT.get() if self.lookahead else self._taken_now

    @property
    def is_function(self) -> bool:
        """True if the user's own function runs the episodes."""
        return self.rollouts.is_function

    def run(self, prompts: Sequence[list[int]]) -> tuple[list[Episode], ToolRunner, GenerationBatch]:
        """Run an episode for each of the rank's prompts; returns them with the runner of their tools. Collective over
        the job.

        Raises:
            RuntimeError: episodes started ahead have other prompts.
        """
        start = partial(self.rollouts.start, self.rollouts.rows_of(prompts), self.rollouts.on_end())
        live = self._take(Planned(num_rows=len(prompts), start=start, asked=lambda: [*prompts]))
        return live.result, live.tools, self._taken(live)

    def roll_out(
        self, func: Callable[[], dict[str, Any]], prompts: Sequence[Any]
    ) -> tuple[dict[str, Any], GenerationBatch]:
        """Run a rollout function of the user's; returns its output for TRL: `prompt_ids`, `completion_ids`, `logprobs`
        and more. Collective.

        A row with a text in `failed` is left out, like a refused one.

        Args:
            prompts: of the rank's rows, as TRL passes them to the function.

        Raises:
            RuntimeError: as in `run`.
            ValueError: the output has another form, or not one entry for each row.
        """
        live = self._take(Planned(num_rows=len(prompts), func=func, asked=lambda: [*prompts]))
        return live.result, self._taken(live)

    def _roll_here(self, error: NeedsMainThreadError) -> None:
        if self.lookahead:
            raise RuntimeError(
                f"rollout_func is marked with grpo.in_threads, but cannot run beside the main thread: {error} "
                "[GRPO-221]; set generation_lookahead to 0, and it is called in the main thread"
            ) from error
        self._rolls_here = True
        _log.warning(
            "rank %d: WARNING: rollout_func cannot run beside the main thread: %s; it begins again in the main thread, "
            "with the same random numbers, and is called there from now on",
            self._rank,
            error,
            extra=EVERY_RANK,
        )

    # -- a batch, before training requests it and afterwards ------------------------------------------------------

    def _sample_ahead(self, now: Progress) -> None:
        """Start the following batches, up to the lookahead."""
        if now.mode != "train" or not self.lookahead:
            return
        cause = f"environments of a batch ahead are not made within {self.limits.batch_s:g} s (rollout_timeout)"
        with self.watch.limited("making environments", self.limits.batch_s, cause):
            while len(self._ahead) < self.lookahead:
                number = (self._ahead[-1].number if self._ahead else now.batch) + 1
                if (planned := self.rollouts.planned(number)) is None:
                    return
                live = self._open(planned, now, number)
                self._ahead.append(live)
                live.future = self._begin(live)

    def wait(self) -> None:
        """Wait until all batches started ahead have ended. Collective over the job."""
        for live in self._ahead:
            self._collect(live)

    def drop(self) -> None:
        """Drop batches started ahead. Not collective."""
        while self._ahead:
            live = self._ahead.popleft()
            if live.future is not None:
                live.future.cancel()
            live.sampler.close()
            live.planned.drop()

    def _open(self, planned: Planned, now: Progress, number: int) -> "_Live":
        sampler = self._sampler(planned, now, order_of(now.mode, number), self.batches.base_seed(now.mode, number))
        tools = self.rollouts.tools.begin(planned.num_rows)
        return _Live(planned=planned, at=now, number=number, sampler=sampler, tools=tools)

    def _begin(self, live: "_Live") -> "Future[Any]":
        if live.planned.start is not None:
            return live.planned.start(live.sampler, live.tools)
        assert live.planned.func is not None, "it has one of both"
        place = live.number % (self.lookahead + 1) if live.at.mode == "train" or not self.lookahead else -1
        if place not in self._workers:
            self._workers[place] = Worker("grpo-rollout", self.rollouts.prepare)
        context = contextvars.copy_context()
        if self.lookahead:
            context.run(CURRENT.set, live.sampler)
        return context.run(self._workers[place].run, partial(_call, live.planned.func, in_main_thread=False))

    def _sampler(self, planned: Planned, at: Progress, order: int, base_seed: int) -> Sampler:
        first = self._num_places
        self._num_places += planned.num_rows
        return Sampler(
            self._channel,
            base_seed=base_seed,
            rank=self._rank,
            num_rows=planned.num_rows,
            max_model_len=self.max_model_len,
            first_place=first,
            order=order,
            look=self._episode_batches.look,
            sampling=at.sampling,
        )

    def _take(self, planned: Planned) -> "_Live":
        now = self.batches.now()
        if now.mode == "train" and self._ahead:
            live = self._ahead.popleft()
            self._collect(live)
            if live.planned.asked() != planned.asked():
                raise RuntimeError(OTHER_PROMPTS)
            return live
        live = self._open(planned, now, now.number)
        self._collect(live)
        return live

    def _collect(self, live: "_Live") -> None:
        """Wait until it has ended on all ranks. Collective over the job."""
        if live.reports:
            return
        begun = time.monotonic()

        def start() -> "Future[Any]":
            if live.future is not None:
                return live.future
            self._taken_now = live.sampler
            if self._rolls_here and live.planned.func is not None:
                return self._episode_batches.call_here(partial(_call, live.planned.func, in_main_thread=True))
            return self._begin(live)

        def begin_again(error: NeedsMainThreadError) -> None:
            self._roll_here(error)
            live.sampler.close()
            order = order_of(live.at.mode, live.number)
            live.sampler = self._sampler(live.planned, live.at, order, live.sampler.base_seed)

        def report(result: Any) -> EpisodesReport:
            live.result = result
            if self.is_function:
                live.rows = rows_of(result, live.planned.num_rows, live.sampler.refused)
            else:
                live.rows = [Row(episode.token_ids, episode.logprobs, episode.refusal) for episode in result]
            return self._report(live, begun)

        try:
            _, live.reports = self._episode_batches.run(
                start,
                report,
                begin_again if self.is_function else None,
                asked=lambda: live.sampler.asked,
                pending=lambda: self.rollouts.pending(live.tools),
            )
        finally:
            self._taken_now = None
            live.sampler.close()

    def _taken(self, live: "_Live") -> GenerationBatch:
        """Return a batch for training, and start the next ones."""
        self.metrics = episode_metrics(live.reports)
        if not self._has_advised and (advice := serial_tools(live.reports)) is not None:
            self._has_advised = True
            _log.warning(advice)
        self._sample_ahead(now := self.batches.now())
        rows, sampler, reports = live.rows, live.sampler, of_nodes(live.reports)
        versions = [sampler.policy_versions.get(row, live.at.step) for row in range(len(rows))]
        engines = [sampler.engines.get(row, engine_id(self._node, 0)) for row in range(len(rows))]
        for number, row in enumerate(rows):
            if row.refusal is not None or row.failure is not None:
                versions[number] = engines[number] = REFUSED
        return GenerationBatch(
            completions=pack_completions(
                [row.token_ids for row in rows], [row.logprobs for row in rows], versions, engines
            ),
            reports=reports,
            policy_version=live.at.step,
            lag=PolicyLag.of(reports, versions=now.versions - live.at.versions, steps=now.step - live.at.step),
        )

    def delivered(self) -> None:
        """Record a weight sync to all engines of the job. On every rank, before the local main's pool takes the engines
        up."""
        if self.broker is not None:
            self.broker.deliveries += 1
        self._channel.delivered()

    def close(self) -> None:
        """End threads and connections. Safe to call twice."""
        self.drop()
        self._let_go()
        if self.broker is not None:
            self.broker.close()

    def _report(self, live: "_Live", begun: float) -> EpisodesReport:
        rows, sampler = live.rows, live.sampler
        refusals = [row.refusal for row in rows if row.refusal is not None]
        tools = {f"tool_{name}": count for name, count in live.tools.counts.items()}
        report = EpisodesReport(
            node=self._node,
            first_ask=sampler.first_ask,
            last_answer=sampler.last_answer,
            wait_s=time.monotonic() - begun,
            tools_s=self.rollouts.tools.main.busy_s,
            num_episodes=len(rows),
            num_refused=len(refusals),
            num_failed=sum(row.failure is not None for row in rows),
            newer_tokens=self._newer_tokens(live),
            refusal=self.watch.make_record(refusals[0]) if refusals else None,
            counts={**sampler.counts, **tools},
        )
        if self.pool is None:
            return report
        num_not_finite, not_finite = self.pool.accounts.take_not_finite()
        num_sampled, sampling_s = self.pool.accounts.take_sampled()
        return replace(
            report,
            num_not_finite=num_not_finite,
            not_finite=self.watch.make_record(not_finite, kind=FailureKind.ENGINE) if not_finite else None,
            idle_s=self.pool.accounts.take_idle_s(),
            period_s=self._period.take_s(),
            num_reissued=self.pool.take_num_reissued(),
            num_sampled=num_sampled if self.lookahead > 1 else None,
            sampling_s=sampling_s,
        )

    def _newer_tokens(self, live: "_Live") -> int:
        """Policy versions gained since its start, summed over its tokens, assuming equal steps between versions."""
        now, begun = self.batches.now(), live.at
        a_step = (now.versions - begun.versions) / max(1, now.step - begun.step)
        counts = live.sampler.tokens_by_version
        return sum(round(a_step * (step - begun.step)) * count for step, count in counts.items())


def _call(func: Callable[[], Result], *, in_main_thread: bool) -> Result:
    """Call a rollout function."""
    with (
        contextlib.nullcontext() if in_main_thread else noticing_main_thread(),
        own_streams("rollout_func"),
        exits_as_errors("rollout_func ended by ", in_main_thread=in_main_thread),
    ):
        return func()


def _let_go(rollouts: Rollouts, channel: TurnChannel) -> None:
    """End the threads of both, and the broker's threads for this channel."""
    rollouts.close()
    channel.close()
