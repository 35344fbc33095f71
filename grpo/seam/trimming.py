"""Trimming of padding to the longest row of each micro-batch.

TRL 1.16 pads a rank's generation batch to its longest prompt and its longest completion, shuffles the rows, and
computes every micro-batch at that width.
"""

import math
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
from trl.trainer.utils import split_tensor_dict

from grpo.seam.view import Batch, TrainerView

Score = Callable[..., tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]]
"""TRL's `_get_per_token_logps_and_entropies`."""


class Trimming:
    """Forward passes as wide as their longest row; see `GRPOConfig.trim_padding`."""

    def __init__(self, view: TrainerView) -> None:
        self._view = view

    @property
    def is_on(self) -> bool:
        """True in local mode with `trim_padding`."""
        return self._view.args.local_mode and self._view.args.trim_padding

    def trim(self, inputs: Batch) -> Batch:
        """Trim a new generation batch. Collective.

        Args:
            inputs: its micro-batch that TRL would train on now.

        Returns:
            The micro-batch to train on instead.
        """
        view, args, batches = self._view, self._view.args, self._view.batch_in_use
        if batches is None or view.has_processor:  # one rank's may have images, and another's none
            return inputs
        if self.is_on:
            if not self.depends_on_grouping():
                # Blocks of this size never cross an optimizer step's end, whichever of the two numbers is larger.
                batches = sorted_in_blocks(batches, math.gcd(len(batches), args.gradient_accumulation_steps))
            batches = [trimmed(batch, args.pad_to_multiple_of) for batch in batches]
        self._note_padding(batches)
        view.batch_in_use = batches
        return batches[view.micro_batches % len(batches)]

    def depends_on_grouping(self) -> bool:
        """True if the loss depends on the grouping of a step's rows into micro-batches: a mean over the tokens
        of each micro-batch, or a subclass's own loss. Sorting rows by length would then change it."""
        view, args = self._view, self._view.args
        has_entropy = args.entropy_coef != 0.0 or args.use_adaptive_entropy or args.top_entropy_quantile < 1.0
        return view.has_own_loss or args.loss_type == "bnpo" or has_entropy or view.has_aux_loss

    def _note_padding(self, batches: list[Batch]) -> None:
        """Note the share of pad tokens in training's forward passes, over all ranks. Collective."""
        masks = [batch[name].flatten() for batch in batches for name in ("prompt_mask", "completion_mask")]
        share = torch.cat(masks).eq(0).double()
        counts = torch.stack([share.sum(), share.new_tensor(len(share))])
        sums = self._view.accelerator.reduce(counts, reduction="sum")
        self._view.note_metrics({"train/padding_share": (sums[0] / sums[1]).item()})

    def score(
        self,
        call: Score,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Compute log-probabilities and entropies by TRL's `call`.

        A generation batch comes in several chunks: its rows are scored in order of length, each chunk as wide as its
        longest row.

        Returns:
            Log-probabilities, entropies or None, both [rows, logits_to_keep] in the given order, 0 outside a chunk's
            columns; and TRL's auxiliary loss or None.
        """
        more = [value for name, value in kwargs.items() if name != "compute_entropy"]
        is_plain = all(value is None or value is False for value in more)
        if not self.is_on or not is_plain or batch_size is None or batch_size >= len(input_ids):
            return call(model, input_ids, attention_mask, logits_to_keep, batch_size, **kwargs)
        found: list[torch.Tensor] = []
        for rows in by_length(attention_mask).split(batch_size):
            columns, kept = used_columns(attention_mask[rows], logits_to_keep, self._view.args.pad_to_multiple_of)
            chunk = call(model, input_ids[rows, columns], attention_mask[rows, columns], kept, **kwargs)
            of_chunk = [each for each in chunk[:2] if each is not None]
            found = found or [each.new_zeros(len(input_ids), logits_to_keep) for each in of_chunk]
            for whole, part in zip(found, of_chunk, strict=True):
                whole[rows, :kept] = part
        logps, *entropies = found
        return logps, entropies[0] if entropies else None, None


def trimmed(batch: Mapping[str, Any], multiple: int | None = None) -> Batch:
    """Trim a micro-batch's columns without tokens: on the left of prompts, on the right of completions.

    Args:
        multiple: the number of columns is rounded up to a multiple of it, as far as there are columns.

    Example:
        >>> mask = torch.tensor([[0, 0, 1], [0, 1, 1]])
        >>> trimmed({"prompt_ids": mask * 7, "prompt_mask": mask, "completion_mask": mask.flip(1)})["prompt_ids"]
        tensor([[0, 7],
                [7, 7]])
    """
    prompts, completions = batch["prompt_mask"], batch["completion_mask"]
    left = prompts.shape[1] - _width(prompts.flip(1), multiple)
    right = _width(completions, multiple)

    def cut(name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.ndim < 2:
            return value
        if name.startswith("prompt") and value.shape[:2] == prompts.shape:
            return value[:, left:]
        return value[:, :right] if value.shape[:2] == completions.shape else value

    return {name: cut(name, value) for name, value in batch.items()}


def sorted_in_blocks(batches: list[Batch], size: int) -> list[Batch]:
    """Sort the rows of each block of `size` micro-batches by length, longest first: if memory does not suffice, it
    shows at once."""
    blocks = [batches[start : start + size] for start in range(0, len(batches), size)]
    return [batch for block in blocks for batch in split_tensor_dict(_sorted(block), size)]


def by_length(mask: torch.Tensor) -> torch.Tensor:
    """Return the row numbers of an attention mask [rows, columns], longest first; equal rows keep their order."""
    return mask.sum(1).argsort(descending=True, stable=True)


def used_columns(mask: torch.Tensor, logits_to_keep: int, multiple: int | None = None) -> tuple[slice, int]:
    """Return the columns with tokens, and the number of completion columns among them.

    Args:
        mask: attention mask [rows, columns]: prompts, padded on the left, then completions, padded on the right.
        logits_to_keep: number of completion columns in `mask`.
        multiple: the width of prompts and of completions is each rounded up to a multiple of it, as far as there are
            columns.
    """
    num_prompt = mask.shape[1] - logits_to_keep
    width = _width(mask[:, :num_prompt].flip(1), multiple)
    kept = _width(mask[:, num_prompt:], multiple)
    return slice(num_prompt - width, num_prompt + kept), kept


def _width(mask: torch.Tensor, multiple: int | None) -> int:
    """Return the number of columns up to the last one with a token, at least 1, rounded up to `multiple`."""
    used = mask.any(0).nonzero()
    width = int(used[-1]) + 1 if len(used) else 1
    return min(mask.shape[1], math.ceil(width / (multiple or 1)) * (multiple or 1))


def _sorted(batches: list[Batch]) -> Batch:
    """Join micro-batches, with rows sorted by length. Values that are not per row are equal in all of them."""
    masks = [torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1) for batch in batches]
    order = by_length(torch.cat(masks))

    def join(values: list[Any]) -> Any:
        if isinstance(values[0], list):
            rows = [*chain.from_iterable(values)]
            return [rows[row] for row in order.tolist()]
        return torch.cat(values)[order] if isinstance(values[0], torch.Tensor) and values[0].ndim else values[0]

    return {name: join([batch[name] for batch in batches]) for name in batches[0]}
