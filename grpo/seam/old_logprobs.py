"""Between TRL's trainer and ours: whose log-probabilities stand for those of the policy that has sampled."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import TrainerControl

from grpo.record.metrics import models_tokens
from grpo.seam.episodes import EpisodesTrainer

_log = logging.getLogger(__name__)
_OLD, _SAMPLED, _RATIO = "old_per_token_logps", "sampling_per_token_logps", "importance_sampling_ratio"


class OldLogprobsTrainer(EpisodesTrainer):
    """A trainer whose ratio, which PPO's clip bounds, is to what `GRPOConfig.old_logprobs` says.

    With "engine" it is the ratio of the policy that is trained to the one that has sampled (PPO,
    https://arxiv.org/abs/1707.06347, eq. 7): TRL's correction, which is for a ratio to the trainer's own, is off, and
    its forward pass before training is not run.
    """

    _sampled_at = -1
    """The optimizer step that was done when the present batch of training was sampled."""
    _leaves_out_old = False
    """Whether TRL's next forward pass of the policy is for log-probabilities that nothing needs."""
    _in_training: Mapping[str, Any] | None = None
    """The micro-batch that a forward pass scores first, if any."""
    _differences: torch.Tensor | None = None
    """[3] float64, since the last step's end: absolute differences added up, of how many tokens, the largest one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self._clips_on_engines:
            self.vllm_importance_sampling_correction = False

    @property
    def _clips_on_engines(self) -> bool:
        return self.args.old_logprobs == "engine"  # refused outside of local mode

    # -- a batch ------------------------------------------------------------------------------------------------------

    def _generate(self, prompts: Any) -> Any:
        generated = super()._generate(prompts)
        # Without its correction TRL scores, behind this, what several steps are trained on (1.16).
        is_misaligned = self.args.gradient_accumulation_steps % self._steps_per_batch != 0
        self._leaves_out_old = self._clips_on_engines and is_misaligned
        return generated

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        scored = super()._generate_and_score_completions(inputs)
        if self._mode == "train":
            self._sampled_at = self.state.global_step
        if self._clips_on_engines:
            assert not self._leaves_out_old, "TRL scores what several steps are trained on (1.16)"
            self._take_engines([scored])
        return scored

    def _take_engines(self, batches: Sequence[dict[str, Any]]) -> None:
        """Put engines' log-probabilities in the place of the trainer's, in all of a rank's parts of a generation batch.
        Collective: counts the tokens of the loss, which are fewer where some have no log-probability."""
        for batch in batches:
            if batch.get(_SAMPLED) is None:
                raise ValueError(
                    "old_logprobs is 'engine', but rollout_func gives no logprobs: have it return what the engines say "
                    "of each token, or set old_logprobs to 'trainer'"
                )
            is_known = batch[_SAMPLED].isfinite()
            batch[_OLD] = batch[_SAMPLED].where(is_known, 0)
            if not is_known.all():  # by a tool's mask, which is for the loss alone: the model still reads these tokens
                batch["tool_mask"] = batch.get("tool_mask", torch.ones_like(batch["completion_mask"])) * is_known
            batch.pop(_RATIO, None)
        counted = torch.stack([models_tokens(batch).sum() for batch in batches]).sum()
        total = self.accelerator.gather(counted).sum()  # as TRL counts them (1.16)
        for batch in batches:
            batch["num_items_in_batch"] = total

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Fits a batch that was in use to what the loss takes, where that has changed."""
        super()._load_optimizer_and_scheduler(checkpoint)
        batches = self._buffered_inputs
        if not batches or not self.args.local_mode:
            return
        corrects = self.vllm_importance_sampling_correction
        if self._clips_on_engines:
            self._take_engines(batches)
        elif corrects and any(_RATIO not in batch for batch in batches):
            _log.info(
                "the generation batch in use has no importance sampling: it is trained to its end as it was begun"
            )
            for batch in batches:
                batch[_RATIO] = torch.ones_like(batch[_OLD])

    # -- the trainer's own, from training ---------------------------------------------------------------------------

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        is_first = self._mode == "train" and self._sampled_at == self.state.global_step
        has_none = inputs.get(_OLD) is None or self._clips_on_engines
        self._in_training = inputs if is_first and has_none and inputs.get(_SAMPLED) is not None else None
        try:
            return super().compute_loss(model, inputs, *args, **kwargs)
        finally:
            self._in_training = None

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        if self._leaves_out_old and model is self.model:
            self._leaves_out_old = False
            return None, None, None
        found = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        if self._in_training is not None:
            batch, self._in_training = self._in_training, None
            self._note_own(batch, found[0].detach())
        return found

    def _note_own(self, batch: Mapping[str, Any], own: torch.Tensor) -> None:
        """Of a micro-batch's tokens, before the weights change: what TRL has not computed in advance.

        Args:
            own: [rows, tokens], of the trainer.
        """
        if not self._clips_on_engines:
            return
        difference = (own - batch[_SAMPLED]).abs().double()
        difference = difference[models_tokens(batch) & difference.isfinite()]
        total, largest = difference.sum(), difference.max() if len(difference) else difference.new_zeros(())
        before = own.new_zeros(3, dtype=torch.float64) if self._differences is None else self._differences
        sums = before[:2] + torch.stack([total, total.new_tensor(len(difference))])
        self._differences = torch.cat([sums, torch.maximum(before[2], largest)[None]])

    def after_step(self, control: TrainerControl) -> None:
        """Log as TRL does what its correction would have seen. Collective."""
        super().after_step(control)
        if self._differences is not None:
            (total, count, largest), self._differences = self._differences, None
            found = self.accelerator.gather(torch.stack([total / count.clamp(min=1), largest])[None])
            self.note_metrics(  # as TRL's: the mean of the ranks' means
                {
                    "sampling/sampling_logp_difference/mean": found[:, 0].mean().item(),
                    "sampling/sampling_logp_difference/max": found[:, 1].max().item(),
                }
            )
