"""A sentinel's link to the hub (`hub`) from other nodes; survives network outages.

Driven by its sentinel's loop: nothing here blocks except the first connection and the final goodbye.
"""

import errno
import logging
import selectors
import socket
from dataclasses import dataclass
from functools import partial

from grpo.faults.channel import Introduction, Message, join, tune
from grpo.faults.failure import FailureRecord
from grpo.faults.peer import Answer, Between, Peer, await_goodbyes
from grpo.faults.progress import Table

_log = logging.getLogger(__name__)

ATTEMPT_S = 2.0  # for a new connection, while the old one is silent


@dataclass(eq=False, kw_only=True)
class HubLink(Between):
    """Another node's end. Without the hub this node decides for itself.

    Raises:
        OSError: the hub cannot be reached.
    """

    num_nodes: int
    addresses: list[str]
    port: int
    secret: str

    def __post_init__(self) -> None:
        self._is_connected, self._is_leaving = True, False
        self._attempt: Introduction | None = None
        self._attempt_s = 0.0
        self._table: Table = {}
        self._waiting: list[Answer] = []
        self._reported: FailureRecord | None = None
        channel, hub = join(self.addresses, self.port, self.secret, self.place, self.loop.timeout_s)
        self._address = channel.socket.getpeername()
        self._hub = Peer(hub, self.loop, on_message=self._take, on_end=self._on_end, on_loss=self._look)
        self._hub.add(channel)
        _log.debug("has reached the sentinel of node 0")

    def report(self, record: FailureRecord) -> None:
        if not self._is_connected:
            super().report(record)
        elif self._reported is None and self.record is None:
            self._reported = record
            self._hub.send("report", record=record.as_dict())

    def beat(self, table: Table) -> None:
        self._table = table
        self._look()
        self._hub.send("beat", phase=self.place.phase, table=table)  # dropped if the connection is lost

    def ask(self, table: Table, answer: Answer) -> None:
        if self._is_connected:
            self._waiting.append(answer)
            self._hub.send("ask", table=table)
        else:
            answer(table)

    def leave(self) -> None:
        if self._is_connected:
            self._is_leaving = True
            self._hub.send("bye")
            await_goodbyes(lambda: [self._hub] * self._is_connected, self.loop, self._look)

    def _take(self, message: Message) -> None:
        match message:
            case {"kind": "beat", "phase": phase}:
                self._hub.place.phase = phase
            case {"kind": "record", "record": record}:
                super().report(FailureRecord(**record))
            case {"kind": "table", "table": table}:
                while self._waiting:
                    self._waiting.pop()(table)
            case {"kind": "bye"}:
                self._lose(None)

    def _on_end(self, silent_s: float) -> None:
        self._lose(self._hub.place.is_gone(silent_s, self.loop.timeout_s))

    def _lose(self, record: FailureRecord | None) -> None:
        _log.debug("the connection to the sentinel of node 0 has ended")
        self._is_connected = False
        self._give_up_attempt()
        if record is not None and not self._is_leaving:
            self._hub.send("report", record=record.as_dict())  # for a hub that was only stopped, and resumes
            super().report(record)
        self._hub.close()

    # -- when the hub is silent -----------------------------------------------------------------------------------

    def _look(self) -> None:
        """Check the hub's silence: open another connection, or declare the hub lost."""
        if not self._is_connected:
            return
        if self._hub.is_lost():
            self._lose(self._why())
        elif not self._hub.is_quiet():
            self._give_up_attempt()
        elif self._attempt is None or self.loop.clock.now_s - self._attempt_s > ATTEMPT_S:
            self._try_again()

    def _why(self) -> FailureRecord:
        if not self._hub.is_out_of_reach(self.loop.timeout_s / 2):
            return self._hub.place.is_silent(self.loop.timeout_s)
        if self.num_nodes == 2:
            return self.place.has_no_link_to(self._hub.place, self.loop.timeout_s)
        return self.place.is_cut_off(f"node 0 ({self._hub.place.host})", self.loop.timeout_s)

    def _try_again(self) -> None:
        """Open another connection beside the existing ones."""
        self._give_up_attempt()
        connection = socket.socket(socket.AF_INET6 if len(self._address) == 4 else socket.AF_INET)
        connection.setblocking(False)
        code = connection.connect_ex(self._address)
        attempt = self._attempt = Introduction(connection, self.secret, self.place)
        self._attempt_s = self.loop.clock.now_s
        self.loop.selector.register(connection, selectors.EVENT_READ, partial(self._read_attempt, attempt))
        if code == errno.ECONNREFUSED:
            self._on_end(self._hub.silent_s())

    def _give_up_attempt(self) -> None:
        if self._attempt is not None:
            self.loop.selector.unregister(self._attempt.channel.socket)
            self._attempt.channel.close()
            self._attempt = None

    def _read_attempt(self, attempt: Introduction) -> None:
        if attempt is not self._attempt:  # it was given up in this turn of the loop
            return
        try:
            if attempt.read_place() is None:
                return
        except OSError as error:
            self._give_up_attempt()
            if isinstance(error, ConnectionRefusedError):  # the machine is up, its sentinel is not
                self._on_end(self._hub.silent_s())
            return
        self._attempt = None
        self.loop.selector.unregister(attempt.channel.socket)
        tune(attempt.channel.socket, self.loop.timeout_s)
        self._hub.add(attempt.channel)
        _log.debug("has reached the sentinel of node 0 again")
        self._send_again()

    def _send_again(self) -> None:
        """Send messages again if the lost connection may have dropped them."""
        self._hub.send("beat", phase=self.place.phase, table=self._table)
        if self._reported is not None and self.record is None:
            self._hub.send("report", record=self._reported.as_dict())
        if self._waiting:
            self._hub.send("ask", table=self._table)
        if self._is_leaving:
            self._hub.send("bye")
