"""The watch that brings the job's one failure record to every rank.

The rank that sees a fault raises. The others may sit in a collective, which cannot be interrupted from Python, so every
rank has a daemon thread with a connection of its own to the job's store. It looks for the record, for the deaths of the
ranks on its own node, and for SIGTERM (a launcher that ends its ranks because one failed). On a hit the main thread is
given a moment to raise by itself; a rank that is still stuck writes the record to stderr and ends.
"""

import contextlib
import ctypes
import itertools
import multiprocessing.util
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partialmethod
from types import TracebackType
from typing import Any

import torch.distributed as dist

from grpo.job.failure import FailureRecord, JobFailed
from grpo.job.mistakes import is_before_first_step, is_mistake
from grpo.job.signals import StopSignals

_RECORD_KEY = "failure"
_LEFT_KEY = "left/{rank}"

_watches = itertools.count()

POLL_S = 0.5
BLAME_S = 3.0  # how long a secondary error waits for the record of its cause
STUCK_GRACE_S = 6.0  # from seeing the record until a rank that has not raised is ended
SIGNAL_PATIENCE_S = 1.0  # a scheduler's signal to all processes may reach an engine before it reaches us
EXIT_GRACE_S = 12.0  # from raising until a rank that has not ended is ended


@contextlib.contextmanager
def on_expiry(timeout_s: float, act: Callable[[], None]) -> Iterator[None]:
    """Around what no deadline can be given to: `act` runs in another thread if it takes longer."""
    timer = threading.Timer(timeout_s, act)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class FailureWatch:
    """This rank's end of the failure contract.

    Args:
        store: the job's store, None for one process without a process group, where errors simply raise.
        local_pids: pid of each rank on this node, this one's included, by global rank.
        prefix: of the keys in the store; the same on all ranks.
    """

    def __init__(
        self,
        store: dist.Store | None,
        *,
        node: int,
        rank: int,
        host: str,
        local_pids: Mapping[int, int],
        prefix: str = "grpo/watch",
    ) -> None:
        self.node, self.rank, self.host = node, rank, host
        self.phase = "start"
        self.record: FailureRecord | None = None
        self.signals = StopSignals()
        self.on_record: Callable[[FailureRecord], None] = lambda record: None
        """Called once, from any thread, when this rank knows that the job has failed."""
        self._told = False
        self._reported = threading.Lock()
        self._guarded = 0
        self._raising = False
        self._raising_since: float | None = None
        self._raised_in_main = False
        self._sigterm_seen = False
        self._seen_since: float | None = None
        self._stopped = threading.Event()
        self._alone = store is None
        self._thread: threading.Thread | None = None
        if store is None:
            self.signals.take()
            return
        # Connections of our own: the job's may be blocked in a wait.
        self._store = dist.PrefixStore(prefix, store.clone())
        self._main_store = dist.PrefixStore(prefix, store.clone())
        self._pid = os.getpid()
        self._local_pids = dict(local_pids)
        self._selector = selectors.DefaultSelector()
        self._wake, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        self._selector.register(self._wake, selectors.EVENT_READ, "signal")
        for other, pid in self._local_pids.items():
            if other != rank:
                with contextlib.suppress(ProcessLookupError):
                    self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, other)
        self.signals.take(self._waker.fileno())
        self._excepthook = sys.excepthook
        sys.excepthook = self._report_unhandled
        # Runs at the interpreter's exit, and at that of a multiprocessing child, which runs no `atexit`.
        multiprocessing.util.Finalize(None, self._leave, exitpriority=10)
        self._thread = threading.Thread(target=self._watch, name="grpo-failure-watch", daemon=True)
        self._thread.start()

    # -- for the main thread --------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Name what this rank is doing, for the record."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            if sys.exc_info()[0] is None:
                self.phase = before

    @contextlib.contextmanager
    def within(self, timeout_s: float, cause: Callable[[], str]) -> Iterator[None]:
        """Around what may hold the main thread in a library that has no deadline: it becomes the job's failure.

        Args:
            cause: what to say then; called from another thread.
        """
        with on_expiry(timeout_s, lambda: self.fail(cause())):
            yield

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Report what is raised inside to all ranks; a consequence of another rank's failure raises as that.

        Nests: the outermost one reports.

        Raises:
            JobFailed: chained to the error inside, when the record names another rank.
        """
        self._guarded += 1
        try:
            yield
        except BaseException as error:
            if self._guarded == 1:
                self._raise_for_job(error)
            raise
        finally:
            self._guarded -= 1

    def _raise_for_job(self, error: BaseException) -> None:
        self._raising = True
        if isinstance(error, SystemExit) and not error.code:
            self._raising = False
            return  # a script that says it is done
        if self._alone or isinstance(error, JobFailed):
            self._raising_since = time.monotonic()
            return
        if _may_be_an_echo(error) or self._sigterm_seen:
            self.await_cause()
        self._raising_since = time.monotonic()
        if self.record is None:
            self.fail(error)
        if self.record is not None and self.record.rank != self.rank:
            raise JobFailed(self.record) from error

    def check(self) -> None:
        """Raise `JobFailed` if the job has failed anywhere; cheap, for loops that wait."""
        record = self.record
        if record is not None:
            raise JobFailed(record)

    def await_cause(self) -> None:
        """A lost peer shows first as a broken connection: give the watch time to say who it was, before we are blamed.

        Returns after `BLAME_S` at the latest, with a record or without.
        """
        deadline = time.monotonic() + BLAME_S
        while self.record is None and not self._alone and time.monotonic() < deadline:
            time.sleep(0.05)

    def make_record(self, cause: BaseException | str, phase: str | None = None) -> FailureRecord:
        """A record about this rank."""
        text = cause if isinstance(cause, str) else f"{type(cause).__name__}: {cause}"
        mistake = isinstance(cause, BaseException) and is_mistake(cause, before_first_step=is_before_first_step())
        return FailureRecord(
            node=self.node,
            rank=self.rank,
            host=self.host,
            phase=phase or self.phase,
            cause=text,
            can_heal=not mistake,
        )

    def fail(self, cause: BaseException | str) -> None:
        """Make a failure of this rank the job's, as `report` does."""
        self.report(self.make_record(cause))

    def report(self, record: FailureRecord) -> None:
        """Make `record` the job's, unless one is there already. From any thread."""
        with self._reported:
            if self.record is not None:
                return
            if self._alone:
                self.record = record
                self._tell()
                if self._guarded and threading.current_thread() is not threading.main_thread():
                    threading.Thread(target=self._end_alone, name="grpo-failure-watch", daemon=True).start()
                return
            try:
                first = self._main_store.compare_set(_RECORD_KEY, "", record.dumps())
                self.record = FailureRecord.loads(first)
            except (dist.DistError, RuntimeError):  # the store went with its host: keep what we know
                self.record = record
        self._tell()

    def _tell(self) -> None:
        if self.record is not None and not self._told:
            self._told = True
            self.on_record(self.record)

    def stop_was_asked(self) -> bool:
        """Whether this rank was asked to stop; waits a moment for a signal that may have reached another first."""
        deadline = time.monotonic() + SIGNAL_PATIENCE_S
        while self.signals.request is None and time.monotonic() < deadline:
            time.sleep(0.05)
        if self.signals.request is None:
            self.signals.request = self.signals.look()
        return self.signals.request is not None

    def stop(self) -> None:
        """End the watch: this rank is done. SIGTERM ends the process again."""
        if self._thread is None:
            return
        self._end_watch()
        sys.excepthook = self._excepthook
        self.signals.release()

    def _end_watch(self) -> None:
        self._stopped.set()
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(2.0)

    # -- signals and exit -----------------------------------------------------------------------------------------

    def _report_unhandled(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._excepthook(kind, error, trace)
        if self.record is None and not issubclass(kind, KeyboardInterrupt):
            self.fail(error)

    def leave(self) -> None:
        """This rank is done: its end is no failure, and neither is that of the others."""
        if self._thread is not None:
            self._leave()

    def _leave(self) -> None:
        """At exit: tell the node's other ranks that this one has not been killed."""
        if os.getpid() != self._pid or self._stopped.is_set():
            return  # a forked child's exit is not ours
        if self.record is None:
            with contextlib.suppress(dist.DistError, RuntimeError):
                self._main_store.set(_LEFT_KEY.format(rank=self.rank), "1")
        # SIGTERM stays without effect: a launcher that sends it now would interrupt the ending of the engines.
        self._end_watch()

    # -- the watch's thread ---------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._stopped.is_set():
            for key, _ in self._selector.select(POLL_S):
                if key.data == "signal":
                    self._hear(self._wake.recv(64))
                else:
                    self._selector.unregister(key.fileobj)
                    self._look_at_dead_rank(key.data)
            if self.record is None and not self._stopped.is_set():
                self._look_into_store()
            if self.record is not None:
                self._tell()
                self._raise_in_main_thread()
                self._end_if_stuck()

    def _look_into_store(self) -> None:
        try:
            if self._store.check([_RECORD_KEY]):
                self.record = FailureRecord.loads(self._store.get(_RECORD_KEY))
        except (dist.DistError, RuntimeError) as error:
            if self._guarded == 0:
                self._stopped.set()  # after training: the process that held the store has simply ended first
            if not self._stopped.is_set():
                cause = f"the job's store is gone, and with it the launcher that held it ({error})"
                self.record = self.make_record(cause.splitlines()[0])

    def _look_at_dead_rank(self, rank: int) -> None:
        with contextlib.suppress(dist.DistError, RuntimeError):
            if self._store.check([_LEFT_KEY.format(rank=rank)]) or self._store.check([_RECORD_KEY]):
                return
        cause = f"the process of rank {rank} (pid {self._local_pids[rank]}) died without a word: killed?"
        self.report(FailureRecord(node=self.node, rank=rank, host=self.host, phase=self.phase, cause=cause))

    def _hear(self, numbers: bytes) -> None:
        for number in (signal.SIGUSR1, signal.SIGTERM):
            if number in numbers and self.signals.holds(number):
                self.signals.note(number)
                if number == signal.SIGTERM:
                    self._take_sigterm()

    def _take_sigterm(self) -> None:
        """End this process, unless training can answer; a launcher sends SIGTERM because a rank failed, too."""
        self._sigterm_seen = True
        deadline = time.monotonic() + BLAME_S
        while self.record is None and time.monotonic() < deadline:
            for key, _ in self._selector.select(0.1):
                if key.data != "signal":
                    self._selector.unregister(key.fileobj)
                    self._look_at_dead_rank(key.data)
            if self.record is None:
                self._look_into_store()
        if self.record is None and self.signals.is_open:
            return  # a request to stop
        if self.record is None:
            self.fail("got SIGTERM: the launcher or the scheduler ends this job")
        if self._raising_since is None:  # else the traceback is on its way
            self._end(128 + signal.SIGTERM)

    def _raise_in_main_thread(self) -> None:
        """Raise `JobFailed` where the main thread is, once; it arrives when that thread runs Python code again."""
        if self.record is None or self._raised_in_main or self._guarded == 0 or self._raising:
            return
        self._raised_in_main = True
        # The interpreter makes the instance, without arguments.
        elsewhere = type("JobFailed", (JobFailed,), {"__init__": partialmethod(JobFailed.__init__, self.record)})
        main_id = ctypes.c_ulong(threading.main_thread().ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(main_id, ctypes.py_object(elsewhere))

    def _end_if_stuck(self) -> None:
        now = time.monotonic()
        self._seen_since = self._seen_since or now
        if self._raising_since is not None:
            if now - self._raising_since > EXIT_GRACE_S:
                self._end(1)
        elif now - self._seen_since > STUCK_GRACE_S:
            self._end(1)

    def _end_alone(self) -> None:
        """What the watch's thread does elsewhere: NCCL, say, may hold the main thread for good."""
        self._raise_in_main_thread()
        deadline = time.monotonic() + STUCK_GRACE_S
        while time.monotonic() < deadline:
            if self._raising or not self._guarded:
                return
            time.sleep(0.1)
        self._end(1)

    def _end(self, code: int) -> None:
        print(f"[grpo] rank {self.rank} ends: the job failed on {self.record}", file=sys.stderr, flush=True)
        os._exit(code)


# What plain RuntimeErrors say when a peer is lost, or when the launcher's SIGTERM reached a data-loader worker first.
_ECHOES = ("gloo", "nccl", "connection", "peer", "timed out", "dataloader worker")


def _may_be_an_echo(error: BaseException) -> bool:
    """Whether `error` may be the consequence of another rank's failure."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, dist.DistError):
            return True
        text = str(seen).lower()
        if isinstance(seen, RuntimeError) and any(word in text for word in _ECHOES):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def watch_for(topology: Any, local_pids: Mapping[int, int]) -> FailureWatch:
    """The watch of this rank; without a process group one that only keeps the record."""
    store = dist.distributed_c10d._get_default_store() if dist.is_initialized() and topology.world_size > 1 else None
    return FailureWatch(
        store,
        node=topology.node,
        rank=topology.rank,
        host=topology.host,
        local_pids=local_pids,
        prefix=f"grpo/watch/{next(_watches)}",
    )
