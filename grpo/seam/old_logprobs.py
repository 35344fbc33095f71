"""Log-probabilities of the sampling policy: the trainer's own, or the engines'."""

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
    """Denominator of the ratio that PPO clips, as `GRPOConfig.old_logprobs` says.

    With "engine" it is the policy that sampled (PPO, https://arxiv.org/abs/1707.06347, eq. 7). TRL's importance
    sampling correction, which assumes the trainer's own log-probabilities, is then off, and TRL's forward pass before
    training is not run.
    """

    def __init__(self, view: TrainerView, *, clips_on_engines: bool) -> None:
        self._view = view
        self.clips_on_engines = clips_on_engines
        self._sampled_at = -1
        """Number of optimizer steps done when the present training batch was sampled."""
        self._leaves_out_old = False
        """True if TRL's next forward pass of the policy computes unused log-probabilities."""
        self._in_training: Mapping[str, Any] | None = None
        """Micro-batch in training that has no log-probabilities of the trainer's yet, or None."""
        self._differences: torch.Tensor | None = None
        """[3] float64, since the last step's end: sum of absolute differences, number of tokens, largest difference."""

    # -- a batch ------------------------------------------------------------------------------------------------------

    def sampled(self) -> None:
        """Decide whether TRL's next forward pass is unused. Without its correction, TRL now scores a batch of several
        steps (1.16)."""
        is_misaligned = self._view.args.gradient_accumulation_steps % self._view.steps_per_batch != 0
        self._leaves_out_old = self.clips_on_engines and is_misaligned

    def leaves_out(self, model: Any) -> bool:
        """True if TRL's forward pass of `model` is the unused one; it is so once per batch."""
        found = self._leaves_out_old and model is self._view.model
        self._leaves_out_old = self._leaves_out_old and not found
        return found

    def take(self, scored: Batch) -> None:
        """Take a generation batch that TRL has scored. Collective.

        Raises:
            ValueError: the engines' log-probabilities are wanted, but `rollout_func` returns none.
        """
        if self._view.mode == "train":
            self._sampled_at = self._view.state.global_step
        if self.clips_on_engines:
            assert not self._leaves_out_old, "TRL scores what several steps are trained on (1.16)"
            self._take_engines([scored])

    def _take_engines(self, batches: Sequence[Batch]) -> None:
        """Replace the trainer's log-probabilities by the engines' in all of a rank's parts of a generation batch.
        Collective: counts the loss's tokens again, as tokens without a log-probability leave the loss."""
        for batch in batches:
            if batch.get(_SAMPLED) is None:
                raise ValueError(
                    "old_logprobs is 'engine', but rollout_func gives no logprobs: have it return what the engines say "
                    "of each token, or set old_logprobs to 'trainer'"
                )
            is_known = batch[_SAMPLED].isfinite()
            batch[_OLD] = batch[_SAMPLED].where(is_known, 0)
            if not is_known.all():  # in the tool mask, which is for the loss alone: the model still reads these tokens
                batch["tool_mask"] = batch.get("tool_mask", torch.ones_like(batch["completion_mask"])) * is_known
            batch.pop(_RATIO, None)
        counted = torch.stack([models_tokens(batch).sum() for batch in batches]).sum()
        total = self._view.accelerator.gather(counted).sum()  # as TRL does (1.16)
        for batch in batches:
            batch["num_items_in_batch"] = total

    def take_resumed(self) -> None:
        """Adapt a resumed batch to the loss, if `old_logprobs` or the correction has changed. Collective."""
        batches = self._view.batch_in_use
        if not batches or not self._view.args.local_mode:
            return
        if self.clips_on_engines:
            self._take_engines(batches)
        elif self._view.args.vllm_importance_sampling_correction and any(_RATIO not in batch for batch in batches):
            _log.info(
                "the resumed generation batch has no importance sampling ratios: it is trained to its end without them"
            )
            for batch in batches:
                batch[_RATIO] = torch.ones_like(batch[_OLD])

    # -- the trainer's own, from training ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def in_training(self, inputs: Mapping[str, Any]) -> Iterator[None]:
        """Keep the micro-batch for `first_scored` while its loss is computed."""
        is_first = self._view.mode == "train" and self._sampled_at == self._view.state.global_step
        has_none = inputs.get(_OLD) is None or self.clips_on_engines
        self._in_training = inputs if is_first and has_none and inputs.get(_SAMPLED) is not None else None
        try:
            yield
        finally:
            self._in_training = None

    def first_scored(self) -> Mapping[str, Any] | None:
        """Return the micro-batch whose log-probabilities the trainer computes now for the first time, before the
        weights change; None if TRL has computed them in advance. Returned once."""
        batch, self._in_training = self._in_training, None
        return batch

    def note(self, batch: Mapping[str, Any], own: torch.Tensor) -> None:
        """Add the trainer's log-probabilities of such a micro-batch, [rows, tokens]."""
        if not self.clips_on_engines:
            return
        difference = (own - batch[_SAMPLED]).abs().double()
        difference = difference[models_tokens(batch) & difference.isfinite()]
        total, largest = difference.sum(), difference.max() if len(difference) else difference.new_zeros(())
        before = own.new_zeros(3, dtype=torch.float64) if self._differences is None else self._differences
        sums = before[:2] + torch.stack([total, total.new_tensor(len(difference))])
        self._differences = torch.cat([sums, torch.maximum(before[2], largest)[None]])

    def after_step(self) -> None:
        """Log the difference of log-probabilities that TRL's correction would have logged. Collective."""
        if self._differences is not None:
            (total, count, largest), self._differences = self._differences, None
            found = self._view.accelerator.gather(torch.stack([total / count.clamp(min=1), largest])[None])
            self._view.note_metrics(  # as in TRL: the mean of the ranks' means
                {
                    "sampling/sampling_logp_difference/mean": found[:, 0].mean().item(),
                    "sampling/sampling_logp_difference/max": found[:, 1].max().item(),
                }
            )
