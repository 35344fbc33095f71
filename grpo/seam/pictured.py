"""Prompts with images.

TRL 1.16 does not cover two cases. An engine expands images itself, so its prompt needs one placeholder per image. A
rank's batch may have rows without images, or no image at all, but every rank must run the same collectives.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import pad
from trl.data_utils import prepare_multimodal_messages
from trl.trainer.utils import split_pixel_values_by_grid, unsplit_pixel_values_by_grid

from grpo.config.models import base_of
from grpo.model.picture_probe import PictureProbe, engine_ids, picture_probe, rendered
from grpo.model.pictures import images_of, in_rgb, with_list_of_images
from grpo.model.text_part import count_towers, describe_trained_parts, freeze_towers, tower_paths
from grpo.preflight.images import takes_images
from grpo.preflight.processor import Processor, load_processor, processor_of
from grpo.seam.trimming import Score, Trimming, used_columns
from grpo.seam.view import TrainerView

_OPTIONS = ("compute_entropy", "compute_aux_loss")
_OF_TOKENS = ("token_type_ids", "mm_token_type_ids")


class Pictures:
    """Prompts with images; only text until `find` is called."""

    def __init__(self, view: TrainerView, trimming: Trimming) -> None:
        self._view, self._trimming = view, trimming
        self.are_taken = False
        """True if prompts have images."""
        self.processor: Processor | None = None
        """Processor of a multimodal model whose text part alone is trained: its files are saved beside the
        tokenizer's."""
        self._stand_in: Mapping[str, torch.Tensor] | None = None
        """Prompt with an image, [1, L] and the processor's fields of the image: computed beside rows without images."""
        self.engine_ids: Sequence[Sequence[int]] = ()
        """Token ids of the prompts tokenized last on this rank, with one placeholder per image."""

    def choose_processor(self, arguments: dict[str, Any]) -> None:
        """Put the processor into the trainer's arguments, or its tokenizer if prompts have no images. Arguments of a
        text model stay as they are.

        Raises:
            ValueError: there is no processor, or the given one does not take images.
        """
        self.are_taken = takes_images(arguments)
        if self.are_taken:
            given = arguments["processing_class"]
            arguments["processing_class"] = given or load_processor(base_of(arguments["model"]), arguments["args"])
        elif (processor := processor_of(arguments)) is not None:  # with a tokenizer TRL assumes a text model
            arguments["processing_class"], self.processor = processor.tokenizer, processor

    def settle_towers(self, base: Any) -> str | None:
        """Freeze the towers if `GRPOConfig.freeze_towers` says so, or prompts have no images.

        Returns:
            One line for the screen; None for a text model.
        """
        freezes = not self.are_taken or self._view.args.freeze_towers
        num_elements = freeze_towers(base) if freezes else count_towers(base)
        if num_elements == 0:
            return None
        name, paths = type(base).__name__, tower_paths(base)
        return describe_trained_parts(name, paths, num_elements, takes_images=self.are_taken, freezes=freezes)

    def find(self, text: Sequence[int]) -> PictureProbe | None:
        """Make a prompt with an image for verifications. On every rank, after TRL's own `__init__`.

        Args:
            text: token ids of ordinary text.

        Returns:
            The prompt; None if prompts have no images.
        """
        if not self.are_taken:
            return None
        view = self._view
        words = view.tokenizer.decode(text, skip_special_tokens=True)
        probe = picture_probe(view.processing_class, words, **(view.args.chat_template_kwargs or {}))
        self._stand_in = {name: view.to_device(tensor) for name, tensor in probe.stand_in.items()}
        return probe

    # -- rows -----------------------------------------------------------------------------------------------------

    def listed(self, rows: Any) -> Any:
        """Return a batch of the data set with a list of images in each row."""
        if self._stand_in is None or not isinstance(rows, list):
            return rows
        return [with_list_of_images(row) for row in rows]

    def tokenize(self, call: Callable[[list[Any]], Any], prompts: list[Any]) -> Any:
        """Tokenize by TRL's `_tokenize_prompts`, with images in RGB, as engines get them. A prompt without images gets
        an empty list in place of None, which processors do not take.

        Raises:
            ValueError: an image in the messages, but none in the first row.
        """
        if self._stand_in is None:
            return self._without_images(call(prompts))
        view = self._view
        prompts = [in_rgb(prepare_multimodal_messages(prompt)) for prompt in prompts]
        prompt_ids, images, fields = call(prompts)
        if images is None:
            return prompt_ids, None, fields
        images = [each or [] for each in images]
        template = {"chat_template": view.chat_template, **(view.args.chat_template_kwargs or {})}
        of_engines = engine_ids(view.processing_class, rendered(view.processing_class, prompts, **template))
        self.engine_ids = [
            unexpanded if of_row else ids
            for ids, unexpanded, of_row in zip(prompt_ids, of_engines, images, strict=True)
        ]
        return prompt_ids, images, fields

    def _without_images(self, tokenized: Any) -> Any:
        """Return `tokenized`, which must not have images."""
        if self._view.args.local_mode and tokenized[1] is not None:
            raise ValueError(
                "a prompt has an image in its messages, but the first row has none, and so text alone is trained: "
                "put a row with an image first, or give images in a column of their own"
            )
        return tokenized

    @contextlib.contextmanager
    def of_batch(self, num_rows: int) -> Iterator[None]:
        """Keep TRL from gathering images for its logs while a batch is sampled: it gathers only on ranks that have
        some. They are taken from the gathered prompts instead."""
        if self._stand_in is None:
            yield
            return
        view = self._view
        logs, view.logs_images = view.logs_images, False
        try:
            yield
        finally:
            view.logs_images = logs
        said = view.said
        if logs and view.args.log_completions:
            gathered = [*said["prompt"]][-num_rows * view.accelerator.num_processes :]  # images included
            said["images"].extend(images_of(prompt) for prompt in gathered)
        for number, prompt in enumerate(said["prompt"]):  # lists of parts in all rows, for TRL's tables
            said["prompt"][number] = prepare_multimodal_messages(prompt)

    def save_processor(self, folder: Path) -> None:
        if self._view.args.should_save and self.processor is not None:
            self.processor.save(folder)

    # -- forward passes -------------------------------------------------------------------------------------------

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
        """Compute log-probabilities and entropies by TRL's `call`, [rows, logits_to_keep] in the given order.

        Each forward pass has an image, so that all ranks gather the same weights and towers have a gradient on all
        ranks. With trimmed padding it is as wide as its longest row.
        """
        assert self._stand_in is not None, "prompts have images"
        options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
        given = {name: value for name, value in kwargs.items() if value is not None}
        rows = split_pixel_values_by_grid({"input_ids": input_ids, "attention_mask": attention_mask, **given})
        found = []
        for start in range(0, len(input_ids), batch_size or len(input_ids)):
            chunk = {name: value[start : start + (batch_size or len(input_ids))] for name, value in rows.items()}
            num_rows, kept = len(chunk["input_ids"]), logits_to_keep
            if self._trimming.is_on:
                multiple = self._view.args.pad_to_multiple_of
                columns, kept = used_columns(chunk["attention_mask"], logits_to_keep, multiple)
                of_tokens = ("input_ids", "attention_mask", *_OF_TOKENS)
                chunk |= {name: chunk[name][:, columns] for name in of_tokens if name in chunk}
            if not any(chunk.get("num_images") or ()):
                chunk = with_stand_in(chunk, self._stand_in, kept, self._view.tokenizer.pad_token_id)
            fields = unsplit_pixel_values_by_grid(chunk)
            token_ids, mask = fields.pop("input_ids"), fields.pop("attention_mask")
            *scored, aux_loss = call(model, token_ids, mask, kept, **options, **fields)
            padding = (0, logits_to_keep - kept)
            filled = [None if each is None else pad(each[:num_rows], padding) for each in scored]
            found.append((*filled, aux_loss))
        logps, entropies, aux_losses = zip(*found, strict=True)
        return (
            torch.cat(logps),
            torch.cat(entropies) if entropies[0] is not None else None,
            torch.stack(aux_losses).mean() if aux_losses[0] is not None else None,
        )


def with_stand_in(chunk: Mapping[str, Any], stand_in: Mapping[str, Any], kept: int, pad_id: int) -> dict[str, Any]:
    """Append a row with an image, not scored, to rows without images.

    Args:
        chunk: the rows: `input_ids` and other fields of tokens, [num_rows, L].
        stand_in: a prompt with one image: `input_ids` [1, S] and the processor's other fields.
        kept: number of completion columns, at the end of L.
        pad_id: id of the pad tokens left of prompts and right of completions.
    """
    num_rows, length = chunk["input_ids"].shape
    width = max(length, stand_in["input_ids"].shape[1] + kept)
    of_tokens = ("input_ids", "attention_mask", *(name for name in _OF_TOKENS if name in stand_in))
    found = {name: value for name, value in stand_in.items() if name not in of_tokens}
    for name in of_tokens:
        fill = pad_id if name == "input_ids" else 0
        own = chunk.get(name)
        rows = torch.zeros_like(chunk["input_ids"]) if own is None else own
        last = pad(stand_in[name], (0, kept), value=fill)
        found[name] = torch.cat([pad(each, (width - each.shape[1], 0), value=fill) for each in (rows, last)])
    found["num_images"] = [0] * num_rows + [1]
    pixels = found["pixel_values"]
    if "image_grid_thw" not in found and "image_position_ids" not in found and len(pixels) != 1:
        found["num_tiles"] = [0] * num_rows + [len(pixels)]  # TRL splits tiles among rows by it
    return found
