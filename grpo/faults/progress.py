"""Progress counters of a rank, in shared memory read by its node's sentinel, so that a stuck rank need not answer.

The ranks of a job enter the same micro-batches, ends of phases and collectives in the same order. The rank that has
entered fewest is the one the others wait for.
"""

import mmap
import os
import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

from grpo.faults.failure import FailureRecord

_WORDS = struct.Struct("QQQQ")  # entered, collectives, milliseconds of a step, looks
WATCHED_PHASE = "train"
"""Phase in which no other deadline ends a stuck rank: rewards and weight syncs have their own, and a save may take any
time."""
GENERATION = "generate"
"""Phase in which a local main counts `looks` while it waits for completions; without new looks it is stuck."""
Table = dict[str, list[Any]]
"""`RankRow` of each rank as a JSON list, by the rank's number as a string."""


class RankRow(NamedTuple):
    """Progress of one rank, as all sentinels know it."""

    phase: str
    exchanges: int
    """Number of finished exchanges."""
    entered: int
    collectives: int
    node: int
    host: str

    @property
    def reached(self) -> tuple[int, int]:
        """Position by which ranks are compared."""
        return self.entered, self.collectives


def rows_of(table: Table) -> dict[int, RankRow]:
    return {int(rank): RankRow(*row) for rank, row in table.items()}


class RankProgress:
    """Progress counters, written by the rank itself."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("grpo-progress")
        os.ftruncate(self.fd, _WORDS.size)
        self._words = memoryview(mmap.mmap(self.fd, _WORDS.size)).cast("Q")

    def close(self) -> None:
        """Close the descriptor, once the sentinel has it: the memory stays."""
        os.close(self.fd)

    def enter(self) -> None:
        """Count a micro-batch, or the end of an optimizer step or phase. Called by the training thread."""
        self._words[0] += 1

    def look(self) -> None:
        """Count a sign of life while this rank waits."""
        self._words[3] += 1

    def note_collectives(self) -> None:
        """Record torch's count of collectives in groups of all ranks; from any thread."""
        import torch.distributed as dist  # a sentinel has none

        count = 0
        for group in list(dist.distributed_c10d._world.pg_map) if dist.is_initialized() else ():
            try:
                if group.size() == dist.get_world_size():
                    count += group._get_sequence_number_for_group()
            except (RuntimeError, ValueError):  # it counts none yet, or is being destroyed
                continue
        self._words[1] = max(count, self._words[1])

    def note_step(self, seconds: float) -> None:
        """Record the duration of a whole optimizer step."""
        self._words[2] = max(1, round(1000 * seconds))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """Progress of a rank, as its sentinel reads it."""

    entered: int = 0
    collectives: int = 0
    step_s: float = 0.0
    """0: no step has ended."""
    looks: int = 0
    """Signs of life while it waited for completions."""

    @classmethod
    def read(cls, fd: int | None) -> "Reached":
        """Read the counters; zeros without a descriptor."""
        words = b"" if fd is None else os.pread(fd, _WORDS.size, 0)
        if len(words) < _WORDS.size:
            return cls()
        entered, collectives, step_ms, looks = _WORDS.unpack(words)
        return cls(entered=entered, collectives=collectives, step_s=step_ms / 1000, looks=looks)


def behind(table: Table) -> list[int]:
    """Ranks that have entered less than another, the last one first, in a phase without a deadline of its own."""
    rows = rows_of(table)
    most = max((row.reached for row in rows.values()), default=(0, 0))
    late = [rank for rank, row in rows.items() if row.reached < most and row.phase == WATCHED_PHASE]
    return sorted(late, key=lambda rank: rows[rank].reached)


def still_generating(table: Table) -> list[int]:
    """Ranks that have not reached the end of a generation, while another waits for them."""
    rows = rows_of(table)
    most = max((row.exchanges for row in rows.values()), default=0)
    return [rank for rank, row in rows.items() if row.phase == GENERATION and row.exchanges < most]


def are_all_as_far(table: Table) -> bool:
    """True if all ranks wait at the same position."""
    places = {(row.phase, row.reached) for row in rows_of(table).values()}
    return len(places) == 1 and places.pop()[0] == WATCHED_PHASE


def record_of_stall(table: Table, rank: int, *, what: str) -> FailureRecord:
    """Make the failure record of the rank the others wait for; of the given rank if none is behind.

    Args:
        what: observation for the cause.
    """
    rows = rows_of(table)
    row, most = rows[rank], max(each.reached for each in rows.values())
    done = f"{row.entered} micro-batches, steps and ends of phases and {row.collectives} collectives"
    who = f"rank {rank} is behind the others, which wait for it: it has entered {done}, others {most[0]} and {most[1]}"
    if row.phase == GENERATION:
        who = f"rank {rank} has not come to the end of the generation, where others wait for it"
    elif row.reached == most:
        who = f"no rank is behind: all have entered {done}"
    return FailureRecord(node=row.node, rank=rank, host=row.host, phase=row.phase, cause=f"{who} [GRPO-620]: {what}")
