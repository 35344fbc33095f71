"""`GRPOTrainer`: TRL's trainer, which generates with the node's own engines.

The loop is TRL's and reads like the paper (DeepSeekMath, https://arxiv.org/abs/2402.03300): sample a group of
completions per prompt, score them, train on their advantages, sync the new weights. Each overridden method of TRL or
transformers stands here once, and shows the work around it in order. The work is done by plain objects (`grpo.seam`).
"""

from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel, PrinterCallback, TrainerControl
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from trl.extras.profiling import profiling_context

from grpo.config import GRPOConfig
from grpo.engine.client import EngineClient
from grpo.engine.like import StartEngine
from grpo.local_vllm import LocalVLLM
from grpo.record.metrics import MetricsFile
from grpo.record.timeline.records import SAVE
from grpo.rollout.agents.rollout import AgentBatch
from grpo.seam.evaluating import PREFIX
from grpo.seam.lazy_vllm import TRLTrainer
from grpo.seam.parts import TrainerParts
from grpo.seam.resuming import StepEnds
from grpo.seam.saving import load_trained_adapter
from grpo.seam.start import own_args, start


class GRPOTrainer(TRLTrainer):
    """TRL's `GRPOTrainer` with the same arguments; `args` is a `grpo.GRPOConfig`, which is copied.

    In local mode all ranks of the job construct it at the same time, in the main thread. Local mode refuses FSDP, and
    quantised models other than four bits with LoRA. Of a multimodal model only the text part is trained, unless the
    data set has images. `prompt_order` returns an epoch's row numbers in order, given the epoch's number.
    """

    start_engine: ClassVar[StartEngine] = EngineClient
    """Starts each engine."""
    _local: LocalVLLM | None = None  # this node's engines, in local mode

    def __init__(
        self,
        model: "str | PreTrainedModel",
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: list | None = None,
        optimizers: tuple = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: list | None = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
        prompt_order: Callable[[int], Sequence[int]] | None = None,
    ) -> None:
        arguments = dict(locals())  # as TRL takes them
        del arguments["self"], arguments["__class__"], arguments["prompt_order"]
        arguments["args"] = args = own_args(args, model)
        self._parts = parts = TrainerParts(self, arguments, prompt_order)
        arguments["callbacks"] = [*(callbacks or []), MetricsFile(parts.records.beside_metrics), parts.screen]
        self._local = start(parts, arguments, super().__init__, self.start_engine)
        self.remove_callback(PrinterCallback if args.disable_tqdm else DEFAULT_PROGRESS_CALLBACK)

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """Train as TRL's trainer does; if any rank fails, `JobFailed` is raised on all that can raise, with one record.
        Ends the process with exit code 0 if asked to stop, so that no script goes on to save a half-trained model.

        Args:
            resume_from_checkpoint: a complete checkpoint; True or "auto" for the newest complete one in `output_dir`,
                where "auto" starts afresh if there is none. None for `args.resume_from_checkpoint`.
        """
        train, parts = super().train, self._parts
        with parts.run.recording_failures(self.args.output_dir), parts.run.guarded("train"), closing(parts.screen):
            self._last_loaded_step = -1  # else TRL leaves out the first weight sync of a second `train`
            self.remove_callback(StepEnds)  # left by an earlier `train`; it must follow the user's callbacks
            self.add_callback(StepEnds(parts.run, [parts.resuming.begins, parts.timing.begins], self._after_step))
            try:
                if self._local is not None:
                    self._local.forget_sent()  # frozen weights may have changed since the last `train`
                return parts.resuming.train(resume_from_checkpoint, partial(train, **kwargs))
            finally:
                if self._local is not None:
                    self._local.drop_ahead()

    def _run_epoch(self, **kwargs: Any) -> None:
        self._parts.order.run_epoch(super()._run_epoch, **kwargs)

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        return self._parts.order.sampler_of(self.train_dataset if dataset is None else dataset)

    def _get_dataloader(self, *args: Any, sampler_fn: Any = None, is_training: bool = False, **kwargs: Any) -> Any:
        known = partial(self._parts.order.known, sampler_fn) if is_training else sampler_fn
        return super()._get_dataloader(*args, sampler_fn=known, is_training=is_training, **kwargs)

    # -- a step: sample, score, train ----------------------------------------------------------------------------------

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """Return a micro-batch; sample a new generation batch if the last one is used up."""
        parts, before = self._parts, self._parts.view.batch_in_use
        inputs = super()._prepare_inputs(parts.pictures.listed(generation_batch))
        return inputs if parts.view.batch_in_use is before else parts.trimming.trim(inputs)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Sample and score a generation batch."""
        if self._local is None:
            return super()._generate_and_score_completions(inputs)
        parts = self._parts
        with parts.episodes.of_batch(), parts.rewards.of_batch(inputs), parts.pictures.of_batch(len(inputs)):
            scored = super()._generate_and_score_completions(inputs)
        parts.old_logprobs.take(scored)
        parts.guard.take(scored, has_own=not parts.old_logprobs.clips_on_engines)
        parts.rewards.leave_out_refused(scored)
        parts.records.note_batch(scored)
        return scored

    def _generate(self, prompts: list[Any]) -> Any:
        """Sample completions; with spare groups, more than are trained on. Rewards start as completions arrive."""
        if self._local is None:
            return super()._generate(prompts)
        parts = self._parts
        parts.episodes.end_resets()
        sample = partial(parts.rewards.sample, super()._generate)
        score = partial(parts.rewards.calculate, super()._calculate_rewards)
        generated = parts.spares.sample(prompts, sample, score)
        parts.old_logprobs.sampled()
        return generated

    def _tokenize_prompts(self, prompts: list[Any]) -> Any:
        return self._parts.pictures.tokenize(super()._tokenize_prompts, prompts)

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        """Sync changed weights, then request completions from the engines: TRL calls `LocalVLLM`."""
        if self._local is None:
            return super()._generate_single_turn(*args, **kwargs)
        with profiling_context(self, "vLLM.generate"):
            self._local.rest_for_weights()  # here, so that TRL's timer of the weight sync leaves it out
        completions = super()._generate_single_turn(*args, **kwargs)
        self._parts.records.note_sampling()
        return completions

    def _tool_call_loop(self, prompts: Any, prompt_ids: Any, completion_ids: Any, completions: Any, *rest: Any) -> Any:
        if self._local is None:
            return super()._tool_call_loop(prompts, prompt_ids, completion_ids, completions, *rest)
        return self._parts.episodes.taken(completions)

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> torch.Tensor:
        batch = inputs, prompts, completions, completion_ids_list
        if self._local is None:
            return super()._calculate_rewards(*batch)
        if (rewards := self._parts.spares.take_rewards()) is None:
            rewards = self._parts.rewards.calculate(super()._calculate_rewards, *batch)
        self._parts.evaluation.add(rewards)
        return rewards

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Train on a micro-batch."""
        with self._parts.old_logprobs.in_training(inputs), self._parts.timing.forward():
            return super().compute_loss(model, inputs, *args, **kwargs)

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        parts = self._parts
        if parts.old_logprobs.leaves_out(model):
            return None, None, None
        with parts.timing.scoring(model):
            passes = parts.pictures if parts.pictures.are_taken else parts.trimming
            found = passes.score(super()._get_per_token_logps_and_entropies, model, *args, **kwargs)
        if (batch := parts.old_logprobs.first_scored()) is not None:
            parts.old_logprobs.note(batch, found[0].detach())
            parts.guard.note(batch, found[0].detach())
        return found

    def _after_step(self, control: TrainerControl) -> None:
        """End an optimizer step, after the user's callbacks. Collective."""
        parts = self._parts
        if self._local is not None:
            parts.view.note_metrics(self._local.startup.first_step())
        parts.timing.after_step()
        parts.resuming.after_step(control)
        parts.old_logprobs.after_step()
        parts.guard.after_step()

    # -- log, save, load, evaluate ------------------------------------------------------------------------------------

    def _maybe_log_save_evaluate(self, tr_loss: Any, grad_norm: Any, *args: Any, **kwargs: Any) -> None:
        self._parts.saving.look_at_norm(grad_norm)
        with self._parts.saving.with_callbacks():
            super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        self._parts.evaluation.note()
        with self._parts.records.logging():
            super().log(logs, start_time)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        write = partial(super()._save_checkpoint, model, trial)
        with self._parts.timing.timeline.span(SAVE), self._parts.run.during("save"):
            self._parts.saving.save(Path(self._get_output_dir(trial=trial)), write)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        folder = output_dir or self.args.output_dir
        save = partial(super().save_model, output_dir, _internal_call=_internal_call)
        self._parts.saving.save_model(folder, _internal_call, save, partial(self._save, folder, state_dict={}))
        self._parts.pictures.save_processor(Path(folder))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        load_trained_adapter(self.model if model is None else model, Path(resume_from_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        assert checkpoint is not None, "transformers has looked (5.17)"
        self._parts.saving.load(Path(checkpoint))
        self._parts.old_logprobs.take_resumed()

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        with self._parts.saving.keeping_all():
            return super()._finalize_training(*args, **kwargs)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = PREFIX
    ) -> dict[str, float]:
        """Evaluate the model's present weights as TRL's trainer does. Collective; raises as `train` does."""
        evaluate = partial(super().evaluate, eval_dataset, ignore_keys, metric_key_prefix)
        return self._parts.evaluation.evaluate(eval_dataset, metric_key_prefix, evaluate)

    def agent_batch(self, prompts: Sequence[Any]) -> AgentBatch:
        """Return the batch being sampled, for `grpo.agents`, of prompts as TRL gives them to a rollout function."""
        return self._parts.episodes.agent_batch(prompts)

    @property
    def first_step(self) -> int:
        """Number of optimizer steps done by earlier attempts."""
        return self._parts.resuming.first_step

    def close(self) -> None:
        """End this node's engines and free the output folder. Without it, both happen when this object or the process
        ends."""
        if self._local is not None:
            self._local.close()
        self._parts.timing.close()
        self._parts.run.release()
