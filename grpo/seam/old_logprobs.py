"""Whose log-probabilities stand for those of the policy that has sampled."""

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from grpo.record.metrics import models_tokens
from grpo.seam.view import Batch, TrainerView

_log = logging.getLogger(__name__)
_OLD, _SAMPLED, _RATIO = "old_per_token_logps", "sampling_per_token_logps", "importance_sampling_ratio"


class OldLogprobs:
    """The ratio that PPO's clip bounds, to what `GRPOConfig.old_logprobs` says.

    With "engine" it is the ratio of the policy that is trained to the one that has sampled (PPO,
    https://arxiv.org/abs/1707.06347, eq. 7): TRL's correction, which is for a ratio to the trainer's own, is off, and
    its forward pass before training is not run.
    """

    def __init__(self, view: TrainerView, *, clips_on_engines: bool) -> None:
        self._view = view
        self.clips_on_engines = clips_on_engines
        self._sampled_at = -1
        """The optimizer step that was done when the present batch of training was sampled."""
        self._leaves_out_old = False
        """Whether TRL's next forward pass of the policy is for log-probabilities that nothing needs."""
        self._in_training: Mapping[str, Any] | None = None
        """The micro-batch that a forward pass scores first, if any."""
        self._differences: torch.Tensor | None = None
        """[3] float64, since the last step's end: absolute differences added up, of how many tokens, the largest."""

    # -- a batch ------------------------------------------------------------------------------------------------------

    def sampled(self) -> None:
        """Without its correction TRL scores, behind this, what several steps are trained on (1.16)."""
        is_misaligned = self._view.args.gradient_accumulation_steps % self._view.steps_per_batch != 0
        self._leaves_out_old = self.clips_on_engines and is_misaligned

    def leaves_out(self, model: Any) -> bool:
        """Whether the forward pass of `model` that TRL asks for is the one that nothing needs."""
        found = self._leaves_out_old and model is self._view.model
        self._leaves_out_old = self._leaves_out_old and not found
        return found

    def take(self, scored: Batch) -> None:
        """A generation batch as TRL has scored it. Collective."""
        if self._view.mode == "train":
            self._sampled_at = self._view.state.global_step
        if self.clips_on_engines:
            assert not self._leaves_out_old, "TRL scores what several steps are trained on (1.16)"
            self._take_engines([scored])

    def _take_engines(self, batches: Sequence[Batch]) -> None:
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
        total = self._view.accelerator.gather(counted).sum()  # as TRL counts them (1.16)
        for batch in batches:
            batch["num_items_in_batch"] = total

    def take_resumed(self) -> None:
        """Fit a batch that was in use when it was saved to what the loss takes, where that has changed. Collective."""
        batches = self._view.batch_in_use
        if not batches or not self._view.args.local_mode:
            return
        if self.clips_on_engines:
            self._take_engines(batches)
        elif self._view.args.vllm_importance_sampling_correction and any(_RATIO not in batch for batch in batches):
            _log.info(
                "the generation batch in use has no importance sampling: it is trained to its end as it was begun"
            )
            for batch in batches:
                batch[_RATIO] = torch.ones_like(batch[_OLD])

    # -- the trainer's own, from training ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def in_training(self, inputs: Mapping[str, Any]) -> Iterator[None]:
        """While the loss of this micro-batch is computed."""
        is_first = self._view.mode == "train" and self._sampled_at == self._view.state.global_step
        has_none = inputs.get(_OLD) is None or self.clips_on_engines
        self._in_training = inputs if is_first and has_none and inputs.get(_SAMPLED) is not None else None
        try:
            yield
        finally:
            self._in_training = None

    def first_scored(self) -> Mapping[str, Any] | None:
        """The micro-batch of which the trainer's log-probabilities are seen now, before the weights change, and TRL has
        not computed them in advance; None otherwise."""
        batch, self._in_training = self._in_training, None
        return batch

    def note(self, batch: Mapping[str, Any], own: torch.Tensor) -> None:
        """The trainer's log-probabilities [rows, tokens] of such a micro-batch."""
        if not self.clips_on_engines:
            return
        difference = (own - batch[_SAMPLED]).abs().double()
        difference = difference[models_tokens(batch) & difference.isfinite()]
        total, largest = difference.sum(), difference.max() if len(difference) else difference.new_zeros(())
        before = own.new_zeros(3, dtype=torch.float64) if self._differences is None else self._differences
        sums = before[:2] + torch.stack([total, total.new_tensor(len(difference))])
        self._differences = torch.cat([sums, torch.maximum(before[2], largest)[None]])

    def after_step(self) -> None:
        """Log as TRL does what its correction would have seen. Collective."""
        if self._differences is not None:
            (total, count, largest), self._differences = self._differences, None
            found = self._view.accelerator.gather(torch.stack([total / count.clamp(min=1), largest])[None])
            self._view.note_metrics(  # as TRL's: the mean of the ranks' means
                {
                    "sampling/sampling_logp_difference/mean": found[:, 0].mean().item(),
                    "sampling/sampling_logp_difference/max": found[:, 1].max().item(),
                }
            )
