"""Text of a completion, for rewards that read only its text."""

from collections.abc import Mapping, Sequence
from typing import Any

Completion = str | Sequence[Mapping[str, Any]]


def text_of(completion: Completion) -> str:
    """Return the text of a completion, or the content of its last message."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])
