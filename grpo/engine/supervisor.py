"""Supervisor of a node's engines: starts them while the trainer loads its model, and restarts dead ones."""

import contextlib
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from grpo.engine.client import POLL_S, STOPPED_TIMEOUT_S, EngineClient, EngineDied, EngineError
from grpo.engine.early import drop_host, stand_by
from grpo.engine.environment import engine_environment
from grpo.engine.like import EngineLike, StartEngine
from grpo.engine.messages import EngineSpec, Ready
from grpo.faults.device_memory import free_bytes, wait_until_free
from grpo.faults.failure import FailureKind, FailureRecord, StepFailed
from grpo.faults.watch import FailureWatch
from grpo.place.log import FILE_ONLY, log_name
from grpo.place.timeouts import USUAL, Timeouts
from grpo.place.topology import NodeTopology

_log = logging.getLogger(__name__)

START_PHASE = "engine start"
WINDOW_S = 3600.0  # in which deaths are counted
MAX_FAILED_STARTS = 2  # of one restart


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRestart:
    """A restarted engine, without its weights."""

    node: int
    index: int
    """Index among the node's engines."""
    host: str
    phase: str
    """Phase of its local main at its death."""
    cause: str
    """First line of the known cause."""
    seconds: float
    """Time from its death until it took work again."""

    def __str__(self) -> str:
        return (
            f"engine {self.index} of node {self.node} ({self.host}) died in phase '{self.phase}' ({self.cause}); "
            f"it was started again and is back after {self.seconds:.0f} s [GRPO-407]"
        )


class RestartLimit:
    """Limit on the deaths of one engine."""

    def __init__(self, max_deaths: int) -> None:
        self._max_deaths = max_deaths
        self._deaths: deque[float] = deque()

    def allows(self, now: float) -> bool:
        """Count a death at `now`, by time.monotonic(); return True if the engine may be restarted."""
        while self._deaths and now - self._deaths[0] > WINDOW_S:
            self._deaths.popleft()
        self._deaths.append(now)
        return len(self._deaths) <= self._max_deaths


@dataclass(slots=True, kw_only=True, eq=False)
class _Loss:
    """A lost engine, until its successor takes work."""

    since: float
    record: FailureRecord
    why: str
    """Cause from the record, without the engine's log."""
    successor: EngineLike | None = None
    failed_starts: int = 0
    given_up: FailureRecord | None = None
    """Reason why there will be no successor."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Slot:
    start: Callable[[], EngineLike]
    limit: RestartLimit
    devices: Sequence[str]
    free_bytes: Sequence[int]
    """Free memory of the devices before the first engine; [] if unknown."""
    loss: _Loss | None = None


class EngineSupervisor:
    """The engines of this node. Every rank has a supervisor; on ranks other than the local main it holds no engine.

    After `supervise`, a dead engine is restarted at once, on its devices and from its own thread; `replace_lost` puts
    the successor in its place. Before, a death fails the job.

    Engines end with this object, at the latest with the interpreter: a notebook's next trainer needs the GPUs.

    Args:
        log_folder: folder of the engines' logs.
        attempt: of the run, for the names of the logs.
        timeout_s: from the start of an engine until it is ready.
        max_restarts: of one engine in an hour.
        stopped_timeout_s: time after which an engine with a stopped process is ended.
        stall_timeout_s: time after which a stuck engine is ended; see `EngineClient`.
        standby: keep a process ready with vLLM imported, for the next restart.
        start_engine: `EngineClient`, or a test's replacement.
    """

    def __init__(
        self,
        spec: EngineSpec,
        topology: NodeTopology,
        watch: FailureWatch,
        *,
        log_folder: Path,
        attempt: int,
        timeout_s: float,
        max_restarts: int = 0,
        standby: bool = False,
        stopped_timeout_s: float = STOPPED_TIMEOUT_S,
        stall_timeout_s: float | None = None,
        start_engine: StartEngine = EngineClient,
        timeouts: Timeouts = USUAL,
    ) -> None:
        self.topology = topology
        self.before_restart: Callable[[], None] = lambda: None
        """Called before a successor is started, from the starting thread: releases resources shared with the dead
        engine."""
        self._watch = watch
        self._timeout_s = timeout_s
        self._max_restarts, self._timeouts = max_restarts, timeouts
        self._standby = standby
        self._supervises = self._closed = False
        self._changed = threading.Condition()
        me = weakref.ref(self)  # the engines' threads would keep this object alive

        def starter(index: int, environment: dict[str, str]) -> Callable[[], EngineLike]:
            def on_death(error: EngineDied) -> None:
                if (supervisor := me()) is not None:
                    supervisor._note_death(index, error)

            log_file = log_name("engine", node=topology.node, index=index, attempt=attempt)
            return lambda: start_engine(
                spec,
                name=f"engine {index} of node {topology.node}",
                environment=environment,
                log_path=log_folder / log_file,
                on_death=on_death,
                stopped_timeout_s=stopped_timeout_s,
                stall_timeout_s=stall_timeout_s,
            )

        self._environments = [
            engine_environment(
                os.environ,
                devices=devices,
                tensor_parallel_size=topology.tensor_parallel_size,
                engines_per_node=topology.num_engines,
                dtype=spec.engine_args.get("dtype"),
            )
            for devices in (topology.engines if topology.is_local_main else ())
        ]
        self._slots = [
            _Slot(
                start=starter(index, environment),
                limit=RestartLimit(max_restarts),
                devices=devices,
                free_bytes=free_bytes(devices),
            )
            for index, (environment, devices) in enumerate(zip(self._environments, topology.engines, strict=False))
        ]
        self.clients: list[EngineLike] = []
        self._every: list[EngineLike] = []  # engines whose processes may still exist
        self._ender = weakref.finalize(self, _close_all, self._every, watch)
        try:
            for slot in self._slots:
                self.clients.append(self._started(slot))
        except BaseException:  # no space for the second one's log
            self.close()
            raise
        drop_host()  # one that no engine of this node has taken

    def _started(self, slot: _Slot) -> EngineLike:
        client = slot.start()
        self._every.append(client)
        _log.info("%s starts: pid %d", client.name, client.pid, extra=FILE_ONLY)
        self._watch.covers(client.private_folder, client.pid)
        return client

    def wait_ready(self) -> list[Ready]:
        """Wait until all engines take work for the first time; not collective.

        Raises:
            EngineError: one ended first, or the deadline passed.
            JobFailed: the job failed elsewhere meanwhile.
        """
        ready = [client.wait_ready(self._timeout_s, self._watch.check) for client in self.clients]
        for client, each in zip(self.clients, ready, strict=True):
            _log.info("%s takes work, after %.1f s", client.name, each.startup_s, extra=FILE_ONLY)
        return ready

    def supervise(self) -> None:
        """Restart dead engines from now on."""
        with self._changed:
            self._supervises = True
        self._stand_by()

    def close(self) -> None:
        """End the engines. Safe to call twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        try:
            self._ender()
        finally:
            if self._standby and self._slots:
                drop_host()

    # -- deaths ---------------------------------------------------------------------------------------------------

    def has_lost(self, within_s: float = 0.0) -> bool:
        """True if an engine is lost and not replaced yet; waits a moment for one that may be about to end."""
        with self._changed:
            if self._changed.wait_for(self._misses_one, within_s):
                return True
            is_dead = any(client.is_dead for client in self.clients)  # its own thread will report it at once
            return is_dead and self._changed.wait_for(self._misses_one, self._timeouts.engine_notice_s)

    def _misses_one(self) -> bool:
        return any(slot.loss is not None for slot in self._slots)

    def replace_lost(self) -> list[EngineRestart]:
        """Put the successors of all lost engines in their places, once they take work; they have no weights yet.

        Raises:
            StepFailed: one will not come back; has the reason.
            JobFailed: the job failed elsewhere meanwhile.
        """
        restarts = []
        for index, slot in enumerate(self._slots):
            if (loss := slot.loss) is None:
                continue
            while slot.loss is not None:
                successor = self._await_successor(slot, loss)
                with self._changed:
                    if loss.successor is successor:  # else it has just died
                        self._forget(self.clients[index])
                        self.clients[index], slot.loss = successor, None
            restarts.append(
                EngineRestart(
                    node=self.topology.node,
                    index=index,
                    host=self.topology.host,
                    phase=loss.record.phase,
                    cause=_first_line(loss.why),
                    seconds=time.monotonic() - loss.since,
                )
            )
        if restarts:
            self._stand_by()
        return restarts

    def renew(self) -> None:
        """Restart the survivors of a broken weight sync: they hold parts of two policies, and may be stuck."""
        for index, slot in enumerate(self._slots):
            if slot.loss is not None:
                continue
            why = f"{self.clients[index].name} was in a weight sync that another engine broke"
            record = self._watch.make_record(why, kind=FailureKind.ENGINE)
            self.clients[index].close()
            with self._changed:
                if slot.loss is not None:  # it has died by itself meanwhile
                    continue
                loss = slot.loss = _Loss(since=time.monotonic(), record=record, why=why)
            self._start_successor(slot, loss)

    def _await_successor(self, slot: _Slot, loss: _Loss) -> EngineLike:
        while True:
            successor = self._next_successor(loss)
            try:
                successor.wait_ready(self._timeout_s, self._watch.check)
                return successor
            except EngineDied as error:  # its own thread decides what follows
                if not self._changes(loss, successor):
                    raise StepFailed(self._record(loss, f"its restart was not decided: {error}")) from error
            except EngineError as error:  # too late
                with contextlib.suppress(EngineError):
                    successor.close()
                with self._changed:
                    loss.given_up = self._record(loss, f"{error}")

    def _next_successor(self, loss: _Loss) -> EngineLike:
        deadline = time.monotonic() + self._timeouts.engine_notice_s + self._timeouts.device_free_s
        with self._changed:
            while loss.given_up is None and loss.successor is None and time.monotonic() < deadline:
                self._changed.wait(POLL_S)
                self._watch.check()
            if loss.given_up is not None or loss.successor is None:
                raise StepFailed(loss.given_up or loss.record)
            return loss.successor

    def _changes(self, loss: _Loss, successor: EngineLike) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: loss.successor is not successor, self._timeouts.engine_notice_s)

    def _forget(self, dead: EngineLike) -> None:
        """Drop a dead engine: its pid may be reused some day."""
        self._every.remove(dead)
        self._watch.uncovers(dead.private_folder)

    def _note_death(self, index: int, error: EngineDied) -> None:
        """Handle a death; called in a thread of the dead engine."""
        phase = None if self._supervises else START_PHASE  # the ranks may be further, and wait for it later
        record = self._watch.make_record(error, phase)
        _log.warning("an engine died in phase '%s': %s", record.phase, _first_line(error.what), extra=FILE_ONLY)
        stops = self._watch.stop_was_asked()
        with self._changed:
            if self._closed:
                return
            slot = self._slots[index]
            loss = self._answer_death(slot, record, error, stops) if self._supervises else None
            self._changed.notify_all()
        if loss is not None:
            if loss.given_up is None:
                self._start_successor(slot, loss)
        elif not stops:
            self._watch.report(record)

    def _answer_death(self, slot: _Slot, record: FailureRecord, error: EngineDied, stops: bool) -> _Loss:
        cause = record.cause
        if slot.loss is None:
            slot.loss = _Loss(since=time.monotonic(), record=record, why=error.what)
            allowed = error.is_requests_fault or slot.limit.allows(slot.loss.since)
            if self._max_restarts:
                cause = f"died more than {self._max_restarts} times in an hour (vllm_max_restarts) [GRPO-408]: {cause}"
        else:
            slot.loss.failed_starts += 1
            if slot.loss.successor is not None:
                self._forget(slot.loss.successor)
            allowed = slot.loss.failed_starts < MAX_FAILED_STARTS
            cause = f"could not be started again, {slot.loss.failed_starts} times [GRPO-409]: {cause}"
        loss = slot.loss
        loss.successor = None
        if stops or not allowed:
            loss.given_up = self._record(loss, record.cause if stops else cause)
        return loss

    def _start_successor(self, slot: _Slot, loss: _Loss) -> None:
        """Start a successor. Call it without the lock: a library and a driver may take long to release resources."""
        try:
            self.before_restart()
        except RuntimeError as error:  # NCCL's: the group is useless in any case
            _log.warning("the dead engine's weight sync group was not closed: %s", error, extra=FILE_ONLY)
        if not wait_until_free(slot.devices, slot.free_bytes, self._timeouts.device_free_s):
            _log.warning("GPUs %s have less memory free than at the start", ",".join(slot.devices), extra=FILE_ONLY)
        with self._changed:
            if self._closed:
                return
            try:
                loss.successor = self._started(slot)
            except OSError as error:  # no space for its log, for example
                loss.given_up = self._record(loss, f"could not be started again: {type(error).__name__}: {error}")
            self._changed.notify_all()

    def _record(self, loss: _Loss, cause: str) -> FailureRecord:
        _log.warning("an engine does not come back: %s", _first_line(cause), extra=FILE_ONLY)
        return replace(loss.record, cause=cause)

    def _stand_by(self) -> None:
        if self._standby and self._environments:
            stand_by(self._environments[0])


def _first_line(cause: str) -> str:
    return cause.partition("\n")[0]


def _close_all(clients: Sequence[EngineLike], watch: FailureWatch) -> None:
    with contextlib.ExitStack() as all_of_them:  # whatever one of them raises
        for client in clients:
            all_of_them.callback(_close, client, watch)


def _close(client: EngineLike, watch: FailureWatch) -> None:
    client.close()
    watch.uncovers(client.private_folder)  # not if the job has failed meanwhile: then the sentinel ends it
