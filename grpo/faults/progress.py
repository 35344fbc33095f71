"""How far a rank has come, in memory that its node's sentinel reads: whatever the rank is stuck in, it need not answer.

Ranks of a job enter the same micro-batches, ends of phases and collectives in the same order. Who has entered fewer is
the one that the others wait for.
"""

import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo.faults.failure import FailureRecord

_WORDS = struct.Struct("QQQ")  # entered, collectives, a step in ms
WATCHED_PHASE = "train"
"""In which a rank may be stuck and no other deadline ends it: generation, rewards and weight syncs have theirs, and a
save may take as long as it takes."""
Table = Mapping[str, Sequence[Any]]
"""By rank: phase, exchanges, entered, collectives, node, host."""


class Progress:
    """A rank's own side."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("grpo-progress")
        os.ftruncate(self.fd, _WORDS.size)
        self._words = memoryview(mmap.mmap(self.fd, _WORDS.size)).cast("Q")

    def close(self) -> None:
        """The descriptor, once the sentinel has it: the memory stays."""
        os.close(self.fd)

    def enter(self) -> None:
        """This rank begins a micro-batch, ends an optimizer step or a phase; by the thread that trains."""
        self._words[0] += 1

    def note_collectives(self) -> None:
        """What torch has counted, of groups of all ranks; from any thread."""
        import torch.distributed as dist  # a sentinel has none

        count = 0
        for group in list(dist.distributed_c10d._world.pg_map) if dist.is_initialized() else ():
            try:
                if group.size() == dist.get_world_size():
                    count += group._get_sequence_number_for_group()
            except (RuntimeError, ValueError):  # it counts none yet, or is being taken apart
                continue
        self._words[1] = max(count, self._words[1])

    def note_step(self, seconds: float) -> None:
        """What an optimizer step takes, all of it."""
        self._words[2] = max(1, round(1000 * seconds))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """As a sentinel reads it."""

    entered: int = 0
    collectives: int = 0
    step_s: float = 0.0
    """0: no step has ended."""

    @property
    def far(self) -> tuple[int, int]:
        """What ranks are compared by."""
        return self.entered, self.collectives

    @classmethod
    def read(cls, fd: int | None) -> "Reached":
        """Nothing where there is no descriptor."""
        words = b"" if fd is None else os.pread(fd, _WORDS.size, 0)
        if len(words) < _WORDS.size:
            return cls()
        entered, collectives, step_ms = _WORDS.unpack(words)
        return cls(entered=entered, collectives=collectives, step_s=step_ms / 1000)


def behind(table: Table) -> list[int]:
    """Ranks that have entered less than another, where nothing else has to end what they do."""
    most = max((tuple(row[2:4]) for row in table.values()), default=(0, 0))
    late = [int(rank) for rank, row in table.items() if tuple(row[2:4]) < most and row[0] == WATCHED_PHASE]
    return sorted(late, key=lambda rank: tuple(table[str(rank)][2:4]))


def are_all_as_far(table: Table) -> bool:
    """Whether every rank waits where all others do."""
    return len({tuple(row[2:4]) for row in table.values() if row[0] == WATCHED_PHASE}) == 1 and all(
        row[0] == WATCHED_PHASE for row in table.values()
    )


def record_of_behind(table: Table, rank: int, *, what: str) -> FailureRecord:
    """That the others wait for this rank.

    Args:
        what: happened, or has been seen.
    """
    phase, _, entered, collectives, node, host = table[str(rank)]
    most = max(tuple(row[2:4]) for row in table.values())
    cause = (
        f"rank {rank} is behind the others, which wait for it: it has entered {entered} micro-batches, steps and ends "
        f"of phases and {collectives} collectives, others {most[0]} and {most[1]} [GRPO-620]: {what}"
    )
    return FailureRecord(node=node, rank=rank, host=host, phase=phase, cause=cause)
