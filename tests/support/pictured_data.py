"""Prompts with images, made on the spot."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from datasets import Dataset
from PIL import Image


def picture(seed: int, side: int = 40) -> Image.Image:
    noise = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def pictured(texts: Sequence[str], where: str, *, without: Sequence[int] = (), period: int = 8) -> Dataset:
    """An episode for each text, with a picture of its own; of every `period` rows those of `without` have none.

    Args:
        where: the column `image` or `images`, or `messages`.
    """
    rows: list[dict[str, Any]] = []
    for number, text in enumerate(texts):
        image = None if number % period in without else picture(number)
        message: dict[str, Any] = {"role": "user", "content": text}
        row: dict[str, Any] = {"prompt": [message]}
        if where == "messages":
            parts = [{"type": "text", "text": text}]
            message["content"] = parts if image is None else [{"type": "image", "image": image}, *parts]
        else:
            row[where] = image if where == "image" else [image][: image is not None]
        rows.append(row)
    return Dataset.from_list(rows)
