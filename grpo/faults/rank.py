"""One of a node's ranks, as its sentinel knows it."""

from dataclasses import dataclass
from typing import Any

from grpo.faults.oom import OomKills
from grpo.faults.packets import PacketSocket
from grpo.faults.progress import Reached
from grpo.faults.sessions import WatchedProcess


@dataclass(frozen=True, slots=True)
class Limit:
    """Of what a rank does now."""

    deadline_s: float
    phase: str
    overdue: str
    """What to say when it has passed."""
    thread: int
    """Which does it."""


class Rank(WatchedProcess):
    """One of this node's ranks, and what it has told."""

    def __init__(self, rank: int, pid: int) -> None:
        super().__init__(pid)
        self.rank = rank
        self.oom_kills = OomKills(pid)
        self.connection: PacketSocket | None = None
        self.progress: int | None = None
        self.stacks: int | None = None
        """Descriptors of what it has written of itself, which it has sent."""
        self.phase = "start"
        self.exchanges = 0
        self.limit: Limit | None = None
        self.has_left = False
        """It has said that it ends, and is well."""
        self.has_stopped = False
        """It has said that it is watched no more."""
        self.is_reported = False
        """Of the job's record."""
        self.seen: tuple[str, int, Reached] = ("", 0, Reached())
        """Phase, exchanges, and how far it had come at the last look for stalls."""
        self.seen_since_s = 0.0
        self.asked_for = ""
        """What its stacks were asked for since then."""
        self.is_warned_of = False
        self.killed_s: float | None = None
        """When it was, in seconds since the job's record."""
        self.is_held = False
        """Killed, and still there."""
        self.covered: dict[str, int | None] = {}
        """Session by folder, to be ended and removed behind it."""

    def send(self, kind: str, **values: Any) -> bool:
        """Whether it went out."""
        return self.connection is not None and self.connection.send(kind, **values)
