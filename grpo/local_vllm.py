"""What the trainer calls to generate and to push: `LocalVLLM` stands in TRL's seam, in place of `VLLMGeneration`."""

import contextlib
import os
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from grpo.config import GRPOConfig
from grpo.engine.client import EngineClient, EngineError, engine_environment
from grpo.engine.messages import EngineSpec
from grpo.engine_settings import EngineModel, choose_backend, engine_args, sampling_settings
from grpo.job.failure import FailureRecord
from grpo.job.node_groups import SIGNAL_PATIENCE_S, NodeGroups
from grpo.job.startup import StartupClock
from grpo.job.topology import NodeTopology
from grpo.job.watch import FailureWatch
from grpo.rollout.node import GenerationReport, NodeSampler, Rollout, Sampled
from grpo.rollout.packing import SingleValues, seed_base
from grpo.rollout.pool import EnginePool
from grpo.weights.proof import LogprobGap, gap_between, gap_limit, is_due, probe_prompts, trainer_logprobs
from grpo.weights.push import Pusher, PushReport
from grpo.weights.source import GatheredSource
from grpo.weights.wire_format import agreed, ask_engines

_OTHER_PROMPTS = (
    "the prompts that were sampled ahead are not those that training asks for now: the data set, its transform or the "
    "data loader gives other rows when it is read again; set generation_lookahead to 0"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLag:
    """How old the policy is that sampled a batch, when the batch is first used."""

    pushes: int
    """Between sampling and first use."""
    steps: int
    """Optimizer steps, likewise."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Ahead:
    """A generation batch from its submission to its use."""

    rollout: Rollout
    step: int
    """Optimizer step at its submission."""
    pushes: int
    """Done before its submission."""
    sampled: Sampled | None
    """Once it was collected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """What one push cost, over the whole job, and what its proof found."""

    total_s: float
    """Of the slowest rank, as the next two."""
    gather_s: float
    send_s: float
    num_bytes: int
    """Sent to each engine."""
    gap: LogprobGap | None
    """The worst engine's; None when this push was not proved."""
    policy_version: int


class LocalVLLM:
    """This node's engines, as the trainer sees them.

    `sync_weights` and `generate` are collective over the job. Engines start in the constructor and are
    waited for in the first `sync_weights`, so that their start-up overlaps the loading of the trainer's model.

    Args:
        progress: the current optimizer step, and "train" or "eval".
        attempt: of the run, for the names of the engines' logs.
    """

    def __init__(
        self,
        args: GRPOConfig,
        model: EngineModel,
        topology: NodeTopology,
        groups: NodeGroups,
        watch: FailureWatch,
        progress: Callable[[], tuple[int, str]],
        *,
        attempt: int = 0,
    ) -> None:
        self.args = args
        self.topology = topology
        self.backend = choose_backend(args.vllm_sync_backend, has_gpus=bool(topology.devices))
        self.last_generation: list[GenerationReport] = []
        """Of each node."""
        self.last_sync: SyncReport | None = None
        self.first_gap: LogprobGap | None = None
        """Of the first push, which is always proved; the worst engine's of the job."""
        self.startup = StartupClock()
        self._model = model
        self._groups = groups
        self._watch = watch
        self._progress = progress
        self._attempt = attempt
        self.policy_lag = PolicyLag(pushes=0, steps=0)
        """Of the last generation batch."""
        self._draws: dict[str, tuple[int, int]] = {}  # by mode: the last step, and its batches so far
        self._pushes = 0
        self._ahead: _Ahead | None = None
        self._sampler: NodeSampler | None = None
        self._pool: EnginePool | None = None
        self._next_prompts: Callable[[], list[list[int]] | None] = lambda: None
        self._pusher: Pusher | None = None
        self._trained_model: nn.Module | None = None
        self._autocast: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
        self._probe: list[list[int]] = []
        self._started = time.monotonic()
        self._clients: list[EngineClient] | None = self._start_engines() if topology.is_local_main else None
        # At the interpreter's exit, or when nobody holds this object: a notebook's next trainer needs the GPUs.
        self._ender = weakref.finalize(self, _close_all, self._clients or [])

    # -- start ----------------------------------------------------------------------------------------------------

    def _start_engines(self) -> list[EngineClient]:
        spec = EngineSpec(
            engine_args=engine_args(self.args, self._model, self.topology, self.backend),
            sampling=sampling_settings(self.args),
        )
        node = self.topology.node

        watch = self._watch  # and not this object, which the engines' threads would keep alive

        def on_death(error: EngineError) -> None:
            if not watch.stop_was_asked(SIGNAL_PATIENCE_S):
                watch.fail(error)

        return [
            EngineClient(
                spec,
                name=f"engine {index} of node {node}",
                environment=engine_environment(
                    os.environ,
                    devices=devices,
                    tensor_parallel_size=self.topology.tensor_parallel_size,
                    engines_per_node=self.topology.num_engines,
                ),
                log_path=Path(self.args.output_dir) / "logs" / f"engine-node{node}-{index}.attempt-{self._attempt}.log",
                on_death=on_death,
            )
            for index, devices in enumerate(self.topology.engines)
        ]

    def attach(
        self,
        model: nn.Module,
        autocast: Callable[[], contextlib.AbstractContextManager],
        next_prompts: Callable[[], list[list[int]] | None] = lambda: None,
    ) -> None:
        """Say which model is trained; before the first `sync_weights`.

        Args:
            model: the unwrapped transformers model.
            autocast: makes the context in which the trainer runs its forwards.
            next_prompts: this rank's prompts of the generation batch that follows, to be sampled ahead; None, on every
                rank, when there is none.
        """
        self._trained_model = model
        self._autocast = autocast
        self._next_prompts = next_prompts

    def _connect(self) -> Pusher:
        assert self._trained_model is not None, "sync_weights before attach"
        failure, startup_s, max_model_len, wire_format = None, 0.0, 0, None
        bucket_bytes = self.args.vllm_sync_bucket_mb * 2**20
        source = GatheredSource(self._trained_model, wire_dtype=self._model.dtype, bucket_bytes=bucket_bytes)
        with self._watch.during("engine start"), self.startup.waiting():
            try:
                max_num_seqs = []
                for client in self._clients or []:
                    left_s = self.args.vllm_start_timeout - (time.monotonic() - self._started)
                    ready = client.wait_ready(max(left_s, 0.1), self._watch.check)
                    startup_s = max(startup_s, ready.startup_s)
                    max_model_len = ready.max_model_len
                    max_num_seqs.append(ready.max_num_seqs)
                if self._clients is not None:
                    self._pool = EnginePool(
                        self._clients, max_num_seqs=max_num_seqs, max_tokens=self.args.max_completion_length
                    )
                    wire_format = ask_engines(
                        self._clients,
                        source.checkpoint_metas,
                        source.experts,
                        source.buffers,
                        self.args.vllm_sync_timeout,
                    )
            except (EngineError, RuntimeError) as error:
                failure = self._watch.make_record(error)
            starts = self._groups.exchange(self._watch, failure, (startup_s, max_model_len, wire_format))
        source.adopt(agreed([answer for _, _, answer in starts if answer is not None]))
        self._sampler = NodeSampler(
            self._groups,
            self._watch,
            self.topology,
            self._pool,
            max_model_len=max_model_len,
            max_tokens=self.args.max_completion_length,
            timeout_s=self.args.vllm_generate_timeout,
            balance_nodes=self.args.vllm_balance_nodes,
        )
        self.startup.engine_s = max(seconds for seconds, _, _ in starts)
        self._probe = probe_prompts(
            self._trained_model.get_input_embeddings().num_embeddings,
            min(length for _, length, _ in starts if length),  # local mains know, the other ranks say 0
            self._model.special_ids,
        )
        pusher = Pusher(
            source,
            self._clients,
            backend=self.backend,
            tensor_parallel_size=self.topology.tensor_parallel_size,
            timeout_s=self.args.vllm_sync_timeout,
            tell=self._watch.fail,
        )
        with self._watch.during("push group"):
            failure = None
            timeout_s = self.args.vllm_sync_timeout
            stuck = f"the push group did not open within {timeout_s:.0f} s (vllm_sync_timeout)"
            try:
                with self._watch.within(timeout_s, lambda: stuck):  # NCCL's own wait has no deadline
                    pusher.connect()
            except (EngineError, OSError, RuntimeError) as error:
                failure = self._watch.make_record(error)
            self._groups.exchange(self._watch, failure)
        return pusher

    # -- push -----------------------------------------------------------------------------------------------------

    def sync_weights(self) -> None:
        """Push the trainer's weights to all engines and prove it where that is due. Collective over the job.

        Raises:
            JobFailed: on every rank, when an engine failed on any node or a proof did not hold.
        """
        self._watch.check()
        if self._pusher is None:
            self._pusher = self._connect()
        self.collect_ahead()
        step, _ = self._progress()
        with self._watch.during("push"), self._pool.busy_otherwise() if self._pool else contextlib.nullcontext():
            try:
                report, error = self._pusher.push(step)
                self._pushes += 1
                failure = None if error is None else self._watch.make_record(error)
                gap = None
                if is_due(self._pushes):
                    gap, failure = self._prove(failure)
                answers = self._groups.exchange(self._watch, failure, (report, gap))
            except BaseException:
                self.close()  # the engines are of no use any more; and whatever waits for them ends
                raise
        self.last_sync = _summarise(answers, step)
        self.first_gap = self.first_gap or self.last_sync.gap

    @property
    def gap_limit(self) -> float:
        """Of the next proof."""
        return gap_limit(self._model.dtype, asked=self.args.vllm_max_logprob_gap, first=self.first_gap)

    def _prove(self, failure: FailureRecord | None) -> tuple[LogprobGap | None, FailureRecord | None]:
        """Score the probe on both sides. Collective over the job: the trainer's forward gathers under ZeRO-3."""
        assert self._trained_model is not None
        expected = trainer_logprobs(
            self._trained_model,
            self._probe,
            self._autocast(),
            cast_lm_head_to_fp32=self.args.cast_lm_head_to_fp32,
        )
        if self._clients is None or failure is not None:
            return None, failure
        limit = self.gap_limit
        worst = LogprobGap(mean=0.0, max=0.0)
        try:
            for client in self._clients:
                gap = gap_between(
                    client.call("prompt_logprobs", self.args.vllm_sync_timeout, prompts=self._probe), expected
                )
                worst = max(worst, gap, key=lambda g: g.mean)
                if gap.mean > limit:
                    raise client.error(
                        f"does not compute what the trainer does after push {self._pushes}: log-probabilities of the "
                        f"same tokens differ by {gap.mean:.3g} in the mean and {gap.max:.3g} at most, the limit of the "
                        f"mean is {limit:.3g} for {self._model.dtype}"
                        + (f" after a first gap of {self.first_gap.mean:.3g}" if self.first_gap else "")
                        + "; vllm_max_logprob_gap sets another"
                    )
        except EngineError as error:
            return worst, self._watch.make_record(error)
        return worst, None

    # -- generation -----------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: list[list[int]],
        images: list[list | None] | None,
        num_generations: int,
        profiler: contextlib.AbstractContextManager | None = None,
    ) -> tuple[list[list[int]], list[list[int]], list[SingleValues], None]:
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
            RuntimeError: what was sampled ahead is not what is asked for.
        """
        del num_generations
        if images is not None:
            raise ValueError("images reached the engine; local mode takes text alone")
        assert self._sampler is not None, "generate before sync_weights"
        self._watch.check()
        step, mode = self._progress()
        with profiler or contextlib.nullcontext():
            self.collect_ahead()
            with self._watch.during("generate"):
                if mode == "train" and self._ahead is not None:
                    ahead, self._ahead = self._ahead, None
                    if ahead.rollout.prompts != prompts:
                        raise RuntimeError(_OTHER_PROMPTS)
                else:
                    ahead = self._submit(prompts)
                    ahead.sampled = self._sampler.collect(ahead.rollout)
                sampled = ahead.sampled
                assert sampled is not None
                self.last_generation = sampled.reports
                self.policy_lag = PolicyLag(pushes=self._pushes - ahead.pushes, steps=step - ahead.step)
                if mode == "train" and (following := self._next_prompts()) is not None:
                    self._ahead = self._submit(following)
        return prompts, sampled.completion_ids, [SingleValues(row) for row in sampled.engine_logprobs], None

    def collect_ahead(self) -> None:
        """Wait for the batch that is sampled ahead, if one is in flight. Collective over the job.

        Before a push: a completion is of one policy version, and engines drop their prefix cache only at rest.
        """
        if self._ahead is not None and self._ahead.sampled is None:
            assert self._sampler is not None
            with self._watch.during("generate"):
                self._ahead.sampled = self._sampler.collect(self._ahead.rollout)

    def drop_ahead(self) -> None:
        """Forget the batch that is sampled ahead. On every rank, but not collective."""
        if self._ahead is not None and self._sampler is not None:
            self._sampler.drop(self._ahead.rollout)
        self._ahead = None

    def _submit(self, prompts: list[list[int]]) -> "_Ahead":
        assert self._sampler is not None
        step, mode = self._progress()
        last_step, draws = self._draws.get(mode, (step, 0))
        draw = draws if last_step == step else 0
        self._draws[mode] = (step, draw + 1)
        user_seed = (self.args.generation_kwargs or {}).get("seed")
        base = seed_base(seed=self.args.seed, step=step, mode=mode, draw=draw, user_seed=user_seed)
        return _Ahead(rollout=self._sampler.submit(prompts, base), step=step, pushes=self._pushes, sampled=None)

    def close(self) -> None:
        """End this node's engines. Safe to call twice."""
        self._ahead = None
        if self._pusher is not None:
            self._pusher.close()
            self._pusher = None
        self._ender()
        if self._pool is not None:
            self._pool.close()


def _close_all(clients: list[EngineClient]) -> None:
    for client in clients:
        client.close()


def _summarise(answers: list[tuple[PushReport, LogprobGap | None]], step: int) -> SyncReport:
    reports = [report for report, _ in answers]
    gaps = [gap for _, gap in answers if gap is not None]
    worst = LogprobGap(mean=max(g.mean for g in gaps), max=max(g.max for g in gaps)) if gaps else None
    return SyncReport(
        total_s=max(r.total_s for r in reports),
        gather_s=max(r.gather_s for r in reports),
        send_s=max(r.send_s for r in reports if r.num_bytes),
        num_bytes=max(r.num_bytes for r in reports),
        gap=worst,
        policy_version=step,
    )
