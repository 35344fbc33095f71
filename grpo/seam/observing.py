"""Timeline, figures of each node, and completions: the records of a training run."""

import contextlib
import functools
import itertools
import logging
import statistics
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_peft_model
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer

from grpo.config.options import profiled_ranks, profiled_steps
from grpo.place.log import EVERY_RANK
from grpo.place.patches.trl import SAMPLE_PRINTER
from grpo.place.topology import NodeTopology
from grpo.record.completions import (
    CompletionSamples,
    Row,
    evaluation_prefix,
    plain_tool_calls,
    print_printable,
    sampled_rows,
)
from grpo.record.files import COMPLETIONS_FOLDER
from grpo.record.folder import RunFolder
from grpo.record.metrics import clipped_share, completion_lengths
from grpo.record.profiling import ProfileSteps
from grpo.record.progress import ProgressOnScreen
from grpo.record.timeline.phases import Phases
from grpo.record.timeline.recorder import Recorder
from grpo.record.timeline.records import BACKWARD, FORWARD, OLD_LOGPROBS, OPTIMIZER, REFERENCE_LOGPROBS
from grpo.record.timeline.usage import UsageSampler
from grpo.seam.run import JobRun
from grpo.seam.view import Batch, TrainerView

MEASURED_STEPS = 20  # their median is the duration of a step

_log = logging.getLogger(__name__)


class Timing:
    """Timeline of a trainer; it records nothing until `start` is called."""

    def __init__(self, view: TrainerView, run: JobRun) -> None:
        self._view, self._run = view, run
        self.timeline = Recorder()
        self._phases = Phases(self.timeline, on_gpu=False)
        self._step_ends: deque[float] = deque(maxlen=MEASURED_STEPS)
        """Ends of the last steps, by `time.monotonic`."""
        self._stop_recording: Callable[[], object] = lambda: None
        """A second call does nothing."""

    def start(
        self,
        timeline: Recorder,
        topology: NodeTopology,
        rank_pids: Mapping[int, int],
        engines: Callable[[], Sequence[Any]],
    ) -> None:
        """Start recording, as the trainer's `GRPOConfig` says. A rank without a timeline starts nothing.

        Args:
            rank_pids: process ids of this node's ranks, by rank.
            engines: returns the present engines, each with a `pid`. Called from a thread: it must hold no reference to
                them, which would keep the trainer alive.
        """
        args = self._view.args
        self.timeline = timeline
        self._phases = Phases(timeline, on_gpu=args.device.type == "cuda")
        if timeline.is_on:

            def processes() -> dict[str, int]:
                ranks = {f"rank {rank}": pid for rank, pid in rank_pids.items()}
                return ranks | {f"engine {index}": engine.pid for index, engine in enumerate(engines())}

            usage = UsageSampler(
                attempt=self._run.attempt,
                devices=topology.devices,
                processes=processes,
                put=timeline.put,
                interval_s=args.usage_interval_s,
                own_device=topology.devices[0] if topology.devices else None,
                clock=lambda: timeline.at(time.monotonic()),
                say=functools.partial(_log.warning, extra=EVERY_RANK),
            )
            self._stop_recording = weakref.finalize(self, _close, usage, timeline)  # if the trainer is never closed
        if args.profile_steps and args.process_index in profiled_ranks(args.profile_ranks, args.world_size):
            steps = profiled_steps(args.profile_steps)
            self._view.callback_handler.add_callback(
                ProfileSteps(steps, args.process_index, self._view.figures["train"])
            )

    def begins(self) -> None:
        """Measure backward passes and optimizer steps from now on: the model is wrapped."""
        self._step_ends.clear()
        if not self.timeline.is_on:
            return
        self.timeline.step = self._view.state.global_step
        wrapped = getattr(self._view.accelerator, "deepspeed_engine_wrapped", None)
        accelerator, optimizer = self._view.accelerator, self._view.optimizer
        backward, step = (accelerator, optimizer) if wrapped is None else (wrapped.engine, wrapped.engine)
        for owner, name, phase in ((backward, "backward", BACKWARD), (step, "step", OPTIMIZER)):
            if owner is not None and not hasattr(getattr(owner, name), "is_measured"):
                setattr(owner, name, _measured(getattr(owner, name), self._phases, phase))

    def forward(self) -> contextlib.AbstractContextManager[None]:
        """Measure the forward pass of a micro-batch's loss."""
        if self._run.watch is not None:
            self._run.watch.note_progress()
        return self._phases.measured(FORWARD) if self._view.mode == "train" else contextlib.nullcontext()

    def scoring(self, model: Any) -> contextlib.AbstractContextManager[None]:
        """Measure a forward pass of `model` that computes log-probabilities."""
        if torch.is_grad_enabled():  # part of training's forward pass
            return contextlib.nullcontext()
        own = self._view.model
        is_reference = model is self._view.ref_model or (is_peft_model(own) and _is_off(own))
        return self._phases.measured(REFERENCE_LOGPROBS if is_reference else OLD_LOGPROBS)

    def after_step(self) -> None:
        self.timeline.step = self._view.state.global_step
        self._phases.settle()
        if self._run.watch is not None:
            self._run.watch.note_progress()
            self._step_ends.append(time.monotonic())
            if len(self._step_ends) > 1:
                steps = [later - earlier for earlier, later in itertools.pairwise(self._step_ends)]
                self._run.watch.note_step(statistics.median(steps))

    def close(self) -> None:
        self._stop_recording()


class BatchRecords:
    """Metrics of each batch, figures of each node, and completions to keep.

    No completions are kept until `start` is called.
    """

    def __init__(self, view: TrainerView, run: JobRun, screen: ProgressOnScreen) -> None:
        self._view, self._run, self._screen = view, run, screen
        self.by_node: Mapping[str, list[float]] = {}
        """Figures of the newest generation batch, one per node, by metric."""
        self._was_slowest: Sequence[int] = ()
        """The slowest node of each batch since the last log."""
        self._has_new_completions = False
        self._num_prompts = 0
        """Number of prompts per log whose completions are kept."""
        self._samples: CompletionSamples | None = None
        self._facts: deque[list[int] | None] = deque()
        self._evaluated: Sequence[Row] = ()
        """Completions of the running evaluation, of at most `_num_prompts` prompts."""

    def start(self) -> None:
        args = self._view.args
        self._num_prompts = args.log_completions_prompts
        self._facts = deque(maxlen=args.generation_batch_size)  # as many rows as TRL's table
        self._samples = CompletionSamples(Path(args.output_dir) / COMPLETIONS_FOLDER)

    def beside_metrics(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the first and the last fields of a line of `metrics.jsonl`."""
        return {"attempt": self._run.attempt}, {"by_node": self.by_node} if self.by_node else {}

    # -- which node is slow ---------------------------------------------------------------------------------------

    def note_sampling(self) -> None:
        """Note the metrics of the batch just sampled, and its slowest node."""
        view, mode = self._view, self._view.mode
        view.note_metrics(view.engines.metrics(mode))
        view.note_newest("engine/policy_version", view.engines.policy_version, mode)
        self.by_node = view.engines.by_node()
        seconds = self.by_node.get("rollout/generate_s", [])
        if mode == "train" and len(seconds) > 1:
            self._was_slowest = [*self._was_slowest, seconds.index(max(seconds))]
            view.note_newest("rollout/slowest_node", float(statistics.mode(self._was_slowest)))

    def note_nodes(self, figures: Mapping[str, list[float]]) -> None:
        """Add figures of each node for the same batch."""
        self.by_node = {**self.by_node, **figures}

    # -- completions ----------------------------------------------------------------------------------------------

    def note_batch(self, scored: Batch) -> None:
        """Note metrics and completions of a scored batch. Collective."""
        view, accelerator = self._view, self._view.accelerator
        if "importance_sampling_ratio" in scored:
            view.note_metrics(clipped_share(scored, view.args, accelerator))
        view.note_metrics(completion_lengths(scored, accelerator))
        if not self._num_prompts:
            return
        facts = view.engines.facts({*view.eos_token_ids, view.tokenizer.pad_token_id})  # TRL's end tokens (1.16)
        rows = accelerator.gather(torch.from_numpy(facts).to(self._view.args.device)).tolist()
        if is_training := self._view.mode == "train":
            self._facts.extend(rows)
        else:
            self._facts.extend([None] * len(rows))
            known = len({row["prompt_id"] for row in self._evaluated})
            if known < self._num_prompts and accelerator.is_main_process:
                kept = rows[-len(self._facts) :]
                others = [None] * (len(self._facts) - len(kept))
                self._evaluated = [*self._evaluated, *self._sampled([*others, *kept], self._num_prompts - known)]
        self._has_new_completions = is_training

    def _sampled(self, facts: Collection[list[int] | None], num_prompts: int) -> list[Row]:
        weights = self._view.reward_weights.tolist()
        return sampled_rows(self._view.said, facts, num_prompts=num_prompts, reward_weights=weights)

    @contextlib.contextmanager
    def logging(self) -> Iterator[None]:
        """Make TRL's table of completions printable while TRL logs; then write the newest completions."""
        with contextlib.ExitStack() as stack:
            if self._view.args.log_completions:
                stack.enter_context(self._screen.aside())
                stack.enter_context(plain_tool_calls(self._view.said))
                stack.enter_context(SAMPLE_PRINTER.applied(print_printable))
            yield
        self._was_slowest = ()
        if self._has_new_completions and self._view.mode == "train" and self._view.accelerator.is_main_process:
            self._has_new_completions = False
            self._write(self._sampled(self._facts, self._num_prompts))

    def write_evaluated(self, of_set: str | None) -> None:
        """Write the completions of the evaluation that ends now.

        Args:
            of_set: name of the evaluated set, if there are several.
        """
        rows, self._evaluated = self._evaluated, ()
        self._write(rows, prefix=evaluation_prefix(of_set))

    def _write(self, rows: Sequence[Row], *, prefix: str = "") -> None:
        if self._samples is not None and self._view.accelerator.is_main_process:
            self._samples.write(self._view.state.global_step, self._run.attempt, time.time(), rows, prefix=prefix)

    def cut(self, folder: RunFolder, first_step: int) -> None:
        """Remove the completions written after `first_step`. On rank 0."""
        if self._samples is not None:
            self._samples.cut(first_step, folder.previous_attempt)


def _close(sampler: UsageSampler, timeline: Recorder) -> None:
    sampler.close()
    timeline.close()


def _is_off(model: PeftModel) -> bool:
    """True if the model computes as the reference: without its adapter, or with TRL's copy of the given one."""
    layer = next(each for each in model.modules() if isinstance(each, BaseTunerLayer))
    return layer.disable_adapters or "ref" in layer.active_adapters


def _measured(call: Callable[..., Any], phases: Phases, phase: str) -> Callable[..., Any]:
    @functools.wraps(call)
    def measured(*args: Any, **kwargs: Any) -> Any:
        with phases.measured(phase):
            return call(*args, **kwargs)

    measured.is_measured = True  # type: ignore[attr-defined]
    return measured
