"""Stuck ranks of a node: alive, without progress, and behind the others. First a warning, then the end of the job."""

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass

from grpo.faults.failure import FailureRecord
from grpo.faults.progress import (
    GENERATION,
    WATCHED_PHASE,
    Reached,
    Table,
    are_all_as_far,
    behind,
    record_of_stall,
    still_generating,
)
from grpo.faults.rank import Rank
from grpo.faults.stacks import ask_for_stacks, empty, where

WARN_S = 60.0
WARN_STEPS = 5  # or the time of so many steps, if longer


@dataclass(eq=False)
class Stalls:
    """Detector of stuck ranks; `look` runs once per interval."""

    ranks: Mapping[int, Rank]
    _: KW_ONLY
    is_first_node: bool
    warn_s: float
    """Time without progress, behind the others, before a warning."""
    limit_s: float
    """Time until the job fails; `first_limit_s` before its first step."""
    first_limit_s: float
    ask: Callable[[Callable[[Table], object]], object]
    """Calls its argument with the table of all ranks, now or later."""
    warn: Callable[[str], object]
    """Prints a warning."""
    report: Callable[[FailureRecord], object]
    """Makes a record the job's."""

    def __post_init__(self) -> None:
        self._now_s = 0.0

    def look(self, phases: Mapping[int, tuple[str, int]], now_s: float) -> None:
        """Check the ranks, once per interval.

        Args:
            phases: (phase, exchanges) by rank, for ranks without another deadline.
            now_s: from a clock that stops while this process is stopped.
        """
        self._now_s = now_s
        for number, rank in self.ranks.items():
            state = (*phases.get(number, ("", 0)), Reached.read(rank.progress))
            if state != rank.seen:
                rank.seen, rank.seen_since_s, rank.asked_for, rank.is_warned_of = state, now_s, "", False
        if any(self._is_quiet(rank) for rank in self.ranks.values()):
            self.ask(self._judge)

    def _is_quiet(self, rank: Rank) -> bool:
        phase, _, reached = rank.seen
        patience_s = max(self.warn_s, WARN_STEPS * reached.step_s)
        return phase in (WATCHED_PHASE, GENERATION) and self._now_s - rank.seen_since_s > patience_s

    def _judge(self, table: Table) -> None:
        late = [*behind(table), *still_generating(table)]
        first = min(self.ranks)
        if not late and self.is_first_node and are_all_as_far(table) and self._is_quiet(self.ranks[first]):
            self._act(first, table, "none of them goes on, because of a device or of the network between them,")
        for number in late:
            if number in self.ranks and self._is_quiet(self.ranks[number]):
                self._act(number, table, "it has not gone on")

    def _act(self, number: int, table: Table, what: str) -> None:
        """Warn or fail with current stacks: request them now, use them at the next look."""
        rank = self.ranks[number]
        quiet_s, reached = self._now_s - rank.seen_since_s, rank.seen[2]
        limit_s = max(self.limit_s if reached.step_s else self.first_limit_s, WARN_STEPS * reached.step_s)
        wish = "end" if quiet_s > limit_s else "warning"
        if wish == "warning" and rank.is_warned_of:
            return
        if rank.asked_for != wish:
            rank.asked_for = wish
            if rank.stacks is not None:
                empty(rank.stacks)
                ask_for_stacks(rank.pid)
            return
        record = record_of_stall(table, number, what=f"{what} for {quiet_s:.0f} s{where(rank.stacks, 0)}")
        if wish == "end":
            self.report(record)
        else:
            rank.is_warned_of = True
            self.warn(f"warns that {record.cause}")
