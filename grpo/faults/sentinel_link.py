"""A rank's connection to its node's sentinel."""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from grpo.faults.failure import FailureRecord
from grpo.faults.liveness import AwakeClock, NodePlace, beat_interval_s
from grpo.faults.packets import PacketSocket
from grpo.faults.progress import RankProgress, Table, behind, record_of_stall, rows_of
from grpo.faults.stacks import Stacks

CONNECT_S = 60.0


class SentinelLink:
    """This rank's connection to its node's sentinel. Sending methods may be called from any thread, and never block.

    Args:
        name: of the sentinel's socket, from `start_sentinel`.
        place: this rank's, until the sentinel has sent its own.
        timeout_s: silence after which the sentinel is lost.
    """

    def __init__(self, name: str, rank: int, place: NodePlace, *, timeout_s: float) -> None:
        self.interval_s = beat_interval_s(timeout_s)
        self.is_gone = False
        self.stacks = Stacks()
        """Stacks of this process; the sentinel reads them."""
        self.stacks.on_signal()
        self.progress = RankProgress()
        """Progress counters of this rank; the sentinel reads them."""
        self._place, self._timeout_s = place, timeout_s
        self._clock, self._last_message_s = AwakeClock(self.interval_s), 0.0
        self._unsaid: dict[str, Callable[[], dict[str, Any]]] = {}  # latest message by kind, not sent yet
        self._saying = threading.Lock()
        self._table: Table = {}
        self._answered = threading.Event()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(CONNECT_S)
        connection.connect(f"\0{name}")
        self._packets = PacketSocket(connection)
        self.say, self.fileno, self.close = self._packets.send, self._packets.fileno, self._packets.close
        self.say("rank", rank=rank, descriptors=[self.stacks.fd, self.progress.fd])
        self.progress.close()

    # -- sending ----------------------------------------------------------------------------------------------------

    def say_phase(self, phase: str, exchanges: int) -> None:
        """Send the rank's phase; a failed send is repeated.

        Args:
            exchanges: number of ends of a phase it has reached.
        """
        self._keep("phase", lambda: {"phase": phase, "exchanges": exchanges})

    def say_limit(self, timeout_s: float, phase: str, overdue: str, *, thread: int) -> None:
        """Send a time limit on the rank's current action, replacing the last one; a failed send is repeated.

        Args:
            overdue: cause to report when the limit has passed.
            thread: see `read_stacks`.
        """
        until_s = time.monotonic() + timeout_s
        said = {"phase": phase, "overdue": overdue, "thread": thread}
        self._keep("limit", lambda: {"timeout_s": until_s - time.monotonic(), **said})

    def say_no_limit(self) -> None:
        """Remove the limit: the action is done."""
        self._keep("limit", lambda: {"timeout_s": None})

    def _keep(self, kind: str, values: Callable[[], dict[str, Any]]) -> None:
        with self._saying:
            self._unsaid[kind] = values
            self._send_pending()

    def _send_pending(self) -> None:
        """Send pending messages; call with the lock held."""
        for kind, values in [*self._unsaid.items()]:
            if self.say(kind, **values()):
                del self._unsaid[kind]

    # -- receiving --------------------------------------------------------------------------------------------------

    def receive(self) -> FailureRecord | None:
        """Receive messages, once per interval and on arrival. Returns the job's record; None while all is well."""
        found = None
        while not self.is_gone and found is None:
            silent_s = self._clock.tick() - self._last_message_s
            try:
                if (message := self._packets.receive()) is None:
                    break
                found = self._take(message)
            except EOFError:
                self.is_gone = True
                found = self._place.is_gone(silent_s, self._timeout_s)
            self._last_message_s = self._clock.now_s
        with self._saying:
            self._send_pending()
        if not self.is_gone and found is None and self._clock.tick() - self._last_message_s > self._timeout_s:
            found = self._place.is_silent(self._timeout_s)
            if self._place.pid:  # the sentinel has sent its pid
                os.kill(self._place.pid, signal.SIGKILL)  # it may be stopped, and no other process would end it
        return found

    def _take(self, message: dict[str, Any]) -> FailureRecord | None:
        match message:
            case {"kind": "place", **place}:
                self._place = NodePlace(**place)
            case {"kind": "beat", "phase": phase}:
                self._place.phase = phase
            case {"kind": "record", "record": record}:
                return FailureRecord(**record)
            case {"kind": "table", "table": table}:
                self._table = table
                self._answered.set()
        return None

    def ask(self) -> threading.Event:
        """Request the phases of all ranks. The event is set by `receive` once `not_come` has them."""
        self._answered.clear()
        self.say("ask")
        return self._answered

    def not_come(self, exchange: int) -> dict[int, str]:
        """Return the ranks that have not reached that end of a phase, counted from 1, and their phases."""
        return {rank: row.phase for rank, row in rows_of(self._table).items() if row.exchanges < exchange}

    def behind(self, what: str) -> FailureRecord | None:
        """Return the record of the rank this one waits for, if there is one; call it as `not_come`."""
        late = behind(self._table)
        return record_of_stall(self._table, late[0], what=what) if late else None
