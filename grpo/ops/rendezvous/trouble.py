"""What is wrong between nodes: one record for who is missing and for what differs."""

from collections.abc import Sequence
from dataclasses import dataclass

_NAMES_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """Nodes that are not with the others, or not as they are."""

    message: str
    """With the values, and where they are: `torch: 2.13.0 on a, c; 2.12.0 on b`."""
    fix: str
    """What to do about it."""
    nodes: tuple[str, ...]
    """Those that it is about."""
    is_fatal: bool = True
    """False where they may be right to differ."""


def list_nodes(names: Sequence[str]) -> str:
    """`a, b, c`, or the first few and how many there are."""
    if len(names) <= _NAMES_SHOWN:
        return ", ".join(names)
    return f"{', '.join(names[:_NAMES_SHOWN])} and {len(names) - _NAMES_SHOWN} more"
