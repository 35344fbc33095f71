"""A rank's side of its node's sentinel: what it tells, and what it hears."""

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
    """This rank's connection to its node's sentinel. Whatever tells may be called from any thread, and never blocks.

    Args:
        name: where it listens, as `start_sentinel` has told.
        place: this rank's, until the sentinel has told its own.
        timeout_s: without a word of the sentinel until it is taken for lost.
    """

    def __init__(self, name: str, rank: int, place: NodePlace, *, timeout_s: float) -> None:
        self.interval_s = beat_interval_s(timeout_s)
        self.is_gone = False
        self.stacks = Stacks()
        """Which the sentinel reads."""
        self.stacks.on_signal()
        self.progress = RankProgress()
        """Which it reads, too."""
        self._place, self._timeout_s = place, timeout_s
        self._clock, self._heard_s = AwakeClock(self.interval_s), 0.0
        self._unsaid: dict[str, Callable[[], dict[str, Any]]] = {}  # what the sentinel does not know yet, by kind
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

    # -- to the sentinel -------------------------------------------------------------------------------------------

    def say_phase(self, phase: str, exchanges: int) -> None:
        """What this rank does; again later where it does not go out.

        Args:
            exchanges: how many ends of a phase it has come to.
        """
        self._keep("phase", lambda: {"phase": phase, "exchanges": exchanges})

    def say_limit(self, timeout_s: float, phase: str, overdue: str, *, thread: int) -> None:
        """Something this rank does may take so long; in place of what was said before, and reported as a phase is.

        Args:
            overdue: what to say then.
            thread: see `read_stacks`.
        """
        until_s = time.monotonic() + timeout_s
        said = {"phase": phase, "overdue": overdue, "thread": thread}
        self._keep("limit", lambda: {"timeout_s": until_s - time.monotonic(), **said})

    def say_no_limit(self) -> None:
        """It is done."""
        self._keep("limit", lambda: {"timeout_s": None})

    def _keep(self, kind: str, values: Callable[[], dict[str, Any]]) -> None:
        with self._saying:
            self._unsaid[kind] = values
            self._say_unsaid()

    def _say_unsaid(self) -> None:
        """With the lock held."""
        for kind, values in [*self._unsaid.items()]:
            if self.say(kind, **values()):
                del self._unsaid[kind]

    # -- what is heard --------------------------------------------------------------------------------------------

    def hear(self) -> FailureRecord | None:
        """Once an interval, and when something has come: the job's record; None while it is well."""
        found = None
        while not self.is_gone and found is None:
            silent_s = self._clock.tick() - self._heard_s
            try:
                if (message := self._packets.receive()) is None:
                    break
                found = self._take(message)
            except EOFError:
                self.is_gone = True
                found = self._place.is_gone(silent_s, self._timeout_s)
            self._heard_s = self._clock.now_s
        with self._saying:
            self._say_unsaid()
        if not self.is_gone and found is None and self._clock.tick() - self._heard_s > self._timeout_s:
            found = self._place.is_silent(self._timeout_s)
            if self._place.pid:  # it has sent it
                os.kill(self._place.pid, signal.SIGKILL)  # stopped for good, perhaps: nobody else would end it
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
        """Ask for the phases of all ranks; `not_come` knows them when the event is set, by whoever calls `hear`."""
        self._answered.clear()
        self.say("ask")
        return self._answered

    def not_come(self, exchange: int) -> dict[int, str]:
        """The ranks that have not come to that end of a phase, counted from 1, and the phases they are in."""
        return {rank: row.phase for rank, row in rows_of(self._table).items() if row.exchanges < exchange}

    def behind(self, what: str) -> FailureRecord | None:
        """As `not_come`: of the rank for which this one waits, if there is one."""
        late = behind(self._table)
        return record_of_stall(self._table, late[0], what=what) if late else None
