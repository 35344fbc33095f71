"""Images in prompts: finding them in data, and sending them between processes.

A multimodal prompt has images in the column `image` or `images`, or in its messages. They are sent as lossless files
(PNG in RGB), so that engine and trainer see the same pixels.
"""

import hashlib
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image  # an engine host of a text model needs none

COLUMNS = ("image", "images")
"""Columns where TRL looks for a row's images (1.16)."""


def column_of_images(dataset: Any) -> str | None:
    """Return the image column of a data set; None if it has none or does not list its columns."""
    return next((name for name in COLUMNS if name in (getattr(dataset, "column_names", None) or ())), None)


def has_image_parts(dataset: Any) -> bool:
    """True if the data set's features allow images as parts of prompt messages."""
    return "image" in _names_in((getattr(dataset, "features", None) or {}).get("prompt"))


def _names_in(feature: Any) -> set[str]:
    """Names of all fields nested in a feature."""
    inner = getattr(feature, "feature", feature)  # of a list
    if not isinstance(inner, Mapping):
        return set() if inner is feature else _names_in(inner)
    return {*inner}.union(*map(_names_in, inner.values()))


def parts_of(prompt: Any) -> list[Mapping[str, Any]]:
    """Return the content parts of a prompt's messages; [] for plain text."""
    messages = [message for message in prompt if isinstance(message, Mapping)] if isinstance(prompt, Sequence) else []
    contents = [message.get("content") for message in messages]
    return [part for content in contents if isinstance(content, list) for part in content if isinstance(part, Mapping)]


def images_of(prompt: Any) -> list[Any]:
    """Return a prompt's images, in order."""
    return [part["image"] for part in parts_of(prompt) if part.get("type") == "image"]


def kinds_of_parts(prompt: Any) -> set[str]:
    """Return the types of a prompt's parts: `text`, `image` and the like."""
    return {part["type"] for part in parts_of(prompt) if "type" in part}


def with_list_of_images(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with the key `images`, if there is an image column: TRL gives processors None for a row without
    (1.16)."""
    row = {**row, "prompt": _without_empty(row["prompt"])}
    if "images" in row:
        return {**row, "images": row["images"] or []}
    return {**row, "images": [] if row["image"] is None else [row["image"]]} if "image" in row else row


def in_rgb(prompt: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a prompt with its images converted to PIL images in RGB."""
    return [
        {
            **message,
            "content": [{**part, "image": as_rgb(part["image"])} if "image" in part else part for part in content],
        }
        if isinstance(content := message.get("content"), list)
        else {**message}
        for message in prompt
    ]


def as_rgb(image: Any) -> "Image":
    """Return a PIL image in RGB, from a PIL image, a path, a URL, or datasets' form inside messages. Transparent parts
    become white, as in vLLM."""
    from PIL import Image
    from transformers.image_utils import load_image

    if isinstance(image, Mapping):
        image = image["path"] if image.get("bytes") is None else decoded(image["bytes"])
    if not isinstance(image, Image.Image):
        image = load_image(image)
    if image.mode != "RGBA":
        return image.convert("RGB")
    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, image).convert("RGB")


def encoded(image: "Image") -> bytes:
    """Return the image as PNG bytes."""
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    return file.getvalue()


def decoded(data: bytes) -> "Image":
    """Return the image from the bytes of `encoded`."""
    from PIL import Image

    image = Image.open(io.BytesIO(data))
    image.load()
    return image


def digest(data: bytes) -> str:
    """Hash of an image file: the key under which engines cache its features."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def shared(files: Iterable[bytes]) -> tuple[list[bytes], list[int]]:
    """Return the distinct files, and for each file its index among them.

    Example:
        >>> shared([b"a", b"b", b"a"])
        ([b'a', b'b'], [0, 1, 0])
    """
    numbers: dict[bytes, int] = {}
    places = [numbers.setdefault(file, len(numbers)) for file in files]
    return [*numbers], places


def _without_empty(prompt: Any) -> Any:
    """Drop None values from parts: Arrow gives all parts of all messages the same keys."""
    if isinstance(prompt, str):
        return prompt
    return [
        {**message, "content": [{name: value for name, value in part.items() if value is not None} for part in content]}
        if isinstance(content := message.get("content"), list)
        else message
        for message in prompt
    ]
