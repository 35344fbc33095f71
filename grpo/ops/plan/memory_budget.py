"""Memory budget of one device, by phase. All sizes are estimates."""

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Literal, get_args

GIB = 2**30

Phase = Literal["always", "forward and backward", "optimizer step", "sync"]
Holder = Literal["every rank", "local main", "other ranks"]


@dataclass(frozen=True, slots=True)
class BudgetLine:
    """One item of a budget.

    Example: BudgetLine("pixels", "pixels", "always", 402653184, "32 images of a generation x 12 MiB, in float32").
    """

    key: str
    """Name in the JSON output."""
    what: str
    phase: Phase
    """Phase in which it is held. Two phases never overlap, except with `always`."""
    num_bytes: int
    how: str
    """Formula, with its numbers."""
    _: KW_ONLY
    counted: bool = True
    """False for a line shown for comparison only."""
    holder: Holder = "every rank"


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Memory held in one phase, with `always` included."""

    phase: Phase
    local_main_bytes: int
    other_ranks_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Lines of one device and their sums: by phase, and the peak."""

    lines: tuple[BudgetLine, ...]
    capacity_bytes: int | None
    """Memory of the device; None if unknown."""
    held: tuple[Held, ...]
    """Memory by phase; "always" first."""
    peak_bytes: int
    """Peak of the rank with the highest memory."""
    peak_phase: Phase

    @property
    def fits(self) -> bool:
        return self.capacity_bytes is None or self.peak_bytes <= self.capacity_bytes

    def bytes_of(self, *keys: str) -> int:
        """Sum of the lines with these keys, counted or not; a key without a line is 0."""
        return sum(line.num_bytes for line in self.lines if line.key in keys)


def make_budget(lines: Sequence[BudgetLine], capacity_bytes: int | None) -> Budget:
    """Sum the lines: `always`, and each phase on top of it."""
    held = tuple(
        Held(
            phase=phase,
            local_main_bytes=_held_bytes(lines, phase, without="other ranks"),
            other_ranks_bytes=_held_bytes(lines, phase, without="local main"),
        )
        for phase in get_args(Phase)
    )
    peak = max(held, key=lambda phase: max(phase.local_main_bytes, phase.other_ranks_bytes))  # the first of equals
    return Budget(
        lines=tuple(lines),
        capacity_bytes=capacity_bytes,
        held=held,
        peak_bytes=max(peak.local_main_bytes, peak.other_ranks_bytes),
        peak_phase=peak.phase,
    )


def _held_bytes(lines: Sequence[BudgetLine], phase: Phase, *, without: Holder) -> int:
    phases = ("always", phase)
    return sum(line.num_bytes for line in lines if line.counted and line.phase in phases and line.holder != without)


def readable(num_bytes: float) -> str:
    """Format bytes: '18.4 GiB', '1.52 GiB', '655 KiB' (three digits)."""
    for unit, name in ((GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= unit:
            value = num_bytes / unit
            return f"{value:.{max(0, 2 - int(math.log10(value)))}f} {name}"
    return f"{num_bytes:.0f} B"


def short_count(elements: int) -> str:
    """Format a count: '7.62 B', '500 M', '81.9 K'."""
    for unit, name in ((10**9, " B"), (10**6, " M"), (10**3, " K")):
        if elements >= unit:
            return f"{elements / unit:.3g}{name}"
    return str(elements)
