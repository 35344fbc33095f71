"""What counts as alive: time in which one has been awake oneself, and the records of nodes that are not heard of."""

import selectors
import time
from dataclasses import dataclass
from typing import Any

from grpo.faults.failure import FailureKind, FailureRecord

HEARTBEAT_TIMEOUT_S = 20.0
START_TIMEOUT_S = 1800.0  # a cold start on many nodes: imports, data sets and models come over one file system
RANK_STALL_TIMEOUT_S = 600.0
MAX_INTERVAL_S = 2.0  # between beats, and between looks at the node's processes


def beat_interval_s(timeout_s: float) -> float:
    """Seconds between two beats, of whose absence for `timeout_s` somebody is taken for lost."""
    return min(MAX_INTERVAL_S, timeout_s / 10)


class AwakeClock:
    """Counts the time in which this process ran. Whoever is held himself (a signal, swap, no free core) takes the
    others for silent otherwise: a pause of this process counts for two intervals at most.

    Args:
        interval_s: at which `tick` is called, at least.
    """

    def __init__(self, interval_s: float) -> None:
        self.now_s = 0.0
        self._interval_s = interval_s
        self._seen = time.monotonic()

    def tick(self) -> float:
        """Seconds since this clock was made."""
        now = time.monotonic()
        self.now_s += min(now - self._seen, 2 * self._interval_s)
        self._seen = now
        return self.now_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """What a sentinel is driven by; all that it does between nodes shares it."""

    clock: AwakeClock
    selector: selectors.BaseSelector
    timeout_s: float
    """Without a word of a node, until it is taken for lost."""


@dataclass(slots=True, kw_only=True)
class NodePlace:
    """A node, as its sentinel tells of it."""

    node: int
    rank: int
    """The node's first one."""
    host: str
    pid: int
    """Of the sentinel."""
    phase: str = "start"
    """Of the first rank, in the sentinel's last beat. The node's ranks and the other nodes get the same beats, so that
    they say the same of a sentinel that is lost."""

    def is_gone(self, silent_s: float, timeout_s: float) -> FailureRecord:
        """The connection to its sentinel has ended, after so long a silence: one that was held is killed in the end."""
        if silent_s > timeout_s / 2:
            return self.is_silent(timeout_s)
        return self._record(
            f"the node is gone without a goodbye: it went down, or its sentinel (pid {self.pid}) was killed [GRPO-605]"
        )

    def is_silent(self, timeout_s: float) -> FailureRecord:
        """Its sentinel has sent nothing for so long."""
        return self._record(
            f"the node has not been heard of for {timeout_s:g} s (heartbeat_timeout): it is off, cut off, or stopped, "
            f"or its sentinel (pid {self.pid}) is [GRPO-604]",
            nodes=(self.node,),
        )

    def has_no_link_to(self, hub: "NodePlace", timeout_s: float) -> FailureRecord:
        """The record of both nodes of a job of two, since neither can know which of them is to blame."""
        return self._record(
            f"node {hub.node} ({hub.host}) and node {self.node} ({self.host}) have not heard of each other for "
            f"{timeout_s:g} s (heartbeat_timeout): the network between them is cut, or one of them is off [GRPO-614]"
        )

    def is_cut_off(self, others: str, timeout_s: float) -> FailureRecord:
        """The record of a node that has had no beat of the others for so long."""
        return self._record(
            f"the node has been cut off from {others} for {timeout_s:g} s (heartbeat_timeout): its own network is "
            "down, or that between them, or they are off or stopped all at once [GRPO-616]"
        )

    def did_not_come(self, timeout_s: float) -> FailureRecord:
        """It has no sentinel yet, and should have."""
        return self._record(f"the node's sentinel has not come within {timeout_s:g} s")

    def _record(self, cause: str, nodes: tuple[int, ...] = ()) -> FailureRecord:
        """Of nodes that may be well, where `nodes` is empty: a sentinel was killed, or a network is cut."""
        where: dict[str, Any] = {"node": self.node, "rank": self.rank, "host": self.host, "phase": self.phase}
        return FailureRecord(**where, cause=cause, kind=FailureKind.NODE_LOST, nodes=nodes)
