"""What a trainer lets others see of itself: when it does what, which node is slow, how long completions are."""

import functools
import itertools
import logging
import statistics
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import is_peft_model
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from grpo.config.options import profiled_ranks, profiled_steps
from grpo.place.log import EVERY_RANK
from grpo.place.topology import NodeTopology
from grpo.record.completions import CompletionSamples, Row, evaluation_prefix, sampled_rows
from grpo.record.files import COMPLETIONS_FOLDER
from grpo.record.folder import RunFolder
from grpo.record.profiling import ProfileSteps
from grpo.record.timeline.phases import Phases
from grpo.record.timeline.recorder import Recorder
from grpo.record.timeline.records import BACKWARD, FORWARD, OLD_LOGPROBS, OPTIMIZER, REFERENCE_LOGPROBS, SAVE
from grpo.record.timeline.usage import UsageSampler
from grpo.seam.engines import LocalEngines
from grpo.seam.resuming import ResumableTrainer

_log = logging.getLogger(__name__)


class ObservedTrainer(ResumableTrainer):
    """A resumable trainer with a timeline; until `observe` is called, one that records nothing."""

    timeline = Recorder()
    by_node: Mapping[str, list[float]] = {}
    """Figures of each node, newest generation batch, in the order of the nodes."""
    _phases = Phases(timeline, on_gpu=False)
    _was_slowest: Sequence[int] = ()
    """The slowest node of each batch since the last log."""
    _has_new_completions = False
    _num_prompts = 0
    """Of a log: those of which every completion is kept."""
    _samples: CompletionSamples | None = None
    _evaluated: Sequence[Row] = ()
    """Completions of the evaluation that runs, of `_num_prompts` prompts at most."""
    _stop_recording: Callable[[], object] | None = None
    """Where there is a timeline; a second call does nothing."""

    def observe(
        self,
        timeline: Recorder,
        topology: NodeTopology,
        rank_pids: Mapping[int, int],
        engines: Callable[[], Sequence[Any]],
    ) -> None:
        """Record from now on, as `args` (a `GRPOConfig`) says; on a rank that keeps no timeline that costs nothing.

        Args:
            rank_pids: of this node's ranks.
            engines: the present ones: each has a `pid`. Holds none of them: a thread asks it, which must not keep a
                trainer alive.
        """
        args: Any = self.args
        self.timeline = timeline
        self._phases = Phases(timeline, on_gpu=args.device.type == "cuda")
        if timeline.is_on:
            self.add_callback(_Measures(self))

            def processes() -> dict[str, int]:
                ranks = {f"rank {rank}": pid for rank, pid in rank_pids.items()}
                return ranks | {f"engine {index}": engine.pid for index, engine in enumerate(engines())}

            usage = UsageSampler(
                attempt=self.attempt,
                devices=topology.devices,
                processes=processes,
                put=timeline.put,
                interval_s=args.usage_interval_s,
                own_device=topology.devices[0] if topology.devices else None,
                clock=lambda: timeline.at(time.monotonic()),
                say=functools.partial(_log.warning, extra=EVERY_RANK),
            )
            self._stop_recording = weakref.finalize(self, _close, usage, timeline)  # of a trainer that nobody closes
        if args.profile_steps and args.process_index in profiled_ranks(args.profile_ranks, args.world_size):
            self.add_callback(
                ProfileSteps(profiled_steps(args.profile_steps), args.process_index, self._metrics["train"])
            )
        self._num_prompts = args.log_completions_prompts
        self._facts: deque[list[int] | None] = deque(maxlen=args.generation_batch_size)  # as TRL's `_logs`
        self._samples = CompletionSamples(Path(args.output_dir) / COMPLETIONS_FOLDER)

    def beside_metrics(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What a line of `metrics.jsonl` begins with and ends with."""
        return {"attempt": self.attempt}, {"by_node": self.by_node} if self.by_node else {}

    # -- what takes time ------------------------------------------------------------------------------------------

    def measure_updates(self) -> None:
        """Once the model is wrapped: measure its backward passes and the optimizer's steps."""
        wrapped = getattr(self.accelerator, "deepspeed_engine_wrapped", None)
        backward, step = (self.accelerator, self.optimizer) if wrapped is None else (wrapped.engine, wrapped.engine)
        for owner, name, phase in ((backward, "backward", BACKWARD), (step, "step", OPTIMIZER)):
            if owner is not None and not hasattr(getattr(owner, name), "is_measured"):
                setattr(owner, name, _measured(getattr(owner, name), self._phases, phase))

    def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        if self._failure_watch is not None:
            self._failure_watch.note_progress()
        if not self.model.training:
            return super().compute_loss(model, *args, **kwargs)
        with self._phases.measured(FORWARD):
            return super().compute_loss(model, *args, **kwargs)

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():  # in the forward pass of training
            return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        is_reference = model is self.ref_model or (is_peft_model(self.model) and _is_off(self.model))
        with self._phases.measured(REFERENCE_LOGPROBS if is_reference else OLD_LOGPROBS):
            return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with self.timeline.span(SAVE), self._during("save"):
            super()._save_checkpoint(*args, **kwargs)

    def after_step(self, control: TrainerControl) -> None:
        self.timeline.step = self.state.global_step
        self._phases.settle()
        if self._failure_watch is not None:
            self._failure_watch.note_progress()
            self._step_ends.append(time.monotonic())
            if len(self._step_ends) > 1:
                steps = [later - earlier for earlier, later in itertools.pairwise(self._step_ends)]
                self._failure_watch.note_step(statistics.median(steps))
        super().after_step(control)

    # -- what a batch cost --------------------------------------------------------------------------------------------

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

    def note_metrics(self, metrics: Mapping[str, float]) -> None:
        """Figures that TRL logs with its own, as their mean since the last log."""
        for name, value in metrics.items():
            self._metrics[self._mode][name].append(value)

    def note_sampling(self, engines: LocalEngines) -> None:
        """Figures of the batch that has just come from them."""
        self.note_metrics(engines.metrics(self._mode))
        self._metrics[self._mode]["engine/policy_version"] = [engines.policy_version]
        self.note_nodes(engines.by_node(), self._mode)

    # -- which node is slow ---------------------------------------------------------------------------------------

    def note_nodes(self, by_node: Mapping[str, list[float]], mode: str) -> None:
        """Figures of each node, of a batch that has just come. The slowest node counts until the next log."""
        self.by_node = by_node
        seconds = by_node.get("rollout/generate_s", [])
        if mode == "train" and len(seconds) > 1:
            self._was_slowest = [*self._was_slowest, seconds.index(max(seconds))]
            node = statistics.mode(self._was_slowest)
            self._metrics[mode]["rollout/slowest_node"] = [float(node)]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        super().log(logs, *args, **kwargs)
        self._was_slowest = ()
        if self._has_new_completions and self.model.training and self.is_world_process_zero():
            self._has_new_completions = False
            self._write_completions()

    # -- what was said --------------------------------------------------------------------------------------------

    def note_completions(self, facts: np.ndarray, mode: str) -> None:
        """Of this rank's rows that TRL has just put into its `_logs`: `completions.FACTS`. Collective."""
        if not self._num_prompts:
            return
        rows = self.accelerator.gather(torch.from_numpy(facts).to(self.args.device)).tolist()
        if is_training := mode == "train":
            self._facts.extend(rows)
        else:
            self._facts.extend([None] * len(rows))
            known = len({row["prompt_id"] for row in self._evaluated})
            if known < self._num_prompts and self.is_world_process_zero():
                kept = rows[-len(self._facts) :]
                others = [None] * (len(self._facts) - len(kept))
                self._evaluated = [*self._evaluated, *self._sampled([*others, *kept], self._num_prompts - known)]
        self._has_new_completions = is_training

    def _sampled(self, facts: Collection[list[int] | None], num_prompts: int) -> list[Row]:
        weights = self.reward_weights.tolist()
        return sampled_rows(self._logs, facts, num_prompts=num_prompts, reward_weights=weights)

    def _write_completions(self) -> None:
        self._write(self._sampled(self._facts, self._num_prompts))

    def write_evaluated(self, of_set: str | None) -> None:
        """What was said in the evaluation that ends now, of a set with this name if there are several."""
        rows, self._evaluated = self._evaluated, ()
        self._write(rows, prefix=evaluation_prefix(of_set))

    def _write(self, rows: Sequence[Row], *, prefix: str = "") -> None:
        if self._samples is not None and self.is_world_process_zero():
            self._samples.write(self.state.global_step, self.attempt, time.time(), rows, prefix=prefix)

    def _clear_away(self, run: RunFolder, first_step: int) -> None:
        super()._clear_away(run, first_step)
        if self._samples is not None:
            self._samples.cut(first_step, run.previous_attempt)

    # -- end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        if self._stop_recording is not None:
            self._stop_recording()
        super().close()


def _close(sampler: UsageSampler, timeline: Recorder) -> None:
    sampler.close()
    timeline.close()


class _Measures(TrainerCallback):
    """Tells the trainer when its model is wrapped."""

    def __init__(self, trainer: ObservedTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._trainer.timeline.step = state.global_step
        self._trainer.measure_updates()


def _is_off(model: PeftModel) -> bool:
    """Whether it computes as the reference: without its adapter, or with TRL's copy of the one that was given."""
    layer = next(each for each in model.modules() if isinstance(each, BaseTunerLayer))
    return layer.disable_adapters or "ref" in layer.active_adapters


def _measured(call: Callable[..., Any], phases: Phases, phase: str) -> Callable[..., Any]:
    @functools.wraps(call)
    def measured(*args: Any, **kwargs: Any) -> Any:
        with phases.measured(phase):
            return call(*args, **kwargs)

    measured.is_measured = True  # type: ignore[attr-defined]
    return measured
