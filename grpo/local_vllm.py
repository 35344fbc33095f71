"""What the trainer calls to generate and to push: `LocalVLLM` stands in TRL's seam, in place of `VLLMGeneration`."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from grpo.config import GRPOConfig
from grpo.engine.client import EngineError
from grpo.engine.starting import StartingEngines
from grpo.engine_settings import EngineModel, choose_backend
from grpo.job.node_groups import NodeGroups
from grpo.job.startup import StartupClock
from grpo.job.watch import FailureWatch
from grpo.rollout.ahead import GenerationBatch, GenerationBatches, Progress
from grpo.rollout.node import LocalMainSampler, NodeSampler
from grpo.rollout.packing import pack_rows, to_lists
from grpo.rollout.pool import EnginePool
from grpo.rollout.report import generation_metrics
from grpo.weights.proof import Prover, is_due, probe_prompts
from grpo.weights.push import Pusher, load_transport
from grpo.weights.report import PushReport, slowest
from grpo.weights.source import GatheredSource
from grpo.weights.wire_format import WireFormat, agreed, ask_engines


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModel:
    """What the engines are kept equal to."""

    model: nn.Module
    """The unwrapped transformers model."""
    engine_model: EngineModel
    """How the engines see it."""
    autocast: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    """Makes the context in which the trainer runs its forwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _EngineFacts:
    """What a local main has learnt of its engines when they take work."""

    startup_s: float
    """Of the slowest."""
    max_model_len: int
    wire_format: WireFormat


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Serving:
    """What there is on a rank once all engines of the job take work."""

    batches: GenerationBatches
    pusher: Pusher
    prover: Prover
    pool: EnginePool | None
    """On the local main."""


class LocalVLLM:
    """This node's engines, as the trainer sees them.

    `sync_weights` and `generate` are collective over the job. The engines are waited for in the first `sync_weights`,
    so that their start-up overlaps whatever the trainer does until then.

    Args:
        engines: started before the trainer's model is loaded.
        progress: the optimizer steps that are done, and "train" or "eval".
        next_prompts: this rank's prompts of the generation batch that follows, to be sampled ahead; None, on every
            rank, when there is none.
        say: prints a line for the user, on rank 0.
    """

    def __init__(
        self,
        args: GRPOConfig,
        engines: StartingEngines,
        trained: TrainedModel,
        groups: NodeGroups,
        watch: FailureWatch,
        progress: Callable[[], tuple[int, str]],
        *,
        next_prompts: Callable[[], list[list[int]] | None] = lambda: None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.args = args
        self.engines = engines
        self.startup = StartupClock()
        self.last_batch: GenerationBatch | None = None
        self.last_push: PushReport | None = None
        """Over the whole job."""
        self._backend = choose_backend(args.vllm_sync_backend, has_gpus=bool(engines.topology.devices))
        self._trained = trained
        self._groups = groups
        self._watch = watch
        self._progress = progress
        self._next_prompts = next_prompts
        self._say = say
        self._pushes = 0
        self._told: dict[str, PushReport] = {}  # by mode: the last push that is in its metrics
        self._serving: _Serving | None = None

    # -- start ----------------------------------------------------------------------------------------------------

    def _connect(self) -> _Serving:
        """Wait for the engines of the job and meet them. Collective."""
        args, clients = self.args, self.engines.clients
        source = GatheredSource(
            self._trained.model,
            wire_dtype=self._trained.engine_model.dtype,
            bucket_bytes=args.vllm_sync_bucket_mb * 2**20,
        )
        pool, facts, failure = None, None, None
        with self._watch.during("engine start"), self.startup.waiting():
            try:
                self._say("the model is loaded; waiting for the engines to start")
                if clients:
                    pool, facts = self._meet_engines(source)
            except (EngineError, RuntimeError) as error:
                failure = self._watch.make_record(error)
            of_nodes = [each for each in self._groups.exchange(self._watch, failure, facts) if each is not None]
        self.startup.engine_s = max(each.startup_s for each in of_nodes)
        self._say("all engines take work; the first push brings them the weights")
        source.adopt(agreed([each.wire_format for each in of_nodes]))
        pusher = Pusher(
            source,
            clients,
            backend=self._backend,
            tensor_parallel_size=self.engines.topology.tensor_parallel_size,
            timeout_s=args.vllm_sync_timeout,
            tell=self._watch.fail,
        )
        self._open_push_group(pusher)
        sampler = NodeSampler(self._groups, self._watch)
        if pool is not None and facts is not None:
            sampler = LocalMainSampler(
                self._groups,
                self._watch,
                pool,
                max_model_len=facts.max_model_len,
                max_tokens=args.max_completion_length,
                timeout_s=args.vllm_generate_timeout,
                balance_nodes=args.vllm_balance_nodes,
            )
        user_seed = (args.generation_kwargs or {}).get("seed")
        return _Serving(
            batches=GenerationBatches(sampler, seed=args.seed, user_seed=user_seed, progress=self._progress_now),
            pusher=pusher,
            prover=self._make_prover(min(each.max_model_len for each in of_nodes)),
            pool=pool,
        )

    def _meet_engines(self, source: GatheredSource) -> tuple[EnginePool, _EngineFacts]:
        clients = self.engines.clients
        load_transport(self._backend)
        ready = self.engines.wait_ready()
        pool = EnginePool(
            clients, max_num_seqs=[each.max_num_seqs for each in ready], max_tokens=self.args.max_completion_length
        )
        return pool, _EngineFacts(
            startup_s=max(each.startup_s for each in ready),
            max_model_len=min(each.max_model_len for each in ready),
            wire_format=ask_engines(
                clients, source.checkpoint_metas, source.experts, source.buffers, self.args.vllm_sync_timeout
            ),
        )

    def _open_push_group(self, pusher: Pusher) -> None:
        timeout_s, failure = self.args.vllm_sync_timeout, None
        stuck = f"the push group did not open within {timeout_s:.0f} s (vllm_sync_timeout)"
        with self._watch.during("push group"):
            try:
                with self._watch.within(timeout_s, lambda: stuck):  # NCCL's own wait has no deadline
                    pusher.connect()
            except (EngineError, OSError, RuntimeError) as error:
                failure = self._watch.make_record(error)
            self._groups.exchange(self._watch, failure)

    def _make_prover(self, max_model_len: int) -> Prover:
        model, engine_model = self._trained.model, self._trained.engine_model
        vocab_size = model.get_input_embeddings().num_embeddings
        return Prover(
            model,
            self.engines.clients,
            probe_prompts(vocab_size, max_model_len, engine_model.special_ids),
            dtype=engine_model.dtype,
            asked_limit=self.args.vllm_max_logprob_gap,
            autocast=self._trained.autocast,
            cast_lm_head_to_fp32=self.args.cast_lm_head_to_fp32,
            timeout_s=self.args.vllm_sync_timeout,
        )

    # -- push -----------------------------------------------------------------------------------------------------

    def sync_weights(self) -> None:
        """Push the trainer's weights to all engines and prove it where that is due. Collective over the job.

        Raises:
            JobFailed: on every rank, when an engine failed on any node or a proof did not hold.
        """
        self._watch.check()
        serving = self._serving = self._serving or self._connect()
        self.wait_for_batch()
        step, _ = self._progress()
        with self._watch.during("push"), serving.pool.busy_otherwise() if serving.pool else contextlib.nullcontext():
            try:
                self._note(serving.prover, self._push(serving, step))
            except BaseException:
                self.close()  # the engines are of no use any more; and whatever waits for them ends
                raise

    def _push(self, serving: _Serving, step: int) -> PushReport:
        report, error = serving.pusher.push(step)
        self._pushes += 1
        if is_due(self._pushes):
            try:
                gap = serving.prover.prove(self._pushes, engines_work=error is None)
                report = replace(report, gap=gap)
            except EngineError as unproved:
                error = unproved
        failure = None if error is None else self._watch.make_record(error)
        return slowest(self._groups.exchange(self._watch, failure, report))

    def _note(self, prover: Prover, report: PushReport) -> None:
        self.last_push = report
        if report.gap is not None and prover.first_gap is None:
            prover.first_gap = report.gap
            self._say(
                f"the first push is proved: log-probabilities differ by {report.gap.mean:.2g} nats in the mean and "
                f"{report.gap.max:.2g} at most; from now on up to {prover.limit:.2g} in the mean"
            )

    # -- generation -----------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: list[list[int]],
        images: list[list | None] | None,
        num_generations: int,
        profiler: contextlib.AbstractContextManager | None = None,
    ) -> "tuple[list[list[int]], list[list[int]], list[SingleValues], None]":
        """One completion for each prompt of this rank, sampled now or ahead. Collective over the job.

        Args:
            prompts: token ids, with the copies of a prompt next to each other over the node's ranks.
            images: None; images are refused when the trainer is built.
            num_generations: not needed: equal neighbours show which prompts belong together.
            profiler: TRL's context around the generation.

        Returns:
            As TRL's `VLLMGeneration.generate`: prompt ids, completion ids, log-probabilities
            [completion][token][1] under the engine, and None in place of the ids behind them.

        Raises:
            JobFailed: on every rank, when an engine failed on any node.
            RuntimeError: what was sampled ahead is not what is asked for; or nothing was pushed yet.
        """
        del num_generations
        if images is not None:
            raise ValueError("images reached the engine; local mode takes text alone")
        if self._serving is None:
            raise RuntimeError("generate before sync_weights: the engines have no weights yet")
        self._watch.check()
        batches = self._serving.batches
        with profiler or contextlib.nullcontext(), self._watch.during("generate"):
            self.last_batch = batches.take(pack_rows(prompts))
            if self._progress_now().mode == "train" and (following := self._next_prompts()) is not None:
                batches.sample_ahead(pack_rows(following))
        completion_ids, engine_logprobs = to_lists(self.last_batch.completions)
        return prompts, completion_ids, [SingleValues(row) for row in engine_logprobs], None

    def wait_for_batch(self) -> None:
        """Wait for the batch that is sampled ahead, if one is in flight. Collective over the job."""
        if self._serving is not None:
            with self._watch.during("generate"):
                self._serving.batches.wait()

    def drop_ahead(self) -> None:
        """Forget the batch that is sampled ahead. On every rank, but not collective."""
        if self._serving is not None:
            self._serving.batches.drop()

    def _progress_now(self) -> Progress:
        step, mode = self._progress()
        return Progress(step=step, mode=mode, pushes=self._pushes)

    @property
    def policy_version(self) -> int:
        """Optimizer steps of the weights that have sampled the last batch."""
        return 0 if self.last_batch is None else self.last_batch.policy_version

    # -- metrics and end ------------------------------------------------------------------------------------------

    def metrics(self, mode: str) -> dict[str, float]:
        """Of the last generation batch, and of the last push if `mode` has not been told of it; over the job."""
        metrics = {}
        if self.last_batch is not None:
            metrics = generation_metrics(self.last_batch.reports, self.last_batch.lag)
        if self._serving is not None and self.last_push is not None and self._told.get(mode) is not self.last_push:
            self._told[mode] = self.last_push
            metrics |= self.last_push.metrics()
            if self.last_push.gap is not None:
                metrics["push/logprob_gap_limit"] = self._serving.prover.limit
        return metrics

    def close(self) -> None:
        """End this node's engines. Safe to call twice."""
        if self._serving is not None:
            self._serving.pusher.close()
        self.engines.close()
        if self._serving is not None and self._serving.pool is not None:
            self._serving.pool.close()


class SingleValues(Sequence[tuple[float]]):
    """Numbers read as rows of one number each: a completion's log-probabilities as TRL takes them.

    TRL reads `[row[0] for row in these]`, once. A list for each token would cost more than bringing the completions
    to the ranks does.
    """

    def __init__(self, values: Sequence[float]) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index: Any) -> Any:
        return (self._values[index],) if isinstance(index, int) else SingleValues(self._values[index])

    def __iter__(self) -> Iterator[tuple[float]]:
        return zip(self._values)
