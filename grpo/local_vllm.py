"""`LocalVLLM`: generation and weight syncs for the trainer, in place of TRL's `VLLMGeneration`."""

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

import numpy as np

from grpo.config import GRPOConfig
from grpo.engine.client import EngineError
from grpo.engine.supervisor import EngineRestart, EngineSupervisor
from grpo.faults.watch import FailureWatch
from grpo.groups.node_groups import NodeGroups
from grpo.place.startup import StartupClock, process_age_s
from grpo.record.timeline.recorder import Recorder
from grpo.record.timeline.records import RESTART, START, SYNC, WAIT_GENERATE
from grpo.rollout.ahead import GenerationBatch, Progress
from grpo.rollout.facts import facts_of
from grpo.rollout.packing import REFUSED, Completions, SingleValues, to_lists
from grpo.rollout.prompts import Prompts
from grpo.rollout.refused import Refusals
from grpo.rollout.report import figures_of_nodes, generation_metrics
from grpo.rollout.turns.batch import PHASE as ROLLOUT
from grpo.rollout.turns.episode import Episode
from grpo.rollout.turns.rollouts import Rollouts, without_empty
from grpo.rollout.turns.sampler import Sampler, Turn
from grpo.rollout.turns.serving import RankEpisodes
from grpo.rollout.turns.tools import ToolRunner
from grpo.serving import Serving, ServingStart
from grpo.weights.delivery import WeightDelivery
from grpo.weights.report import WeightSyncReport
from grpo.weights.trained import TrainedModel

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class LocalVLLM:
    """This node's engines, as used by the trainer.

    `sync_weights` and `generate` are collective over the job. The first `sync_weights` waits for the engines, so that
    their startup overlaps with the trainer's.
    """

    args: GRPOConfig
    engines: EngineSupervisor
    """Started before the trainer's model is loaded."""
    trained: TrainedModel
    groups: NodeGroups
    watch: FailureWatch
    progress: Callable[[], tuple[int, str, int]]
    """Returns the finished optimizer steps, "train" or "eval", and the number of the requested generation batch of
    training."""
    _: KW_ONLY
    prompts_of_batch: Callable[[int], list[list[int]] | None] = lambda number: None
    """Returns this rank's prompts of the generation batch with a number, for asynchronous generation; None, on every
    rank, if there is none."""
    engine_ids: Callable[[], Sequence[Sequence[int]]] = list
    """Returns this rank's token ids of the requested prompts with images, with one placeholder for each image."""
    on_restart: Callable[[EngineRestart], None] = lambda restart: None
    """Called for every restarted engine of the job, on every rank."""
    rollouts: Rollouts | None = None
    """Runs multi-turn rollouts; None: every prompt is sampled once."""
    timeline: Recorder = field(default_factory=Recorder)
    """Recorder of durations."""

    def __post_init__(self) -> None:
        self.startup = StartupClock()
        self.last_batch: GenerationBatch | None = None
        self._last_prompt_tokens: list[int] = []
        self.last_sync: WeightSyncReport | None = None  # over the whole job
        self.last_episodes: tuple[list[Episode], ToolRunner | None] = ([], None)
        """Episodes of the last batch on this rank, and the runner of their tools."""
        self._refusals = Refusals(self.args.vllm_max_refused)
        self._versions = 0
        self._newest_version: int | None = None
        self.eval_sampling: Mapping[str, Any] = {}
        """Sampling arguments of the present evaluation, overriding training's."""
        self._reported: dict[str, WeightSyncReport] = {}  # by mode: the last weight sync in its metrics
        self.kept_batches: list[dict[str, Any]] = []  # from `keep_ahead`, in the resumed checkpoint
        self._serving: Serving | None = None
        self._is_closed = False

    # -- start ----------------------------------------------------------------------------------------------------

    def _connect(self) -> Serving:
        """Wait for the job's engines, and connect to them. Collective."""
        return ServingStart(
            args=self.args,
            engines=self.engines,
            trained=self.trained,
            groups=self.groups,
            watch=self.watch,
            timeline=self.timeline,
            startup=self.startup,
            rollouts=self.rollouts,
            progress=self._progress_now,
            prompts_of_batch=self.prompts_of_batch,
            revive=self._revive,
            on_restart=self._hear_of_restart,
        ).wait()

    @property
    def _episode_batches(self) -> RankEpisodes | None:
        return None if self._serving is None else self._serving.multi_turn

    # -- weight sync ----------------------------------------------------------------------------------------------

    @property
    def delivery(self) -> WeightDelivery:
        """Weight delivery; available after the first weight sync."""
        assert self._serving is not None, "nothing was synced"
        return self._serving.delivery

    def sync_weights(self) -> None:
        """Send the trainer's weights to all engines, and verify them if due. Collective over the job.

        Raises:
            JobFailed: on every rank, if an engine failed on any node or a verification failed.
        """
        self.watch.check()
        self._check_open()
        if self._serving is None:
            self._serving = self._connect()
            self.timeline.add(START, (now := time.monotonic()) - process_age_s(), now)
        serving = self._serving
        self.rest_for_weights()
        self.last_sync = self._deliver(serving)
        step = self._progress_now().step
        self._versions += step != self._newest_version  # repeated around an evaluation, which does not age batches
        self._newest_version = step

    def _deliver(self, serving: Serving) -> WeightSyncReport:
        step = self._progress_now().step
        samples_on = serving.delivery.adapter_number is not None  # each completion with its own adapter
        pool = None if samples_on else serving.pool
        with (
            self.timeline.span(SYNC),
            self.watch.during("sync"),
            pool.accounts.busy_otherwise() if pool is not None else contextlib.nullcontext(),
        ):
            try:
                report = serving.delivery.deliver(step)
            except BaseException:
                with contextlib.suppress(EngineError):  # one that does not end must not hide the error
                    self.close()  # the engines are useless now; this also ends anything that waits for them
                raise
        if serving.multi_turn is not None:
            serving.multi_turn.delivered()
        if serving.pool is not None:
            serving.pool.take_up(self.engines.clients, policy_version=step, adapter=serving.delivery.adapter_number)
        return report

    def forget_sent(self) -> None:
        """Let the next weight sync send all weights, frozen ones included. On every rank, but not collective."""
        if self._serving is not None:
            self._serving.delivery.forget_sent()

    def _revive(self) -> None:
        """Bring new engines to nodes that have lost theirs during generation. Collective over the job."""
        assert self._serving is not None, "nothing is sampled before there are engines"
        self._deliver(self._serving)

    # -- generation -----------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: list[list[int]],
        images: list[list | None] | None,
        num_generations: int,
        profiler: contextlib.AbstractContextManager | None = None,
    ) -> "tuple[list[list[int]], list[list[int]], list[SingleValues], None]":
        """Return one completion for each prompt of this rank; with asynchronous generation, those sampled earlier.
        Collective over the job.

        Args:
            prompts: token ids; copies of a prompt are adjacent over the node's ranks. With images: expanded by the
                processor.
            images: PIL images in RGB of each prompt; None if this rank's prompts have none.
            num_generations: not needed: equal neighbours belong together.
            profiler: TRL's context around the generation.

        Returns:
            As TRL's `VLLMGeneration.generate`: prompt ids, completion ids, log-probabilities [completion][token][1] by
            the engine, and None instead of the ids they belong to.

        Raises:
            JobFailed: on every rank, if an engine failed on any node.
            RuntimeError: the batch sampled earlier has other prompts; or there was no weight sync yet.
        """
        del num_generations
        self._check_open()
        if self._serving is None:
            raise RuntimeError("generate before sync_weights: the engines have no weights yet")
        profiler = profiler or contextlib.nullcontext()
        if self._episode_batches is not None:
            turns = self._first_turns(self._episode_batches, prompts, profiler)
            return prompts, [ids for ids, _ in turns], [SingleValues(logprobs) for _, logprobs in turns], None
        self.watch.check()
        batches = self._serving.batches
        asked_at, now = time.monotonic(), self._progress_now()
        _log.debug("generation for step %d (%s) begins: %d prompts of this rank", now.step, now.mode, len(prompts))
        with profiler, self.watch.during("generate"):
            asked = Prompts.of(prompts) if images is None else Prompts.with_images(prompts, images, self.engine_ids())
            if now.mode == "train":
                batches.resume(self.kept_batches)
                self.kept_batches = []
            with self.timeline.span(WAIT_GENERATE):
                self.last_batch = batches.take(asked)
            self._last_prompt_tokens = [len(prompt) for prompt in prompts]
            waited_s, version = time.monotonic() - asked_at, self.last_batch.policy_version
            _log.debug("generation for step %d ends, after %.2f s: policy version %d", now.step, waited_s, version)
            batches.sample_ahead()
        self._refusals.look_at(self.last_batch.reports)
        completion_ids, engine_logprobs = to_lists(self.last_batch.completions, self._nothing())
        return prompts, completion_ids, [SingleValues(row) for row in engine_logprobs], None

    def keep(
        self, completions: Completions, prompt_ids: Sequence[Sequence[int]]
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Replace this rank's rows of the last batch by these, possibly sampled by other ranks."""
        assert self.last_batch is not None, "they are of one"
        self.last_batch = replace(self.last_batch, completions=completions)
        self._last_prompt_tokens = [len(prompt) for prompt in prompt_ids]
        return to_lists(completions, self._nothing())

    def _first_turns(
        self,
        multi_turn: RankEpisodes,
        prompts: list[list[int]],
        profiler: contextlib.AbstractContextManager,
    ) -> list[tuple[list[int], list[float]]]:
        """Sample one more turn of each prompt, on this rank alone, inside a rollout function; otherwise run whole
        episodes, put them into `last_episodes`, and return their first turns."""
        if multi_turn.sampler is not None:
            turns = multi_turn.sampler.sample_all(prompts)
            return [self._nothing() if turn.refusal is not None else (turn.token_ids, turn.logprobs) for turn in turns]
        if multi_turn.is_function:
            raise RuntimeError("generate is for the rollout function, while it runs; its batch is over")
        with profiler, self._in_rollout():
            episodes, tools, self.last_batch = multi_turn.run(prompts)
        self.last_episodes = episodes, tools
        self._last_prompt_tokens = [len(prompt) for prompt in prompts]
        for episode in episodes:
            if episode.refusal is not None:
                episode.add(*self._nothing())
                episode.first_turn = 1
        return [(each.token_ids[: each.first_turn], each.logprobs[: each.first_turn]) for each in episodes]

    def roll_out(self, func: Callable[[], dict[str, Any]], prompts: Sequence[Any]) -> dict[str, Any]:
        """Run a rollout function of the user's, which may call `generate` or `sample` any number of times. Collective.

        Raises:
            JobFailed: on every rank, if the job has failed on one.
            TimeoutError: it has not ended within `rollout_timeout`.
        """
        self._check_open()
        if self._episode_batches is None:
            raise RuntimeError("roll_out before sync_weights: the engines have no weights yet")
        with self._in_rollout():
            output, self.last_batch = self._episode_batches.roll_out(func, prompts)
        self._last_prompt_tokens = [len(prompt) for prompt in output["prompt_ids"]]
        left_out = np.flatnonzero(self.last_batch.completions.policy_versions == REFUSED).tolist()
        return without_empty(output, left_out, *self._nothing())

    def _nothing(self) -> tuple[list[int], list[float]]:
        """Placeholder token and log-probability for a refused row. TRL does not accept empty completions; this one is
        excluded from rewards and loss, and its NaN from metrics."""
        return [*(self.trained.end_tokens[:1] or (0,))], [float("nan")]

    async def sample(self, token_ids: Sequence[int], *, row: int, turn: int | None = None, **sampling: Any) -> Turn:
        """Sample one turn, inside a rollout function; see `Sampler.sample`. Not collective."""
        return await self.sampler.sample(token_ids, row=row, turn=turn, **sampling)

    @property
    def sampler(self) -> Sampler:
        """Sampler of the current batch of a rollout function."""
        if self._episode_batches is None or (sampler := self._episode_batches.sampler) is None:
            raise RuntimeError("sample is for rollout functions, while one runs")
        return sampler

    @contextlib.contextmanager
    def _in_rollout(self) -> Iterator[None]:
        self.watch.check()
        with self.watch.during(ROLLOUT), self.timeline.span(WAIT_GENERATE):
            yield
        assert self.last_batch is not None
        self._refusals.look_at(self.last_batch.reports)

    @property
    def refused_rows(self) -> list[bool] | None:
        """Rows of the last batch left out on this rank: refused prompts, or marked as failed by a rollout function.
        None if the whole job has none."""
        batch = self.last_batch
        if batch is None or not any(report.num_refused + report.num_failed for report in batch.reports):
            return None
        return (batch.completions.policy_versions == REFUSED).tolist()

    def facts(self, end_tokens: Collection[int]) -> np.ndarray:
        """Origin of this rank's completions of the last batch; see `facts_of`."""
        assert self.last_batch is not None
        return facts_of(self.last_batch.completions, self._last_prompt_tokens, end_tokens)

    def rest_for_weights(self) -> None:
        """Wait for asynchronous generation, if weight syncs need idle engines. Collective over the job."""
        if self.args.generation_lookahead < 2:
            self.wait_for_batches()

    def wait_for_batches(self) -> None:
        """Wait for asynchronous generation: all batches under way. Collective over the job."""
        if self._serving is not None:
            with self.timeline.span(WAIT_GENERATE), self.watch.during("generate"):
                self._serving.wait()

    def keep_ahead(self, gives_up: Callable[[], bool]) -> list[dict[str, Any]]:
        """Return the batches of asynchronous generation for a checkpoint: `GenerationBatches.kept`. Collective."""
        if self.kept_batches or self._serving is None:
            return self.kept_batches  # of the last checkpoint, if training has not reached them yet
        with self.timeline.span(WAIT_GENERATE), self.watch.during("generate"):
            versions = self._versions + (self._newest_version != self._progress_now().step)
            return self._serving.batches.kept(versions=versions, gives_up=gives_up)

    def drop_ahead(self) -> None:
        """Drop the batches of asynchronous generation. On every rank, but not collective."""
        self.kept_batches = []
        if self._serving is not None:
            self._serving.drop()

    def _progress_now(self) -> Progress:
        step, mode, batch = self.progress()
        sampling = self.eval_sampling if mode == "eval" else {}
        return Progress(step=step, mode=mode, versions=self._versions, batch=batch, sampling=sampling)

    @property
    def policy_version(self) -> int:
        """Optimizer steps of the weights when the last batch was submitted."""
        return 0 if self.last_batch is None else self.last_batch.policy_version

    def _hear_of_restart(self, restart: EngineRestart) -> None:
        if restart.node == self.engines.topology.node:
            self.timeline.add(RESTART, (now := time.monotonic()) - restart.seconds, now, f"engine {restart.index}")
        self.on_restart(restart)

    # -- metrics and end ------------------------------------------------------------------------------------------

    def metrics(self, mode: str) -> dict[str, float]:
        """Job-wide metrics of the last generation batch, and of the last weight sync if new to `mode`."""
        metrics = {}
        if self.last_batch is not None:
            metrics = generation_metrics(self.last_batch.reports, self.last_batch.lag)
        if self._serving is not None:
            metrics |= self._serving.delivery.metrics()
        if self._episode_batches is not None:
            metrics |= self._episode_batches.metrics
        if self._serving is not None and self.last_sync is not None and self._reported.get(mode) is not self.last_sync:
            self._reported[mode] = self.last_sync
            metrics |= self.last_sync.metrics()
            if self.last_sync.gap is not None:
                metrics["weight_sync/logprob_gap_limit"] = self._serving.delivery.verifier.limit
        return metrics

    def by_node(self) -> dict[str, list[float]]:
        """Latest figures of each node, in order."""
        found = {} if self.last_batch is None else figures_of_nodes(self.last_batch.reports)
        if self._serving is not None and self._serving.delivery.total_s_by_node:
            found["weight_sync/total_s"] = self._serving.delivery.total_s_by_node
        return found

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("the engines of this trainer were closed: make a new trainer")

    def close(self) -> None:
        """End this node's engines. Safe to call twice."""
        self._is_closed = True
        if self._serving is not None:
            self._serving.delivery.close()
        if self._episode_batches is not None:
            self._episode_batches.close()
        try:
            self.engines.close()
        finally:
            if self._serving is not None and self._serving.pool is not None:
                self._serving.pool.close()
