"""Prompts with images after the processor: the token ids for an engine, and a test prompt for verification."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import ProcessorMixin

from grpo.model.pictures import encoded

SIDE = 64
"""Side of a probe's image in pixels; processors resize it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PictureProbe:
    """One prompt with each of two different images, followed by text."""

    token_ids: list[int]
    """Prompt for an engine, with one placeholder for the image."""
    pictures: tuple[bytes, ...]
    """Images as file contents, one per row of `inputs`."""
    inputs: dict[str, torch.Tensor]
    """Processor's output for the model's forward; `input_ids` and `attention_mask` are [2, L]."""
    stand_in: dict[str, torch.Tensor]
    """Processor's output for the first row alone."""
    num_scored: int
    """Tokens after the image; their log-probabilities depend on it."""


def engine_ids(processor: ProcessorMixin, texts: Sequence[str]) -> list[list[int]]:
    """Return token ids of prompts, with one placeholder per image: engines expand placeholders themselves.

    Args:
        texts: prompts rendered by the chat template. Special tokens are added unless the first text begins with them,
            as in transformers' processors (5.17).
    """
    tokenizer = processor.tokenizer
    begins = tokenizer.bos_token is not None and texts[0].startswith(tokenizer.bos_token)
    return tokenizer(text=list(texts), **({"add_special_tokens": False} if begins else {}))["input_ids"]


def rendered(processor: ProcessorMixin, prompts: Sequence[Any], **template: Any) -> list[str]:
    """Render each prompt's messages by the chat template."""
    return processor.apply_chat_template([*prompts], add_generation_prompt=True, tokenize=False, **template)


def picture_probe(processor: ProcessorMixin, text: str, **template: Any) -> PictureProbe:
    """Build the probe; identical on every rank.

    Args:
        text: ordinary text after the image.
        template: variables of the chat template.

    Raises:
        ValueError: the template allows no token after an image.
    """
    noise = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    images = [Image.fromarray(each) for each in (noise, 255 - noise // 4)]
    prompts = [
        [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": text}]}]
        for image in images
    ]
    (given,) = set(map(tuple, engine_ids(processor, rendered(processor, prompts, **template))))

    def of(some: list[Any]) -> dict[str, torch.Tensor]:
        made = processor.apply_chat_template(
            some, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt", **template
        )
        return {name: torch.as_tensor(value) for name, value in made.items()}

    inputs = of(prompts)
    expanded = inputs["input_ids"][0].tolist()
    num_scored = _equal_at_the_end(expanded, given) - 1  # the placeholder itself may be among them
    if num_scored < 1 or len(expanded) == len(given):
        raise ValueError(
            "the chat template lets no token follow an image, or leaves images out: give the processor the template "
            "of its checkpoint (chat_template.jinja)"
        )
    return PictureProbe(
        token_ids=list(given),
        pictures=tuple(map(encoded, images)),
        inputs=inputs,
        stand_in=of(prompts[:1]),
        num_scored=num_scored,
    )


def _equal_at_the_end(expanded: Sequence[int], given: Sequence[int]) -> int:
    """Length of the common suffix of two token lists."""
    pairs = zip(reversed(expanded), reversed(given), strict=False)
    return next((count for count, (one, other) in enumerate(pairs) if one != other), min(len(expanded), len(given)))
