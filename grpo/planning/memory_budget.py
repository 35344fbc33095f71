"""A memory budget: what stands on one device, and in which phase. All of it is estimated."""

import math
from dataclasses import dataclass
from typing import Literal

GIB = 2**30

Phase = Literal["always", "forward and backward", "optimizer step", "push"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One item of a budget."""

    key: str
    """Name in the JSON output."""
    what: str
    phase: Phase
    """When it is held. What is held in different phases, except `always`, is never held together."""
    num_bytes: int
    how: str
    """The formula, with its numbers."""
    counted: bool = True
    """False for what is shown for comparison."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The lines of one device, and what they come to at worst."""

    lines: tuple[Line, ...]
    capacity_bytes: int | None
    """Of the device; None where it is not known."""
    peak_bytes: int
    peak_phase: Phase

    def bytes_of(self, *keys: str) -> int:
        """Of the lines with these keys, counted or not; a key without a line is 0."""
        return sum(line.num_bytes for line in self.lines if line.key in keys)


def make_budget(lines: list[Line], capacity_bytes: int | None) -> Budget:
    """Adds the lines up: what is always held, and the phase that holds most beside it."""
    held: dict[Phase, int] = {"always": 0, "forward and backward": 0, "optimizer step": 0, "push": 0}
    for line in lines:
        held[line.phase] += line.num_bytes if line.counted else 0
    always = held.pop("always")
    peak_phase: Phase = max(held, key=lambda phase: held[phase])
    return Budget(
        lines=tuple(lines),
        capacity_bytes=capacity_bytes,
        peak_bytes=always + held[peak_phase],
        peak_phase=peak_phase if held[peak_phase] else "always",
    )


def readable(num_bytes: float) -> str:
    """'18.4 GiB', '1.52 GiB', '655 KiB': three digits in the unit that fits."""
    for unit, name in ((GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= unit:
            value = num_bytes / unit
            return f"{value:.{max(0, 2 - int(math.log10(value)))}f} {name}"
    return f"{num_bytes:.0f} B"


def short_count(elements: int) -> str:
    """'7.62 B', '500 M', '81.9 K': how many."""
    for unit, name in ((10**9, " B"), (10**6, " M"), (10**3, " K")):
        if elements >= unit:
            return f"{elements / unit:.3g}{name}"
    return str(elements)
