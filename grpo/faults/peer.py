"""A sentinel as one of another node sees it: the connections to it, and for how long it has been silent."""

import selectors
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

from grpo.faults.channel import Channel, Message
from grpo.faults.liveness import Loop, Place, beat_interval_s

QUIET_S = 5.0  # until a new connection is tried; a quarter of the timeout where that is less
RETURN_BEATS = 3  # in which a peer has to come back, whose connection was reset


@dataclass(eq=False)
class Peer:
    """Another node's sentinel. All its connections are read; its first message on a new one closes the older ones.

    TCP doubles its retransmission timer, so an old connection resumes long after the network does. A process that dies
    ends all its connections at once; a network failure ends none.
    """

    place: Place
    loop: Loop
    _: KW_ONLY
    on_message: Callable[[Message], None]
    """Gets what it says."""
    on_end: Callable[[float], None]
    """Its last connection was ended by itself. Gets the seconds of silence before that."""
    on_loss: Callable[[], None] = lambda: None
    """Its last connection was reset."""

    def __post_init__(self) -> None:
        self._channels: list[Channel] = []  # oldest first
        self._heard_s = self.loop.clock.now_s
        self._silent_before_s = 0.0  # its last connection was reset

    def add(self, channel: Channel) -> None:
        """It is there, by a connection on which it has shown who it is."""
        self._heard_s = self.loop.clock.now_s
        self._channels.append(channel)
        self.loop.selector.register(channel.socket, selectors.EVENT_READ, partial(self._hear, channel))

    def send(self, kind: str, **values: Any) -> None:
        """On the newest connection; what must arrive is sent again on the next one."""
        if self._channels:
            self._channels[-1].send(kind, **values)

    def close(self) -> None:
        while self._channels:
            self._drop(self._channels[0])

    def _drop(self, channel: Channel) -> None:
        self._channels.remove(channel)
        self.loop.selector.unregister(channel.socket)
        channel.close()

    def _hear(self, channel: Channel) -> None:
        if channel in self._channels:  # else it was dropped in this turn of the loop
            self.take(channel, channel.receive())

    def take(self, channel: Channel, messages: list[Message]) -> None:
        """What has come on one of its connections."""
        silent_s = self.silent_s()
        if messages:
            self._heard_s = self.loop.clock.now_s
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
            self._heard_s, self._silent_before_s = self.loop.clock.now_s, silent_s
            self.on_loss()

    # -- silence --------------------------------------------------------------------------------------------------

    def silent_s(self) -> float:
        """Without a word on any connection; before the reset, if there is none."""
        return self.loop.clock.now_s - self._heard_s if self._channels else self._silent_before_s

    def is_connected(self) -> bool:
        return bool(self._channels)

    def is_quiet(self) -> bool:
        """Long enough to try another connection."""
        return not self._channels or self.silent_s() > min(QUIET_S, self.loop.timeout_s / 4)

    def is_missing(self) -> bool:
        """Perhaps with others, and for the same reason."""
        return not self._channels or self.silent_s() > self.loop.timeout_s / 2

    def is_lost(self) -> bool:
        """For too long."""
        if self._channels:
            return self.silent_s() > self.loop.timeout_s
        return self.loop.clock.now_s - self._heard_s > RETURN_BEATS * beat_interval_s(self.loop.timeout_s)

    def knows_all(self) -> bool:
        """Its machine has what was sent, or it is lost."""
        return self.is_lost() or (bool(self._channels) and self._channels[-1].has_arrived())

    def is_out_of_reach(self, seconds: float) -> bool:
        """Its machine has confirmed nothing for so long: off, or cut off. Else its sentinel is held."""
        return not self._channels or self._channels[-1].unconfirmed_s() > seconds
