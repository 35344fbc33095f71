"""Peers of a sentinel on other nodes: connections, silence, and the goodbye."""

import selectors
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any

from grpo.faults.channel import Channel, Message
from grpo.faults.failure import FailureRecord
from grpo.faults.liveness import Loop, NodePlace, beat_interval_s
from grpo.faults.progress import Table

QUIET_S = 5.0  # of silence before a new connection is tried; a quarter of the timeout if that is less
RETURN_BEATS = 3  # beats within which a peer with a reset connection has to return


@dataclass(eq=False)
class Peer:
    """Another node's sentinel. All its connections are read; its first message on a new one closes the older ones.

    TCP doubles its retransmission timer, so an old connection resumes long after the network does. A dying process ends
    all its connections at once; a network failure ends none.
    """

    place: NodePlace
    loop: Loop
    _: KW_ONLY
    on_message: Callable[[Message], None]
    """Called with each message."""
    on_end: Callable[[float], None]
    """Called when the peer closes its last connection, with the seconds of silence before that."""
    on_loss: Callable[[], None] = lambda: None
    """Called when its last connection is reset."""

    def __post_init__(self) -> None:
        self._channels: list[Channel] = []  # oldest first
        self._last_message_s = self.loop.clock.now_s
        self._silent_before_s = 0.0  # its last connection was reset

    def add(self, channel: Channel) -> None:
        """Add a connection after its handshake."""
        self._last_message_s = self.loop.clock.now_s
        self._channels.append(channel)
        self.loop.selector.register(channel.socket, selectors.EVENT_READ, partial(self._read, channel))

    def send(self, kind: str, **values: Any) -> None:
        """Send on the newest connection; messages that must arrive are repeated on the next one."""
        if self._channels:
            self._channels[-1].send(kind, **values)

    def close(self) -> None:
        while self._channels:
            self._drop(self._channels[0])

    def _drop(self, channel: Channel) -> None:
        self._channels.remove(channel)
        self.loop.selector.unregister(channel.socket)
        channel.close()

    def _read(self, channel: Channel) -> None:
        if channel in self._channels:  # else it was dropped in this turn of the loop
            self.take(channel, channel.receive())

    def take(self, channel: Channel, messages: list[Message]) -> None:
        """Handle messages from one of its connections."""
        silent_s = self.silent_s()
        if messages:
            self._last_message_s = self.loop.clock.now_s
            for older in self._channels[: self._channels.index(channel)]:
                self._drop(older)
        for message in messages:
            self.on_message(message)
        if channel.is_open or channel not in self._channels:
            return
        self._drop(channel)
        if self._channels:
            return
        if channel.error is None:
            self.on_end(silent_s)
        else:
            self._last_message_s, self._silent_before_s = self.loop.clock.now_s, silent_s
            self.on_loss()

    # -- silence --------------------------------------------------------------------------------------------------

    def silent_s(self) -> float:
        """Seconds of silence on all connections; without a connection, the silence before the reset."""
        return self.loop.clock.now_s - self._last_message_s if self._channels else self._silent_before_s

    def is_connected(self) -> bool:
        return bool(self._channels)

    def is_quiet(self) -> bool:
        """True if it was silent long enough to try another connection."""
        return not self._channels or self.silent_s() > min(QUIET_S, self.loop.timeout_s / 4)

    def is_missing(self) -> bool:
        """True if it may be lost, perhaps with others and for the same reason."""
        return not self._channels or self.silent_s() > self.loop.timeout_s / 2

    def is_lost(self) -> bool:
        """True if it was silent for too long."""
        if self._channels:
            return self.silent_s() > self.loop.timeout_s
        return self.loop.clock.now_s - self._last_message_s > RETURN_BEATS * beat_interval_s(self.loop.timeout_s)

    def knows_all(self) -> bool:
        """True if its machine has received everything, or it is lost."""
        return self.is_lost() or (bool(self._channels) and self._channels[-1].has_arrived())

    def is_out_of_reach(self, seconds: float) -> bool:
        """True if its machine has sent no TCP ACK for so long: it is off or cut off. Otherwise its sentinel is
        stopped."""
        return not self._channels or self._channels[-1].unconfirmed_s() > seconds


GOODBYE_S = 3.0

Answer = Callable[[Table], object]


@dataclass(eq=False)
class Between:
    """A sentinel's communication with other nodes. This base class is for a job on one node."""

    place: NodePlace
    loop: Loop
    record: FailureRecord | None = field(default=None, init=False)
    """Failure record of the job."""

    def report(self, record: FailureRecord) -> None:
        """Make `record` the job's, unless there is one already."""
        if self.record is None:
            self.record = record

    def beat(self, table: Table) -> None:
        """Send a sign of life and check the other nodes; called once per interval."""

    def ask(self, table: Table, answer: Answer) -> None:
        """Call `answer` with the table of all ranks, now or later; `table` has this node's."""
        answer(table)

    def leave(self) -> None:
        """Say goodbye. Blocks at most `GOODBYE_S`; if a network is cut, until it recovers or the peer is lost."""


def await_goodbyes(peers: Callable[[], list[Peer]], loop: Loop, look: Callable[[], None]) -> None:
    """Wait until the peers have read everything and closed their connections: closing first may lose unread messages.

    A stopped peer reads them later; a disconnected one has to reconnect for them.

    Args:
        peers: the remaining ones.
        look: called in between.
    """
    deadline = time.monotonic() + GOODBYE_S
    while waited_for := peers():
        if time.monotonic() > deadline and all(peer.knows_all() for peer in waited_for):
            break
        for key, _ in loop.selector.select(0.05):
            key.data()
        loop.clock.tick()
        look()
