"""A node's sentinel: notices a dead, stopped or disconnected rank, launcher or other node, and ends the rest.

    python -m grpo.faults.sentinel LISTENER_FD < SETTINGS

A separate process, started by the node's local main: neither the interpreter lock of a busy rank nor a hanging call
delays it. It loads neither torch nor another large library. Ranks connect to it by a Unix socket, and the sentinels of
other nodes to node 0's (`hub`). It ends when all ranks of its node have ended or left the watch.
"""

import contextlib
import json
import logging
import os
import selectors
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from grpo.faults.channel import peer_of
from grpo.faults.failure import FailureRecord
from grpo.faults.hub import Hub
from grpo.faults.hub_link import HubLink
from grpo.faults.liveness import AwakeClock, Loop, NodePlace, beat_interval_s
from grpo.faults.packets import PacketSocket
from grpo.faults.peer import Between
from grpo.faults.progress import RankRow, Reached, Table, behind, record_of_stall
from grpo.faults.rank import Limit, Rank
from grpo.faults.sessions import WatchedProcess, end_session, remove_traces
from grpo.faults.stacks import where
from grpo.faults.stalls import WARN_S, Stalls
from grpo.faults.storage import LOOK_S, Storage
from grpo.place.log import open_log, start_log

_log = logging.getLogger("grpo.faults.sentinel")  # this file runs as `__main__`

STUCK_GRACE_S = 6.0  # from a record to the end of a rank that has not raised
EXIT_GRACE_S = 12.0  # from raising to the end of a rank that has not exited
KILLED_S = 3.0  # from SIGKILL until a rank is given up: a hanging file system may hold it
MARGIN_S = 2.0  # on top of these: ranks end themselves first, then the sentinel does it
STACKS_S = 1.0  # after a deadline, for the stacks to be written
SAY_S = 1.0
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE)


class Sentinel:
    """The sentinel's state and loop. Settings: see `main`. Raises OSError if the hub cannot be reached."""

    def __init__(self, listener: socket.socket, settings: dict[str, Any]) -> None:
        self.timeout_s = float(settings["timeout_s"])
        self.interval_s = beat_interval_s(self.timeout_s)
        self._clock = AwakeClock(self.interval_s)
        self._selector = selectors.DefaultSelector()
        self._ranks = {int(rank): Rank(int(rank), pid) for rank, pid in settings["pids"].items()}
        self._first = self._ranks[min(self._ranks)]
        self.place = NodePlace(node=settings["node"], rank=self._first.rank, host=settings["host"], pid=os.getpid())
        self._agent = None if settings["agent"] is None else WatchedProcess(settings["agent"])
        self._agent_folder: str | None = settings.get("agent_folder")
        self._failed_s: float | None = None
        """Time at which the job got a record, on this clock."""
        self._enders: list[threading.Thread] = []
        self.between = self._meet(settings)
        self._listener = listener
        self._nameless: dict[PacketSocket, Callable[[], None]] = {}
        self._look_at_stalls_with(settings)
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        for rank in self._ranks.values():
            self._await_end(rank, partial(self._on_dead_rank, rank))
        if self._agent is not None:
            self._await_end(self._agent, partial(self._on_dead_agent, self._agent))

    def _meet(self, settings: dict[str, Any]) -> Between:
        own = (self.place, Loop(clock=self._clock, selector=self._selector, timeout_s=self.timeout_s))
        if settings["num_nodes"] == 1:
            return Between(*own)
        if self.place.node == 0:
            return Hub(*own, **{name: settings[name] for name in ("first_ranks", "secret", "join_s")})
        others: dict[str, Any] = {name: settings[name] for name in ("num_nodes", "secret")}
        return HubLink(*own, **others, addresses=settings["addresses"], port=settings["port"])

    def _look_at_stalls_with(self, settings: dict[str, Any]) -> None:
        self._stalls: Stalls | None = None
        self._storage: Storage | None = None
        if not (limit_s := settings.get("stall_s")):
            return
        warn_s = settings.get("stall_warn_s", WARN_S)
        self._stalls = Stalls(
            self._ranks,
            is_first_node=self.place.node == 0,
            warn_s=warn_s,
            limit_s=limit_s,
            first_limit_s=max(limit_s, settings["first_stall_s"]),
            ask=lambda answer: self.between.ask(self._table(), answer),
            warn=self._say,
            report=self.between.report,
        )
        # Before the stall of the rank it blocks, whose stack says less.
        self._storage = Storage(
            warn_s=warn_s / 2,
            limit_s=max(limit_s - 2 * LOOK_S, LOOK_S),
            warn=self._say,
            fail=partial(self._report, self._first),
        )

    def _await_end(self, process: WatchedProcess, then: Callable[[], None]) -> None:
        descriptor = process.descriptor
        if descriptor is None:
            then()
            return

        def on_end() -> None:
            self._selector.unregister(descriptor)
            process.close()
            then()

        self._selector.register(descriptor, selectors.EVENT_READ, on_end)

    def run(self) -> None:
        """Run until all ranks of this node have ended or left the watch, and their leftovers are removed."""
        next_beat_s = 0.0
        while not all(rank.is_dead or rank.has_stopped or rank.is_held for rank in self._ranks.values()):
            events = self._selector.select(max(0.0, next_beat_s - self._clock.now_s))
            now_s = self._clock.tick()
            for key, _ in events:
                key.data()
            if now_s >= next_beat_s:
                next_beat_s = now_s + self.interval_s
                self._beat(now_s)
            self._inform_ranks(now_s)
        _log.info("ends: all ranks of this node have ended or left")
        held = [rank for rank in self._ranks.values() if rank.is_held]
        for rank in held:
            self._say(f"leaves rank {rank.rank} (pid {rank.pid}) behind: killed, but the kernel holds it in a call")
            self._end_covered(rank)
        for thread in self._enders:
            thread.join()
        self.between.leave()
        if self.between.record is not None and self._agent is not None and (held or self._agent.is_stopped()):
            why = "waits for what does not end" if held else "is stopped"
            self._say(f"kills the launcher (pid {self._agent.pid}), which {why}")
            self._agent.kill()
            self._agent.close()
        if self._agent is not None and self._agent.is_dead and self._agent_folder is not None:
            shutil.rmtree(self._agent_folder, ignore_errors=True)  # its owner is dead

    # -- once an interval -----------------------------------------------------------------------------------------

    def _beat(self, now_s: float) -> None:
        for rank in self._ranks.values():
            rank.oom_kills.look()
            stopped_s = rank.stopped_for_s(now_s)
            if stopped_s > self.timeout_s:
                self._report(rank, f"the process of rank {rank.rank} (pid {rank.pid}) {_stopped(stopped_s)}")
            if rank.limit is not None and now_s > rank.limit.deadline_s + STACKS_S:
                self._report(rank, rank.limit.overdue + where(rank.stacks, rank.limit.thread), rank.limit.phase)
        if self._agent is not None and (stopped_s := self._agent.stopped_for_s(now_s)) > self.timeout_s:
            self._report(self._first, f"the launcher of this node (pid {self._agent.pid}) {_stopped(stopped_s)}")
        self.place.phase = self._first.phase
        self.between.beat(self._table())
        for rank in self._ranks.values():
            rank.send("beat", phase=self.place.phase)
        if self._stalls is not None and self._failed_s is None:
            free = [rank for rank in self._ranks.values() if not (rank.is_dead or rank.has_left or rank.limit)]
            self._stalls.look({rank.rank: (rank.phase, rank.exchanges) for rank in free}, now_s)
        if self._storage is not None and self._failed_s is None:
            self._storage.look(now_s)
        if self._failed_s is not None:
            self._end_ranks(now_s - self._failed_s)

    def _table(self) -> Table:
        table: Table = {}
        for number, rank in self._ranks.items():
            far, place = Reached.read(rank.progress), (self.place.node, self.place.host)
            table[str(number)] = [*RankRow(rank.phase, rank.exchanges, far.entered, far.collectives, *place)]
        return table

    def _report(self, rank: Rank, cause: str, phase: str | None = None) -> None:
        if self.between.record is None:
            _log.warning("sees: %s", cause)
            where: dict[str, Any] = {"node": self.place.node, "rank": rank.rank, "host": self.place.host}
            self.between.report(FailureRecord(**where, phase=phase or rank.phase, cause=cause))

    def _inform_ranks(self, now_s: float) -> None:
        """Send the job's record to the ranks as soon as there is one; repeat failed sends."""
        if (record := self.between.record) is None:
            return
        if self._failed_s is None:
            self._failed_s = now_s
            _log.error("the job failed on %s; the ranks of this node are informed", record)
        for rank in self._ranks.values():
            rank.is_reported = rank.is_reported or rank.send("record", record=record.as_dict())

    def _end_ranks(self, since_s: float) -> None:
        """Kill ranks that cannot end themselves, because they are stopped or stuck in C code."""
        for rank in self._ranks.values():
            is_late = since_s > STUCK_GRACE_S + EXIT_GRACE_S + MARGIN_S and not rank.has_left
            if rank.is_dead or not (is_late or (since_s > STUCK_GRACE_S + MARGIN_S and rank.is_stopped())):
                continue
            if rank.killed_s is None:
                rank.killed_s = since_s
                why = f"the job failed on {self.between.record}"
                self._say(f"kills rank {rank.rank} (pid {rank.pid}), which does not end: {why}")
            rank.kill()
            if since_s - rank.killed_s > KILLED_S:
                rank.is_held = True

    def _say(self, what: str) -> None:
        """Write to stderr, for at most `SAY_S`: its reader may be gone or stopped."""
        _log.warning("%s", what)
        line = f"[grpo] the sentinel of node {self.place.node} {what}\n"
        thread = threading.Thread(target=_write, args=[line.encode()], daemon=True)
        thread.start()
        thread.join(SAY_S)

    # -- ranks ----------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        """Accept connections of this node's ranks."""
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            pid, uid = peer_of(connection)
            ranks = [rank for rank in self._ranks.values() if rank.pid == pid]
            if uid != os.getuid() or not ranks:
                connection.close()
                continue
            packets = PacketSocket(connection)
            greet = self._nameless[packets] = partial(self._greet, packets, ranks)
            self._selector.register(packets, selectors.EVENT_READ, greet)

    def _greet(self, packets: PacketSocket, ranks: list[Rank]) -> None:
        """Identify a connection as one of `ranks`, the ranks of the connecting process."""
        message: dict[str, Any] | None = {}
        with contextlib.suppress(EOFError):
            message = packets.receive()
        if message is None:
            return
        rank = self._ranks.get(message.get("rank", -1))
        self._selector.unregister(packets)
        del self._nameless[packets]
        if rank not in ranks or len(packets.descriptors) != 2:
            packets.close()
            return
        rank.connection = packets
        rank.stacks, rank.progress = packets.descriptors
        _log.debug("rank %d (pid %d) has connected", rank.rank, rank.pid)
        rank.send("place", **asdict(self.place))
        self._selector.register(packets, selectors.EVENT_READ, lambda: self._read_rank(rank))
        self._read_rank(rank)

    def _read_rank(self, rank: Rank) -> None:
        while rank.connection is not None:
            try:
                if (message := rank.connection.receive()) is None:
                    return
            except EOFError:  # the end of the process is watched separately; forks may hold the socket open
                self._selector.unregister(rank.connection)
                rank.connection.close()
                rank.connection = None
                return
            self._take(rank, message)

    def _take(self, rank: Rank, message: dict[str, Any]) -> None:
        match message:
            case {"kind": "phase", "phase": phase, "exchanges": exchanges}:
                rank.phase, rank.exchanges = phase, exchanges
                _log.debug("rank %d: phase '%s', %d exchanges", rank.rank, phase, exchanges)
            case {"kind": "limit", "timeout_s": None}:
                rank.limit = None
            case {"kind": "limit", "timeout_s": timeout_s, "phase": phase, "overdue": overdue, "thread": thread}:
                rank.limit = Limit(self._clock.now_s + timeout_s, phase, overdue, thread)
            case {"kind": "report", "record": record}:
                _log.warning("rank %d reports a failure in phase '%s'", rank.rank, record.get("phase"))
                self.between.report(FailureRecord(**record))
            case {"kind": "ask"}:
                self.between.ask(self._table(), lambda table: rank.send("table", table=table))
            case {"kind": "covers", "folder": folder, "session": session}:
                rank.covered[folder] = session
            case {"kind": "uncovers", "folder": folder}:
                rank.covered.pop(folder, None)
            case {"kind": "left"}:
                rank.has_left = True
                _log.debug("rank %d leaves", rank.rank)
            case {"kind": "log", "path": path}:
                open_log(Path(path), f"sentinel of ranks {sorted(self._ranks)}, heartbeat_timeout {self.timeout_s:g}")
                if self._storage is not None:
                    self._storage.folder = Path(path).parent
            case {"kind": "stop"}:
                rank.has_left = rank.has_stopped = True
            case _:
                self._say(f"leaves out what rank {rank.rank} has sent, which is no message")

    def _on_dead_rank(self, rank: Rank) -> None:
        # it connected and died while the sentinel was busy: its connection is not accepted yet
        if rank.connection is None:
            self._accept()
            for greet in list(self._nameless.values()):
                greet()
        self._read_rank(rank)  # its last messages
        _log.debug("the process of rank %d (pid %d) has ended", rank.rank, rank.pid)
        if not rank.has_left:
            self._report_dead(rank)
        self._end_covered(rank)

    def _end_covered(self, rank: Rank) -> None:
        for folder, session in rank.covered.items():
            end = remove_traces if session is None else lambda path, session=session: end_session(session, path)
            thread = threading.Thread(target=end, args=[Path(folder)])  # takes seconds, and beats go on
            thread.start()
            self._enders.append(thread)

    def _report_dead(self, rank: Rank) -> None:
        who = f"the process of rank {rank.rank} (pid {rank.pid})"
        if taken := rank.oom_kills.lately():
            killer = f"out of memory, for the kernel's OOM killer has just taken {taken} process(es)"
            self._report(rank, f"{who} died without a word: {killer} [GRPO-628]")
        elif rank.ended_by == signal.SIGABRT:
            self.between.ask(self._table(), partial(self._report_aborted, rank, who))
        else:
            by = "killed?" if rank.ended_by is None else f"killed by {rank.ended_by.name}?"
            self._report(rank, f"{who} died without a word: {by} [GRPO-601]")

    def _report_aborted(self, rank: Rank, who: str, table: Table) -> None:
        """Report a rank aborted by NCCL's watchdog, which aborts waiting ranks: the rank they wait for counts."""
        what = f"{who} was aborted (SIGABRT), as NCCL's watchdog does after ddp_timeout: its last lines say why"
        if late := behind(table):
            self.between.report(record_of_stall(table, late[0], what=what))
        else:
            self._report(rank, f"{what} [GRPO-621]")

    def _on_dead_agent(self, agent: WatchedProcess) -> None:
        if not all(rank.is_dead or rank.has_left for rank in self._ranks.values()):
            cause = f"the launcher of this node (pid {agent.pid}) died before its ranks: killed? [GRPO-602]"
            self._report(self._first, cause)


def _write(line: bytes) -> None:
    with contextlib.suppress(OSError):
        os.write(sys.stderr.fileno(), line)


def _stopped(seconds: float) -> str:
    return f"has been stopped for {seconds:.0f} s (heartbeat_timeout): SIGSTOP, or a shell's job control [GRPO-603]"


def _answer(**values: Any) -> None:
    """Answer the local main, which has started this process and reads one line."""
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def main() -> int:
    """Run the sentinel. Prints one line of JSON: `error`, or `port`.

    Settings, as JSON on stdin: node, host, num_nodes, pids (by this node's ranks), agent (the launcher's pid, or null),
    agent_folder (removed after a launcher's death), timeout_s; to detect stalls stall_s, first_stall_s and
    stall_warn_s; with several nodes secret, join_s, first_ranks (of each node), addresses, port.
    """
    start_log()
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    os.chdir("/")  # keeps no file system busy
    settings = json.load(sys.stdin)
    listener = socket.socket(fileno=int(sys.argv[1]))
    try:
        sentinel = Sentinel(listener, settings)
    except OSError as error:
        _answer(error=str(error))
        return 1
    _answer(port=getattr(sentinel.between, "port", None))
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), sys.stdout.fileno())
    sentinel.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
