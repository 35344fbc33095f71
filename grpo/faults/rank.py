"""State of a rank, kept by its node's sentinel."""

from dataclasses import dataclass
from typing import Any

from grpo.faults.oom import OomKills
from grpo.faults.packets import PacketSocket
from grpo.faults.progress import Reached
from grpo.faults.sessions import WatchedProcess


@dataclass(frozen=True, slots=True)
class Limit:
    """Time limit on a rank's current action."""

    deadline_s: float
    phase: str
    overdue: str
    """Cause to report when the limit has passed."""
    thread: int
    """Thread that performs the action."""


class Rank(WatchedProcess):
    """A rank of this node, and the messages it has sent."""

    def __init__(self, rank: int, pid: int) -> None:
        super().__init__(pid)
        self.rank = rank
        self.oom_kills = OomKills(pid)
        self.connection: PacketSocket | None = None
        self.progress: int | None = None
        self.stacks: int | None = None
        """Descriptors, received from the rank, of its progress counters and its stacks."""
        self.phase = "start"
        self.exchanges = 0
        self.limit: Limit | None = None
        self.has_left = False
        """The rank has announced a normal exit."""
        self.has_stopped = False
        """The rank has announced the end of its watch."""
        self.is_reported = False
        """The job's record has been sent to the rank."""
        self.seen: tuple[str, int, Reached] = ("", 0, Reached())
        """Phase, exchanges and progress at the last look for stalls."""
        self.seen_since_s = 0.0
        self.asked_for = ""
        """Purpose of the last request for its stacks: "warning" or "end"."""
        self.is_warned_of = False
        self.killed_s: float | None = None
        """Time of SIGKILL, in seconds since the job's record."""
        self.is_held = False
        """Killed, but still there."""
        self.covered: dict[str, int | None] = {}
        """Session by folder: to end and remove after this rank's death."""

    def send(self, kind: str, **values: Any) -> bool:
        """Send a message; False if it was not sent."""
        return self.connection is not None and self.connection.send(kind, **values)
