"""The watch: brings the job's one failure record to every rank.

The failing rank raises. The others may be in a collective, which Python cannot interrupt. So a daemon thread of every
rank listens to the node's sentinel: for the record, or for its connection's end, which is a failure too. It also gets
SIGTERM: a launcher ends its ranks when one fails. After a failure the main thread has a moment to raise by itself; a
rank still stuck writes the record to stderr and exits.
"""

import contextlib
import logging
import multiprocessing.util
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

from grpo.faults.deadlines import CallLimits, on_expiry, raise_in_main_thread
from grpo.faults.failure import FailureKind, FailureRecord, JobFailed
from grpo.faults.kinds import may_be_an_echo, record_of
from grpo.faults.sentinel import EXIT_GRACE_S, STUCK_GRACE_S
from grpo.faults.sentinel_link import SentinelLink
from grpo.faults.signals import StopSignals
from grpo.place.log import FILE_ONLY, flush_log
from grpo.place.timeouts import USUAL, Timeouts

_log = logging.getLogger(__name__)


POLL_S = 0.2  # once there is a record
REPORT_S = 5.0  # until the job's record is known, which may be another rank's


class FailureWatch:
    """This rank's side of the failure handling.

    Args:
        link: to the node's sentinel; None for a single process without a process group, where errors simply raise.
    """

    def __init__(
        self, link: SentinelLink | None, *, node: int, rank: int, host: str, timeouts: Timeouts = USUAL
    ) -> None:
        self.node, self.rank, self.host, self._timeouts = node, rank, host, timeouts
        self.phase = "start"
        self.record: FailureRecord | None = None
        self.signals = StopSignals()
        self.on_record: Callable[[FailureRecord], None] = lambda record: None
        """Called once, from any thread, when this rank learns that the job has failed."""
        self._is_known = False
        self._reported = threading.Lock()
        self._guarded = 0
        self._raising = False
        self._raising_since: float | None = None
        self._raised_in_main = False
        self._sigterm_seen = False
        self._seen_since: float | None = None
        self._stopped = threading.Event()
        self._known = threading.Event()  # set once the record is known
        self._link = link
        self._thread: threading.Thread | None = None
        self.limits = CallLimits(link, lambda cause, phase: self.report(self.make_record(cause, phase)), timeouts)
        self._exchanges = 0
        if link is None:
            self.signals.take()
            return
        self._pid = os.getpid()
        self._selector = selectors.DefaultSelector()
        self._wake, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._selector.register(link, selectors.EVENT_READ)
        self.signals.take(self._waker.fileno())
        self._excepthook = sys.excepthook
        sys.excepthook = self._report_unhandled
        # Runs at exit of the interpreter and of multiprocessing children, which skip `atexit`.
        multiprocessing.util.Finalize(None, self.leave, exitpriority=10)
        self._thread = threading.Thread(target=self._watch, args=[link], name="grpo-failure-watch", daemon=True)
        self._thread.start()

    # -- for the main thread --------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Set this rank's phase during a `with` block, for the record."""
        before = self.phase
        self.enter(phase)
        yield
        self.enter(before)  # not after an error: it was raised in the phase

    def enter(self, phase: str) -> None:
        """Set the phase until the next one."""
        self.phase = phase
        _log.debug("phase '%s'", phase)
        self._say_phase()

    @contextlib.contextmanager
    def limited(self, phase: str, timeout_s: float, cause: str) -> Iterator[None]:
        """Set the phase and limit the time of users' code that may hang: the job then fails with `cause`; see
        `CallLimits`."""
        with self.limits.around(phase, timeout_s, cause), self.during(phase):
            yield

    def within(self, timeout_s: float, cause: Callable[[], str]) -> contextlib.AbstractContextManager[None]:
        """Fail the job if the block takes longer than `timeout_s`. For library calls without a deadline in the main
        thread.

        Args:
            cause: returns the cause; called from another thread.
        """
        return on_expiry(timeout_s, lambda: self.fail(cause()))

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Report an exception raised inside to all ranks. One caused by another rank's failure is raised as
        `JobFailed`.

        May be nested: the outermost one reports.

        Raises:
            JobFailed: chained to the error inside, if the record names another rank, or for an `exit()` while the job
                goes on.
        """
        if not self._guarded:
            self._raising = False  # an interrupted notebook cell is over, and the next one begins
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
        leaves = isinstance(error, SystemExit) and not error.code
        if leaves and (self._link is None or self._stopped.is_set()):
            self._raising = False
            return  # a script that is done
        if isinstance(error, JobFailed) and self.record is None:
            self.report(error.record)  # the same on every rank, or an error only this rank saw
        if self._link is None or isinstance(error, JobFailed):
            self._raising_since = time.monotonic()
            return
        if may_be_an_echo(error) or self._sigterm_seen:
            self.await_cause()
        self._raising_since = time.monotonic()
        if self.record is None and may_be_an_echo(error):
            self._link.progress.note_collectives()
            self._until(self._link.ask(), REPORT_S)
            if (late := self._link.behind(f"rank {self.rank} got {type(error).__name__}: {error}")) is not None:
                self.report(late)
        if self.record is None:
            self.fail(error)
        if self.record is not None and (leaves or self.record.rank != self.rank):
            raise JobFailed(self.record) from error  # a rank that simply exits would count as finished

    def check(self) -> None:
        """Raise `JobFailed` if the job has failed anywhere; cheap, for waiting loops."""
        if self._link is not None:
            self._link.progress.look()
        if self.record is not None:
            raise JobFailed(self.record)

    def await_cause(self) -> None:
        """Wait for the record of a lost peer, which shows first as a broken connection, before this rank is blamed.

        Returns after `blame_s` at the latest, with a record or without.
        """
        deadline = time.monotonic() + self._timeouts.blame_s
        while self.record is None and self._link is not None and time.monotonic() < deadline:
            time.sleep(0.05)

    def make_record(
        self, cause: BaseException | str, phase: str | None = None, *, kind: FailureKind = FailureKind.MACHINE
    ) -> FailureRecord:
        """Make a record about this rank; a failure with one keeps it.

        Args:
            kind: of a cause given as text.
        """
        phase = phase or self.phase
        return record_of(cause, node=self.node, rank=self.rank, host=self.host, phase=phase, kind=kind)

    def fail(self, cause: BaseException | str) -> None:
        """Make a failure of this rank the job's, as `report` does."""
        self.report(self.make_record(cause))

    def report(self, record: FailureRecord) -> None:
        """Make `record` the job's, unless there is one already. From any thread."""
        _log.error("reports: %s", record, extra=FILE_ONLY)
        is_own_thread = threading.current_thread() is self._thread
        if self._reported.acquire(blocking=not is_own_thread):
            try:
                self._settle(record)
            finally:
                self._reported.release()
        else:  # another thread reports, and waits for this thread to receive
            self._until(self._known, REPORT_S)
        self._notify()

    def _settle(self, record: FailureRecord) -> None:
        if self._link is not None and self.record is None and self._link.say("report", record=record.as_dict()):
            self._until(self._known, REPORT_S)
        if self.record is not None:
            return
        self._take_record(record)  # the job's, or this one if the sentinel did not answer
        if self._link is None and self._guarded and threading.current_thread() is not threading.main_thread():
            threading.Thread(target=self._end_alone, name="grpo-failure-watch", daemon=True).start()

    def _until(self, event: threading.Event, timeout_s: float) -> None:
        """Wait for an event that follows the sentinel's answer; the watch's thread receives it itself."""
        if threading.current_thread() is not self._thread:
            event.wait(timeout_s)
            return
        deadline = time.monotonic() + timeout_s
        while not event.is_set() and time.monotonic() < deadline:
            self._listen(POLL_S)

    def _take_record(self, record: FailureRecord) -> None:
        if self.record is None:
            self.record = record
            _log.error("the job failed on %s", record, extra=FILE_ONLY)
            self._known.set()

    def _notify(self) -> None:
        if self.record is not None and not self._is_known:
            self._is_known = True
            self.on_record(self.record)

    def stop_was_asked(self) -> bool:
        """True if this rank was asked to stop; waits a moment for a signal that may have reached another first."""
        return self.signals.was_asked(self._timeouts.signal_patience_s)

    # -- messages to the sentinel ------------------------------------------------------------------------------------

    def _say_phase(self) -> None:
        if self._link is not None:
            self._link.say_phase(self.phase, self._exchanges)

    def note_exchange(self) -> int:
        """Count an end of a phase, which all ranks reach together. Returns its number, counted from 1."""
        self._exchanges += 1
        self.note_progress()
        self._say_phase()
        return self._exchanges

    def note_progress(self) -> None:
        """Note progress: a micro-batch begins, or an optimizer step has ended. Cheap."""
        if self._link is not None:
            self._link.progress.enter()

    def note_step(self, seconds: float) -> None:
        """Note the duration of a whole optimizer step, generation included."""
        if self._link is not None:
            self._link.progress.note_step(seconds)

    def not_come(self, exchange: int) -> dict[int, str]:
        """Return the ranks that have not reached that end of a phase, and their phases; {} if unknown."""
        if self._link is None:
            return {}
        self._until(self._link.ask(), REPORT_S)
        return self._link.not_come(exchange)

    def covers(self, folder: Path, session: int | None = None) -> None:
        """Let the sentinel end a session and remove a folder if this process dies."""
        if self._link is not None:
            self._link.say("covers", folder=str(folder), session=session)

    def uncovers(self, folder: Path) -> None:
        """Undo `covers`: the folder is gone."""
        if self._link is not None:
            self._link.say("uncovers", folder=str(folder))

    def open_log(self, path: Path) -> None:
        """Let the node's sentinel write its log to this file."""
        if self._link is not None:
            self._link.say("log", path=str(path))

    def stop(self) -> None:
        """End the watch: this rank is done. SIGTERM ends the process again."""
        if self._link is not None:
            self._end_watch()
            self._link.say("stop")
            self._link.close()
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
        """Announce that this rank is done: its end is no failure, nor that of the others. Called at exit at the
        latest."""
        if self._link is None or os.getpid() != self._pid or self._stopped.is_set():
            return  # a forked child's exit is not ours
        _log.debug("leaves the watch, in phase '%s'", self.phase)
        if self.record is None:
            self._link.say("left")
        # Keep ignoring SIGTERM: from a launcher it would now interrupt the shutdown of the engines.
        self._end_watch()

    # -- the watch's thread ---------------------------------------------------------------------------------------

    def _watch(self, link: SentinelLink) -> None:
        while not self._stopped.is_set():
            self._note_signals(self._listen(link.interval_s if self.record is None else POLL_S))
            link.progress.note_collectives()
            if self.record is not None and not self._stopped.is_set():
                self._notify()
                self._raise_in_main_thread()
                self._end_if_stuck()

    def _listen(self, timeout_s: float) -> bytes:
        """Receive from the sentinel for the given time. Returns the numbers of received signals."""
        assert self._link is not None
        events = {key.fileobj for key, _ in self._selector.select(timeout_s)}
        if (record := self._link.receive()) is not None and not self._stopped.is_set():
            self._take_record(record)
        if self._link in events and self._link.is_gone:
            self._selector.unregister(self._link)
        return self._wake.recv(64) if self._wake in events else b""

    def _note_signals(self, numbers: bytes) -> None:
        for number in (signal.SIGUSR1, signal.SIGTERM):
            if number in numbers and self.signals.holds(number):
                self.signals.note(number)
                if number == signal.SIGTERM:
                    self._take_sigterm()

    def _take_sigterm(self) -> None:
        """End this process, unless training can answer; a launcher also sends SIGTERM when a rank has failed."""
        self._sigterm_seen = True
        self._until(self._known, self._timeouts.blame_s)
        if self.record is None and self.signals.is_open:
            return  # a request to stop
        if self.record is None:
            self.fail("got SIGTERM: the launcher or the scheduler ends this job")
        if self._raising_since is None:  # else the traceback is on its way
            self._end(128 + signal.SIGTERM)

    def _raise_in_main_thread(self) -> None:
        """Raise `JobFailed` in the main thread, once; it takes effect when the thread next runs Python code."""
        if self.record is None or self._raised_in_main or self._guarded == 0 or self._raising:
            return
        self._raised_in_main = True
        raise_in_main_thread(self.record)

    def _end_if_stuck(self) -> None:
        self._seen_since = self._seen_since or time.monotonic()
        grace_s = STUCK_GRACE_S if self._raising_since is None else EXIT_GRACE_S
        if time.monotonic() - (self._raising_since or self._seen_since) > grace_s:
            self._end(1)

    def _end_alone(self) -> None:
        """End a single process, as the watch's thread does elsewhere: NCCL, for example, may block the main thread for
        good."""
        self._raise_in_main_thread()
        deadline = time.monotonic() + STUCK_GRACE_S
        while time.monotonic() < deadline:
            if self._raising or not self._guarded:
                return
            time.sleep(0.1)
        self._end(1)

    def _end(self, code: int) -> None:
        # one write: all ranks write
        sys.stderr.write(f"[grpo] rank {self.rank} ends: the job failed on {self.record}\n")
        flush_log()
        os._exit(code)
