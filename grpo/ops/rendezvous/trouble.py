"""Missing nodes and differences between nodes, in one record."""

from collections.abc import Sequence
from dataclasses import dataclass

_NAMES_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """Nodes missing, or different from the others.

    Example: Trouble(message="torch: 2.13.0 on a, c; 2.12.0 on b", fix="install one version", nodes=("b",)).
    """

    message: str
    """Values, and the nodes with each: `torch: 2.13.0 on a, c; 2.12.0 on b`."""
    fix: str
    """Remedy, as a sentence for the user."""
    nodes: tuple[str, ...]
    """Names of the affected nodes."""
    is_fatal: bool = True
    """False if the difference may be intended."""


def list_nodes(names: Sequence[str]) -> str:
    """Join names: `a, b, c`, or the first few and the number of the rest."""
    if len(names) <= _NAMES_SHOWN:
        return ", ".join(names)
    return f"{', '.join(names[:_NAMES_SHOWN])} and {len(names) - _NAMES_SHOWN} more"
