"""The text of a completion, for rewards that read no more of it."""

from collections.abc import Mapping, Sequence
from typing import Any

Completion = str | Sequence[Mapping[str, Any]]


def text_of(completion: Completion) -> str:
    """A completion of plain text, or the last message of a conversation."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])
