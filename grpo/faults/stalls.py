"""Stuck ranks of a node: alive, without progress, and behind the others. A warning first, then the job's end."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

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
from grpo.faults.stacks import ask_for_stacks, empty, where

WARN_S = 60.0
WARN_STEPS = 5  # or so many steps' time, where that is longer


@dataclass(slots=True, kw_only=True)
class Watched:
    """One rank as it is looked at."""

    pid: int
    progress: int | None = None
    """Descriptors, which it has sent."""
    stacks: int | None = None
    state: tuple[str, int, Reached] = ("", 0, Reached())
    """Phase, exchanges, and how far it has come."""
    since_s: float = 0.0
    """When that was new."""
    asked_for: str = ""
    """What its stacks were asked for last."""
    is_warned: bool = False


class Stalls:
    """Looks once an interval.

    Args:
        warn_s: without progress, behind the others, until the user is warned.
        limit_s: until the job has failed; `first_limit_s` before its first step.
        ask: brings the table of all ranks, now or later.
        warn: prints a warning.
        report: makes a record the job's.
    """

    def __init__(
        self,
        ranks: Mapping[int, Watched],
        *,
        is_first_node: bool,
        warn_s: float,
        limit_s: float,
        first_limit_s: float,
        ask: Callable[[Callable[[Table], object]], object],
        warn: Callable[[str], object],
        report: Callable[[FailureRecord], object],
    ) -> None:
        self._ranks, self._is_first_node = ranks, is_first_node
        self._warn_s, self._limit_s, self._first_limit_s = warn_s, limit_s, first_limit_s
        self._ask, self._warn, self._report = ask, warn, report
        self._now_s = 0.0

    def look(self, phases: Mapping[int, tuple[str, int]], now_s: float) -> None:
        """Once an interval.

        Args:
            phases: and exchanges, by rank; of those that nothing else may end.
            now_s: of a clock that stands still while this process is held.
        """
        self._now_s = now_s
        for number, rank in self._ranks.items():
            state = (*phases.get(number, ("", 0)), Reached.read(rank.progress))
            if state != rank.state:
                rank.state, rank.since_s, rank.asked_for, rank.is_warned = state, now_s, "", False
        if any(self._is_quiet(rank) for rank in self._ranks.values()):
            self._ask(self._judge)

    def _is_quiet(self, rank: Watched) -> bool:
        phase, _, reached = rank.state
        patience_s = max(self._warn_s, WARN_STEPS * reached.step_s)
        return phase in (WATCHED_PHASE, GENERATION) and self._now_s - rank.since_s > patience_s

    def _judge(self, table: Table) -> None:
        late = [*behind(table), *still_generating(table)]
        first = min(self._ranks)
        if not late and self._is_first_node and are_all_as_far(table) and self._is_quiet(self._ranks[first]):
            self._act(first, table, "none of them goes on, because of a device or of the network between them,")
        for number in late:
            if number in self._ranks and self._is_quiet(self._ranks[number]):
                self._act(number, table, "it has not gone on")

    def _act(self, number: int, table: Table, what: str) -> None:
        """With stacks that are of now: they are asked for, and there at the next look."""
        rank = self._ranks[number]
        quiet_s, reached = self._now_s - rank.since_s, rank.state[2]
        limit_s = max(self._limit_s if reached.step_s else self._first_limit_s, WARN_STEPS * reached.step_s)
        wish = "end" if quiet_s > limit_s else "warning"
        if wish == "warning" and rank.is_warned:
            return
        if rank.asked_for != wish:
            rank.asked_for = wish
            if rank.stacks is not None:
                empty(rank.stacks)
                ask_for_stacks(rank.pid)
            return
        record = record_of_stall(table, number, what=f"{what} for {quiet_s:.0f} s{where(rank.stacks, 0)}")
        if wish == "end":
            self._report(record)
        else:
            rank.is_warned = True
            self._warn(f"warns that {record.cause}")
