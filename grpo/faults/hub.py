"""Between the nodes: the hub, in node 0's sentinel, says which record is the job's; the others' sentinels hang on it.

Both ends are driven by their sentinel's loop: nothing here blocks but the first connecting and the last goodbye.
"""

import contextlib
import logging
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from grpo.faults.channel import MAX_LINE_BYTES, Channel, Message, is_proof, join, new_challenge, proof, tune
from grpo.faults.failure import FailureRecord
from grpo.faults.liveness import AwakeClock, Place

_log = logging.getLogger(__name__)

GREETING_S = 10.0
MAX_STRANGERS = 64
GOODBYE_S = 3.0

Table = dict[str, list[Any]]
"""Phase and number of finished exchanges by rank."""
Answer = Callable[[Table], object]


class Between:
    """What a sentinel needs of the others. This one has none: a job on one node."""

    record: FailureRecord | None = None
    """The job's."""

    def __init__(self, place: Place, clock: AwakeClock, timeout_s: float) -> None:
        self.place, self._clock, self._timeout_s = place, clock, timeout_s

    def report(self, record: FailureRecord) -> None:
        """Make it the job's, unless one is there already."""
        if self.record is None:
            self.record = record

    def beat(self, table: Table) -> None:
        """Once an interval: say that this node lives, and look who else does."""

    def ask(self, table: Table, answer: Answer) -> None:
        """`answer` gets the table of all ranks, now or later; `table` is that of this node's."""
        answer(table)

    def leave(self) -> None:
        """Say goodbye; blocks `GOODBYE_S` at most."""


class _Node:
    """Another node as the hub sees it."""

    def __init__(self, place: Place, channel: Channel, now_s: float) -> None:
        self.place, self.channel = place, channel
        self.heard_s = now_s
        self.has_left = False


class Hub(Between):
    """Node 0's. Listens on `port`, for nodes that know the secret."""

    def __init__(
        self,
        place: Place,
        clock: AwakeClock,
        timeout_s: float,
        *,
        selector: selectors.BaseSelector,
        num_nodes: int,
        ranks_per_node: int,
        secret: str,
        join_s: float,
    ) -> None:
        super().__init__(place, clock, timeout_s)
        self._selector, self._secret, self._join_s = selector, secret, join_s
        self._expected = {node: node * ranks_per_node for node in range(1, num_nodes)}  # first ranks
        self._nodes: dict[int, _Node] = {}
        self._strangers: dict[Channel, float] = {}  # since when
        self._table: Table = {}
        self._listener = _listen()
        self.port: int = self._listener.getsockname()[1]
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def report(self, record: FailureRecord) -> None:
        if self.record is None:
            self.record = record
            for node in self._nodes.values():
                node.channel.send("record", record=record.as_dict())

    def beat(self, table: Table) -> None:
        self._table |= table
        now = self._clock.now_s
        for channel in [each for each, since_s in self._strangers.items() if now - since_s > GREETING_S]:
            self._turn_away(channel)
        for number, rank in self._expected.items():
            if number not in self._nodes and now > self._join_s:
                self.report(Place(node=number, rank=rank, host="unknown", pid=0).did_not_come(self._join_s))
        for node in self._nodes.values():
            if not node.has_left:
                node.channel.send("beat", phase=self.place.phase)
                if now - node.heard_s > self._timeout_s:
                    self.report(node.place.is_silent(self._timeout_s))

    def ask(self, table: Table, answer: Answer) -> None:
        self._table |= table
        answer(self._table)

    def leave(self) -> None:
        for node in self._nodes.values():
            if not node.has_left:
                node.channel.send("bye")
        _say_goodbye([node.channel for node in self._nodes.values() if not node.has_left])
        self._listener.close()

    # -- newcomers ------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        if len(self._strangers) >= MAX_STRANGERS:
            connection.close()
            return
        channel, challenge = Channel(connection), new_challenge()
        self._strangers[channel] = self._clock.now_s
        channel.send("challenge", challenge=challenge)

        def hear() -> None:
            messages = channel.receive()
            if messages and self._is_of_this_job(messages[0], challenge):
                del self._strangers[channel]
                self._selector.unregister(connection)
                self._welcome(channel, messages, challenge)
            elif messages or not channel.is_open:
                self._turn_away(channel)

        self._selector.register(connection, selectors.EVENT_READ, hear)

    def _turn_away(self, channel: Channel) -> None:
        del self._strangers[channel]
        self._selector.unregister(channel.socket)
        channel.close()

    def _is_of_this_job(self, hello: Message, challenge: str) -> bool:
        node, theirs = hello.get("node"), hello.get("challenge")
        if not isinstance(node, int) or not isinstance(theirs, str):
            return False
        if node not in self._expected or node in self._nodes:
            return False
        return is_proof(hello.get("proof"), proof(self._secret, "node", challenge, theirs, node))

    def _welcome(self, channel: Channel, messages: list[Message], challenge: str) -> None:
        number, theirs = messages[0]["node"], messages[0]["challenge"]
        channel.max_line_bytes = MAX_LINE_BYTES
        tune(channel.socket, self._timeout_s)
        shown = proof(self._secret, "hub", theirs, challenge, number)
        channel.send("welcome", proof=shown, place=asdict(self.place))
        node = self._nodes[number] = _Node(Place(**messages[0]["place"]), channel, self._clock.now_s)
        if self.record is not None:
            channel.send("record", record=self.record.as_dict())
        self._selector.register(channel.socket, selectors.EVENT_READ, lambda: self._hear(node, channel.receive()))
        _log.debug("node %d has joined", number)
        self._hear(node, messages[1:])

    def _hear(self, node: _Node, messages: list[Message]) -> None:
        silent_s, node.heard_s = self._clock.now_s - node.heard_s, self._clock.now_s
        for message in messages:
            match message:
                case {"kind": "beat", "phase": phase, "table": table}:
                    node.place.phase = phase
                    self._table |= table
                case {"kind": "report", "record": record}:
                    self.report(FailureRecord(**record))
                case {"kind": "ask", "table": table}:
                    self._table |= table
                    node.channel.send("table", table=self._table)
                case {"kind": "bye"}:
                    node.has_left = True
                    _log.debug("node %d leaves", node.place.node)
        if not node.channel.is_open:
            _log.debug("the connection of node %d has ended", node.place.node)
            self._selector.unregister(node.channel.socket)
            node.channel.close()
            if not node.has_left:
                node.has_left = True
                self.report(node.place.is_gone(silent_s, self._timeout_s))


class HubLink(Between):
    """Another node's end. Without the hub this node decides for itself.

    Raises:
        OSError: the hub cannot be reached.
    """

    def __init__(
        self,
        place: Place,
        clock: AwakeClock,
        timeout_s: float,
        *,
        selector: selectors.BaseSelector,
        addresses: list[str],
        port: int,
        secret: str,
    ) -> None:
        super().__init__(place, clock, timeout_s)
        self._selector = selector
        self._channel, self._hub = join(addresses, port, secret, place, timeout_s)
        self._heard_s = clock.now_s
        self._is_connected = True
        self._waiting: list[Answer] = []
        _log.debug("has reached the sentinel of node 0")
        selector.register(self._channel.socket, selectors.EVENT_READ, self._hear)

    def report(self, record: FailureRecord) -> None:
        if self._is_connected:
            self._channel.send("report", record=record.as_dict())
        else:
            super().report(record)

    def beat(self, table: Table) -> None:
        if self._is_connected:
            self._channel.send("beat", phase=self.place.phase, table=table)
            if self._clock.now_s - self._heard_s > self._timeout_s:
                self._lose(self._hub.is_silent(self._timeout_s))

    def ask(self, table: Table, answer: Answer) -> None:
        if self._is_connected:
            self._waiting.append(answer)
            self._channel.send("ask", table=table)
        else:
            answer(table)

    def leave(self) -> None:
        if self._is_connected:
            self._channel.send("bye")
            self._selector.unregister(self._channel.socket)
            _say_goodbye([self._channel])

    def _hear(self) -> None:
        messages = self._channel.receive()
        silent_s, self._heard_s = self._clock.now_s - self._heard_s, self._clock.now_s
        has_left = False
        for message in messages:
            match message:
                case {"kind": "beat", "phase": phase}:
                    self._hub.phase = phase
                case {"kind": "record", "record": record}:
                    super().report(FailureRecord(**record))
                case {"kind": "table", "table": table}:
                    while self._waiting:
                        self._waiting.pop()(table)
                case {"kind": "bye"}:
                    has_left = True
        if has_left or not self._channel.is_open:
            self._lose(None if has_left else self._hub.is_gone(silent_s, self._timeout_s))

    def _lose(self, record: FailureRecord | None) -> None:
        self._is_connected = False
        _log.debug("the connection to the sentinel of node 0 has ended")
        self._selector.unregister(self._channel.socket)
        if record is not None:
            self._channel.send("report", record=record.as_dict())  # should it only be held, and come back
            super().report(record)
        self._channel.close()


def _listen() -> socket.socket:
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # switched off in the kernel
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=256)
    return socket.create_server(("", 0), backlog=256)


def _say_goodbye(channels: list[Channel]) -> None:
    """Until the others have read everything: what is unread when a connection is closed may be lost with it."""
    deadline = time.monotonic() + GOODBYE_S
    for channel in channels:
        channel.flush()
        with contextlib.suppress(OSError):
            channel.socket.shutdown(socket.SHUT_WR)
    while any(channel.is_open for channel in channels) and time.monotonic() < deadline:
        for channel in channels:
            if channel.is_open:
                channel.receive()
        time.sleep(0.01)
    for channel in channels:
        channel.close()
