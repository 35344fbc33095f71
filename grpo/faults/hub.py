"""The hub, in node 0's sentinel, decides the job's failure record. Other nodes' sentinels connect to it (`hub_link`).

Driven by its sentinel's loop: nothing here blocks except the final goodbye.
"""

import contextlib
import logging
import selectors
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial

from grpo.faults.channel import MAX_LINE_BYTES, Channel, Message, is_proof, new_challenge, proof, tune
from grpo.faults.failure import FailureRecord
from grpo.faults.liveness import NodePlace
from grpo.faults.peer import Answer, Between, Peer, await_goodbyes
from grpo.faults.progress import Table

_log = logging.getLogger(__name__)

GREETING_S = 10.0
MAX_STRANGERS = 64
MAX_NAMED = 8  # nodes, in a record


@dataclass(slots=True, eq=False)
class _Newcomer:
    """A connection before the handshake, or one whose other side has not confirmed the welcome yet."""

    challenge: str
    since_s: float
    place: NodePlace | None = None
    """Identity shown in the handshake."""


@dataclass(eq=False, kw_only=True)
class Hub(Between):
    """Node 0's side. Listens on `port` for nodes with the secret."""

    first_ranks: Sequence[int]
    """Local main of each node, as a global rank."""
    secret: str
    join_s: float

    def __post_init__(self) -> None:
        self._expected = {node: rank for node, rank in enumerate(self.first_ranks) if node}
        self._nodes: dict[int, Peer] = {}
        self._gone: set[int] = set()
        self._newcomers: dict[Channel, _Newcomer] = {}  # in order of arrival
        self._table: Table = {}
        self._is_leaving = False
        self._listener = _listen()
        self.port: int = self._listener.getsockname()[1]
        self.loop.selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def report(self, record: FailureRecord) -> None:
        if self.record is None:
            self.record = record
            for node in self._present():
                node.send("record", record=record.as_dict())

    def _present(self) -> list[Peer]:
        return [node for number, node in self._nodes.items() if number not in self._gone]

    def beat(self, table: Table) -> None:
        self._table |= table
        now = self.loop.clock.now_s
        for channel, stranger in self._strangers().items():
            if now - stranger.since_s > GREETING_S:
                self._turn_away(channel)
        for number, rank in self._expected.items():
            if number not in self._nodes and now > self.join_s:
                self.report(NodePlace(node=number, rank=rank, host="unknown", pid=0).did_not_come(self.join_s))
        lost = next((node for node in self._present() if node.is_lost()), None)
        if lost is not None:
            self.report(self._why(lost, [node.place.node for node in self._present() if node.is_missing()]))
        for node in self._present():
            node.send("beat", phase=self.place.phase)

    def _why(self, lost: Peer, missing: list[int]) -> FailureRecord:
        """Return the failure record of a lost node.

        Args:
            missing: numbers of all missing nodes, including the lost one. If several are missing at once, any of them
                may be well.
        """
        if len(missing) > 1:
            named = ", ".join(map(str, missing[:MAX_NAMED])) + " ..." * (len(missing) > MAX_NAMED)
            others = f"{len(missing)} of {len(self._expected)} other nodes at once ({named})"
            return self.place.is_cut_off(others, self.loop.timeout_s)
        if not lost.is_connected():
            return lost.place.is_gone(lost.silent_s(), self.loop.timeout_s)
        if len(self._expected) == 1 and lost.is_out_of_reach(self.loop.timeout_s / 2):
            return lost.place.has_no_link_to(self.place, self.loop.timeout_s)
        return lost.place.is_silent(self.loop.timeout_s)

    def ask(self, table: Table, answer: Answer) -> None:
        self._table |= table
        answer(self._table)

    def leave(self) -> None:
        self._is_leaving = True
        for node in self._present():
            node.send("bye")
        await_goodbyes(self._present, self.loop, lambda: None)
        self.loop.selector.unregister(self._listener)
        self._listener.close()

    # -- newcomers ------------------------------------------------------------------------------------------------

    def _strangers(self) -> dict[Channel, _Newcomer]:
        """Connections before the handshake. Connections after it stay until their node uses the next one: closing one
        would look to the node as if the hub were gone."""
        return {channel: newcomer for channel, newcomer in self._newcomers.items() if newcomer.place is None}

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        if len(strangers := self._strangers()) >= MAX_STRANGERS:  # a real node identifies itself at once
            self._turn_away(next(iter(strangers)))
        channel, challenge = Channel(connection), new_challenge()
        newcomer = self._newcomers[channel] = _Newcomer(challenge, self.loop.clock.now_s)
        self.loop.selector.register(connection, selectors.EVENT_READ, partial(self._read, channel, newcomer))
        channel.send("challenge", challenge=challenge)

    def _read(self, channel: Channel, newcomer: _Newcomer) -> None:
        if channel not in self._newcomers:  # it was turned away in this turn of the loop
            return
        messages = channel.receive()
        if newcomer.place is not None and messages:
            self._join(channel, newcomer.place, messages)
        elif len(messages) == 1 and self._is_of_this_job(messages[0], newcomer.challenge):
            newcomer.place = self._welcome(channel, messages[0], newcomer.challenge)
        elif messages or not channel.is_open:
            self._turn_away(channel)

    def _turn_away(self, channel: Channel) -> None:
        del self._newcomers[channel]
        self.loop.selector.unregister(channel.socket)
        channel.close()

    def _is_of_this_job(self, hello: Message, challenge: str) -> bool:
        """True for an expected node's sentinel, or a known one on another connection."""
        node, theirs = hello.get("node"), hello.get("challenge")
        if not isinstance(node, int) or not isinstance(theirs, str) or node not in self._expected:
            return False
        known = self._nodes.get(node)
        if known is not None and (node in self._gone or known.place.pid != hello.get("pid")):
            return False
        return is_proof(hello.get("proof"), proof(self.secret, "node", challenge, theirs, node))

    def _welcome(self, channel: Channel, hello: Message, challenge: str) -> NodePlace:
        channel.max_line_bytes = MAX_LINE_BYTES
        tune(channel.socket, self.loop.timeout_s)
        shown = proof(self.secret, "hub", hello["challenge"], challenge, hello["node"])
        channel.send("welcome", proof=shown, place=asdict(self.place))
        return NodePlace(**{name: hello[name] for name in asdict(self.place)})

    def _join(self, channel: Channel, place: NodePlace, messages: list[Message]) -> None:
        """Admit a sentinel that has confirmed its welcome: from now on the end of its connection counts."""
        for earlier, newcomer in [*self._newcomers.items()]:
            if earlier is channel:
                break
            if newcomer.place is not None and newcomer.place.node == place.node:
                self._turn_away(earlier)
        del self._newcomers[channel]
        self.loop.selector.unregister(channel.socket)
        node = self._nodes.get(place.node)
        if node is None:
            node = self._nodes[place.node] = self._peer(place)
        _log.debug("node %d has joined", place.node)
        node.add(channel)
        if self.record is not None:
            node.send("record", record=self.record.as_dict())
        if self._is_leaving:
            node.send("bye")
        node.take(channel, messages)

    def _peer(self, place: NodePlace) -> Peer:
        number = place.node

        def end(silent_s: float) -> None:
            _log.debug("the connection of node %d has ended", number)
            self._gone.add(number)
            if not self._is_leaving:
                self.report(place.is_gone(silent_s, self.loop.timeout_s))

        return Peer(place, self.loop, on_message=lambda message: self._take(self._nodes[number], message), on_end=end)

    def _take(self, node: Peer, message: Message) -> None:
        match message:
            case {"kind": "beat", "phase": phase, "table": table}:
                node.place.phase = phase
                self._table |= table
            case {"kind": "report", "record": record}:
                self.report(FailureRecord(**record))
            case {"kind": "ask", "table": table}:
                self._table |= table
                node.send("table", table=self._table)
            case {"kind": "bye"}:
                _log.debug("node %d leaves", node.place.node)
                self._gone.add(node.place.node)
                node.close()  # it waits for that


def _listen() -> socket.socket:
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # switched off in the kernel
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=256)
    return socket.create_server(("", 0), backlog=256)
