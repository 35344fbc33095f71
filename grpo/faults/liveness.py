"""Liveness: a clock of the time this process was awake, and the failure records of silent nodes."""

import selectors
import time
from dataclasses import dataclass
from typing import Any

from grpo.faults.failure import FailureKind, FailureRecord

HEARTBEAT_TIMEOUT_S = 20.0
START_TIMEOUT_S = 1800.0  # a cold start on many nodes: all load imports, data sets and models from one file system
RANK_STALL_TIMEOUT_S = 600.0
MAX_INTERVAL_S = 2.0  # between beats, and between checks of the node's processes


def beat_interval_s(timeout_s: float) -> float:
    """Seconds between two beats; a node without beats for `timeout_s` is lost."""
    return min(MAX_INTERVAL_S, timeout_s / 10)


class AwakeClock:
    """Clock of the time this process ran. A process that was paused itself (signal, swap, no free core) would otherwise
    take the others for silent: a pause counts for at most two intervals.

    Args:
        interval_s: longest time between two calls of `tick`.
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
    """Event loop of a sentinel, shared by its connections to other nodes."""

    clock: AwakeClock
    selector: selectors.BaseSelector
    timeout_s: float
    """Silence after which a node is lost."""


@dataclass(slots=True, kw_only=True)
class NodePlace:
    """Identity and state of a node, as its sentinel sends it."""

    node: int
    rank: int
    """First rank of the node."""
    host: str
    pid: int
    """Pid of the sentinel."""
    phase: str = "start"
    """Phase of the first rank at the sentinel's last beat. All receive the same beats, so they report the same phase
    for a lost sentinel."""

    def is_gone(self, silent_s: float, timeout_s: float) -> FailureRecord:
        """Record for a closed connection to the node's sentinel; after a long silence, for a stopped one that was
        killed."""
        if silent_s > timeout_s / 2:
            return self.is_silent(timeout_s)
        return self._record(
            f"the node is gone without a goodbye: it went down, or its sentinel (pid {self.pid}) was killed [GRPO-605]"
        )

    def is_silent(self, timeout_s: float) -> FailureRecord:
        """Record for a sentinel silent for `timeout_s`."""
        return self._record(
            f"the node has not been heard of for {timeout_s:g} s (heartbeat_timeout): it is off, cut off, or stopped, "
            f"or its sentinel (pid {self.pid}) is [GRPO-604]",
            nodes=(self.node,),
        )

    def has_no_link_to(self, hub: "NodePlace", timeout_s: float) -> FailureRecord:
        """Record for both nodes of a two-node job: neither can know which one is to blame."""
        return self._record(
            f"node {hub.node} ({hub.host}) and node {self.node} ({self.host}) have not heard of each other for "
            f"{timeout_s:g} s (heartbeat_timeout): the network between them is cut, or one of them is off [GRPO-614]"
        )

    def is_cut_off(self, others: str, timeout_s: float) -> FailureRecord:
        """Record of a node without beats of the others for `timeout_s`."""
        return self._record(
            f"the node has been cut off from {others} for {timeout_s:g} s (heartbeat_timeout): its own network is "
            "down, or that between them, or they are off or stopped all at once [GRPO-616]"
        )

    def did_not_come(self, timeout_s: float) -> FailureRecord:
        """Record of a node whose sentinel has not connected in time."""
        return self._record(f"the node's sentinel has not come within {timeout_s:g} s")

    def _record(self, cause: str, nodes: tuple[int, ...] = ()) -> FailureRecord:
        """Make a record. Empty `nodes`: the nodes may be well; a sentinel was killed, or a network is down."""
        where: dict[str, Any] = {"node": self.node, "rank": self.rank, "host": self.host, "phase": self.phase}
        return FailureRecord(**where, cause=cause, kind=FailureKind.NODE_LOST, nodes=nodes)
