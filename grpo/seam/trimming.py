"""No padding is computed that no row of a micro-batch needs.

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
    """Forward passes that are as wide as the rows that they are of; see `GRPOConfig.trim_padding`."""

    def __init__(self, view: TrainerView) -> None:
        self._view = view

    @property
    def is_on(self) -> bool:
        """TRL's other modes are left as they are."""
        return self._view.args.local_mode and self._view.args.trim_padding

    def trim(self, inputs: Batch) -> Batch:
        """Trim a generation batch that has just come. Collective.

        Args:
            inputs: the micro-batch of it that TRL would train on now.

        Returns:
            The one in its place.
        """
        view, args, batches = self._view, self._view.args, self._view.batch_in_use
        if batches is None or view.has_processor:  # of which a rank may have images, and another none
            return inputs
        if self.is_on:
            if not self.depends_on_grouping():
                # Blocks of so many never reach over an optimizer step's end, whichever of the two numbers is larger.
                batches = sorted_in_blocks(batches, math.gcd(len(batches), args.gradient_accumulation_steps))
            batches = [trimmed(batch, args.pad_to_multiple_of) for batch in batches]
        self._note_padding(batches)
        view.batch_in_use = batches
        return batches[view.micro_batches % len(batches)]

    def depends_on_grouping(self) -> bool:
        """Whether the loss is another one where a step's rows are dealt out to its micro-batches otherwise: it is a
        mean over the tokens of each, or a subclass's own. Rows in the order of their lengths would shift it then."""
        view, args = self._view, self._view.args
        has_entropy = args.entropy_coef != 0.0 or args.use_adaptive_entropy or args.top_entropy_quantile < 1.0
        return view.has_own_loss or args.loss_type == "bnpo" or has_entropy or view.has_aux_loss

    def _note_padding(self, batches: list[Batch]) -> None:
        """The share of pads in what training computes, over all ranks. Collective."""
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
        """TRL's log-probabilities and entropies. Rows that come in several chunks, which are those of a whole
        generation batch, are scored in the order of their lengths, each chunk as wide as its rows; [rows,
        logits_to_keep] in the order given, 0 where a chunk had no column."""
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
    """A micro-batch without the columns in which no row has a token: prompts' on the left, completions' on the right.

    Args:
        multiple: of which the number of columns is one, as far as there are so many.

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
    """The same rows, those of each block of so many micro-batches in the order of their lengths, longest first: what
    does not fit a device's memory shows at once."""
    blocks = [batches[start : start + size] for start in range(0, len(batches), size)]
    return [batch for block in blocks for batch in split_tensor_dict(_sorted(block), size)]


def by_length(mask: torch.Tensor) -> torch.Tensor:
    """Rows of an attention mask [rows, columns], longest first; of equals the first one."""
    return mask.sum(1).argsort(descending=True, stable=True)


def used_columns(mask: torch.Tensor, logits_to_keep: int, multiple: int | None = None) -> tuple[slice, int]:
    """Columns in which a row has a token, and how many of these are completions'.

    Args:
        mask: attention mask [rows, columns], of prompts that are padded on the left, and of so many columns of
            completions, that are padded on the right.
        multiple: of which the number of columns of either is one, as far as there are so many.
    """
    num_prompt = mask.shape[1] - logits_to_keep
    width = _width(mask[:, :num_prompt].flip(1), multiple)
    kept = _width(mask[:, num_prompt:], multiple)
    return slice(num_prompt - width, num_prompt + kept), kept


def _width(mask: torch.Tensor, multiple: int | None) -> int:
    """Up to the last column in which a row has a token; at least one."""
    used = mask.any(0).nonzero()
    width = int(used[-1]) + 1 if len(used) else 1
    return min(mask.shape[1], math.ceil(width / (multiple or 1)) * (multiple or 1))


def _sorted(batches: list[Batch]) -> Batch:
    """One batch of all rows, by their lengths; what is not of rows is the same in all."""
    masks = [torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1) for batch in batches]
    order = by_length(torch.cat(masks))

    def join(values: list[Any]) -> Any:
        if isinstance(values[0], list):
            rows = [*chain.from_iterable(values)]
            return [rows[row] for row in order.tolist()]
        return torch.cat(values)[order] if isinstance(values[0], torch.Tensor) and values[0].ndim else values[0]

    return {name: join([batch[name] for batch in batches]) for name in batches[0]}
