"""Broker on the local main: passes single turns of its node's ranks to the node's engines.

Runs in threads only: no rank waits for another one, and no collective is run. A failure becomes the job's, or is
reported to the ranks, which raise it at the next exchange.
"""

import os
import queue
import shutil
import socket
import tempfile
import threading
from functools import partial
from pathlib import Path

import numpy as np

from grpo.faults.channel import peer_of
from grpo.faults.watch import FailureWatch
from grpo.rollout.batch import Batch
from grpo.rollout.packing import REFUSED, Request, node_and_engine
from grpo.rollout.pool import EnginePool
from grpo.rollout.search import DeadlyRequests
from grpo.rollout.turns.messages import Answer, Ask, Cancel, Message, OutOfEngines, Pipe

MEET_S = 60.0  # until all ranks of the node have connected
MAX_HOMES = 1 << 16
MAX_FOLDER = 80  # characters of the temporary folder's path: a socket's path has at most 107


class TurnBroker:
    """Passes turns of the node's ranks to its engines.

    Args:
        num_others: other ranks of the node; each connects once, then the listener is closed.
    """

    def __init__(self, pool: EnginePool, watch: FailureWatch, *, num_others: int) -> None:
        self.deliveries = 0
        """Number of weight syncs so far; incremented before `take_up`."""
        self.address: str | None = None
        """Address for the node's other ranks, in a folder of this user's."""
        self._pool, self._watch = pool, watch
        self._lines: list[_Line] = []
        self._folder: Path | None = None
        self._num_others = num_others
        self._listener = self._listen() if num_others else None
        pool.subscribe(self._note_trouble)

    def connect(self) -> Pipe:
        """Make this rank's own connection."""
        ours, theirs = socket.socketpair()
        self._take(theirs)
        return Pipe(ours)

    def close(self) -> None:
        """End the threads and connections. Safe to call twice."""
        if self._listener is not None:
            self._listener.close()
        for line in self._lines:
            line.close()
        self._remove_folder()

    # -- connections -----------------------------------------------------------------------------------------------

    def _listen(self) -> socket.socket:
        within = None if len(tempfile.gettempdir()) < MAX_FOLDER else "/tmp"
        self._folder = Path(tempfile.mkdtemp(prefix="grpo-turns-", dir=within))
        self._watch.covers(self._folder)
        self.address = str(self._folder / "turns")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self.address)
        listener.listen(self._num_others)
        listener.settimeout(MEET_S)
        return listener

    def accept(self) -> None:
        """Accept connections: all ranks know the address now."""
        if self._listener is not None:
            threading.Thread(target=self._accept, args=[self._listener], name="grpo-turns-accept", daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        num_others = self._num_others
        try:
            while num_others:
                connection, _ = listener.accept()
                if peer_of(connection)[1] != os.getuid():
                    connection.close()
                    continue
                connection.settimeout(None)
                self._take(connection)
                num_others -= 1
        except OSError as error:
            self._watch.fail(f"{num_others} ranks of this node have not connected to its local main: {error}")
        finally:
            listener.close()
            self._remove_folder()

    def _remove_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._watch.uncovers(self._folder)

    def _take(self, connection: socket.socket) -> None:
        line = _Line(Pipe(connection), self._pool)
        self._lines.append(line)  # before its first request: errors are sent to all registered lines
        self._pool.subscribe(self._note_trouble)  # errors so far
        line.start()

    # -- errors ---------------------------------------------------------------------------------------------------

    def _note_trouble(self, error: Exception | None) -> None:
        """Report an error of the pool; called with its lock held: must not wait."""
        if error is None or isinstance(error, DeadlyRequests):
            for line in self._lines:
                line.say(OutOfEngines(self.deliveries, None if error is None else f"{type(error).__name__}: {error}"))
        else:
            threading.Thread(target=self._watch.fail, args=[error], name="grpo-turns-failure", daemon=True).start()


class _Line:
    """Connection of one rank: one thread receives requests, another one sends answers."""

    def __init__(self, pipe: Pipe, pool: EnginePool) -> None:
        self._pipe, self._pool = pipe, pool
        self._open: dict[int, Batch] = {}  # by turn number
        self._homes: dict[int, int] = {}  # by place: engine of the last turn
        self._lock = threading.Lock()
        self._outbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()

    def start(self) -> None:
        for target in (self._read, self._write):
            threading.Thread(target=target, name="grpo-turns", daemon=True).start()

    def say(self, message: Message) -> None:
        """Queue a message; never waits."""
        self._outbox.put(message)

    def close(self) -> None:
        self._outbox.put(None)

    def _read(self) -> None:
        try:
            while True:
                match message := self._pipe.receive():
                    case Ask():
                        self._ask(message)
                    case Cancel():
                        self._cancel(message.number)
        except (EOFError, OSError, ValueError):  # the rank is gone: its sentinel reports it
            self._forget()
            self.close()

    def _ask(self, ask: Ask) -> None:
        request = Request(
            token_ids=ask.token_ids, n=1, seed=ask.seed, overrides=ask.overrides, home=self._homes.get(ask.place)
        )
        batch = self._pool.submit([request], name=ask.name, order=ask.order, on_done=partial(self._answer, ask))
        with self._lock:
            if not batch.is_finished:
                self._open[ask.number] = batch

    def _answer(self, ask: Ask, batch: Batch) -> None:
        """Send an answer; called with the pool's lock held."""
        answer = _answer_of(ask, batch)
        if answer.engine != REFUSED:
            self._homes[ask.place] = int(node_and_engine(np.asarray(answer.engine))[1])
            if len(self._homes) > MAX_HOMES:
                del self._homes[next(iter(self._homes))]  # of a batch that ended long ago
        self._outbox.put(answer)

    def _cancel(self, number: int) -> None:
        with self._lock:
            batch = self._open.pop(number, None)
        if batch is not None:
            self._pool.drop(batch)

    def _forget(self) -> None:
        with self._lock:
            left, self._open = self._open, {}
        for batch in left.values():
            self._pool.drop(batch)

    def _write(self) -> None:
        try:
            while (message := self._outbox.get()) is not None:
                if isinstance(message, Answer):
                    with self._lock:
                        self._open.pop(message.number, None)
                self._pipe.send(message)
        except OSError:
            pass  # the rank is gone
        finally:
            self._pipe.close()


def _answer_of(ask: Ask, batch: Batch) -> Answer:
    completion = batch.ids.start
    sampled = batch.answers[completion]
    return Answer(
        number=ask.number,
        token_ids=sampled.token_ids,
        logprobs=sampled.engine_logprobs,
        engine=batch.engines[completion],
        policy_version=batch.policy_versions[completion],
        num_cached_tokens=sampled.num_cached_tokens,
        finish_reason=sampled.finish_reason,
        refusal=sampled.error,
    )
