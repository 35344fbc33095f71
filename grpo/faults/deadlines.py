"""Deadlines for calls without a timeout of their own: waits in libraries, users' code, a busy main thread.

They differ in what must still run: another Python thread, the main thread (by a signal), or nothing in this process.
"""

import contextlib
import ctypes
import faulthandler
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from dataclasses import dataclass
from functools import partialmethod
from types import FrameType
from typing import TypeVar

from grpo.faults.failure import FailureRecord, JobFailed
from grpo.faults.sentinel_link import SentinelLink
from grpo.faults.stacks import Stacks
from grpo.faults.users_code import Worker
from grpo.place.timeouts import USUAL, Timeouts

REMINDER_S = 60.0  # between two log lines about a wait
AGAIN_S = 5.0  # code that catches `DeadlinePassed` and goes on gets it again after this time
_calls: set[threading.Event] = set()
"""Events of the calls in `interrupted_after`; setting one interrupts the main thread, even in a system call."""


class DeadlinePassed(BaseException):
    """A call exceeded its deadline. A BaseException, so that no `except Exception` catches it."""


@contextlib.contextmanager
def on_expiry(timeout_s: float, act: Callable[[], None]) -> Iterator[None]:
    """Run `act` in another thread if the block takes longer than `timeout_s`. For calls without a deadline of their
    own."""
    timer = threading.Timer(timeout_s, act)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def every_minute(act: Callable[[float], None]) -> Iterator[None]:
    """Call `act` with the elapsed seconds once a minute, from another thread, during a long wait in a library."""
    begun, is_over = time.monotonic(), threading.Event()

    def repeat() -> None:
        while not is_over.wait(REMINDER_S):
            act(time.monotonic() - begun)

    threading.Thread(target=repeat, name="grpo-every-minute", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


@contextlib.contextmanager
def interrupted_after(timeout_s: float) -> Iterator[None]:
    """Interrupt users' code in the main thread after `timeout_s`, even in a system call; the job's failure interrupts
    it too. In another thread the code has no limit.

    Uses SIGUSR2, leaving SIGALRM to the code inside. An alarm set inside is cancelled afterwards.

    Raises:
        DeadlinePassed: at the main thread's current position; and again after the block, if the code caught it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    deadline, had_alarm = time.monotonic() + timeout_s, signal.getitimer(signal.ITIMER_REAL)[0] > 0
    is_inside, has_passed, strike = True, False, threading.Event()

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal has_passed
        if is_inside and time.monotonic() >= deadline:  # else it was the job's failure, which is raised separately
            has_passed = True
            raise DeadlinePassed

    def watch(main_thread: int) -> None:
        wait_s = timeout_s
        while True:
            strike.wait(wait_s)
            strike.clear()
            if not is_inside:
                return
            signal.pthread_kill(main_thread, signal.SIGUSR2)
            wait_s = AGAIN_S

    before = signal.signal(signal.SIGUSR2, interrupt)
    watcher = threading.Thread(target=watch, args=[threading.get_ident()], name="grpo-interrupt", daemon=True)
    watcher.start()
    _calls.add(strike)
    try:
        yield
    except Exception:
        if not has_passed:
            raise
    finally:
        is_inside = False
        _calls.discard(strike)
        strike.set()
        watcher.join()  # a pending signal arrives before the handler is removed
        signal.signal(signal.SIGUSR2, before)
        if has_passed and not had_alarm:
            signal.setitimer(signal.ITIMER_REAL, 0)
    if has_passed:
        raise DeadlinePassed


@contextlib.contextmanager
def ending_process(timeout_s: float) -> Iterator[None]:
    """End the process with exit code 1 and its stacks on stderr if the block takes longer: the last resort."""
    faulthandler.dump_traceback_later(timeout_s, file=2, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def raise_in_main_thread(record: FailureRecord) -> None:
    """Raise `JobFailed` in the main thread, asynchronously: it takes effect when the thread next runs Python code."""
    # The interpreter creates the instance, without arguments.
    members = {"__init__": partialmethod(JobFailed.__init__, record), "__module__": JobFailed.__module__}
    elsewhere = type("JobFailed", (JobFailed,), members)
    main_id = ctypes.c_ulong(threading.main_thread().ident or 0)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(main_id, ctypes.py_object(elsewhere))
    for strike in [*_calls]:
        strike.set()


_AT_ONCE_S = 0.001


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _LimitedCall:
    phase: str
    cause: str
    deadline_s: float
    """Deadline by `time.monotonic()`."""
    thread: int
    """Thread id from `threading.get_ident()`; its stack is shown first."""


class CallLimits:
    """Limits of calls in progress, in any thread of this process. The first missed deadline fails the job, with the
    stacks of this process.

    The sentinel keeps the deadline, because Python code may not run here. A single process without a sentinel ends
    `alone_grace_s` later, with its stacks on stderr.

    Args:
        link: to the node's sentinel; None for a single process.
        fail: reports a cause in a phase as the job's failure.
    """

    def __init__(self, link: SentinelLink | None, fail: Callable[[str, str], None], timeouts: Timeouts = USUAL) -> None:
        self._link, self._fail, self._alone_grace_s = link, fail, timeouts.alone_grace_s
        self._stacks = Stacks() if link is None else link.stacks
        self._calls: set[_LimitedCall] = set()
        self._lock = threading.Lock()
        self._first: _LimitedCall | None = None
        self._armed = contextlib.ExitStack()

    @contextlib.contextmanager
    def around(self, phase: str, timeout_s: float, cause: str) -> Iterator[None]:
        """Limit the block: if it takes longer than `timeout_s`, the job fails in `phase` with `cause`."""
        deadline_s = time.monotonic() + timeout_s
        call = _LimitedCall(phase=phase, cause=cause, deadline_s=deadline_s, thread=threading.get_ident())
        with self._lock:
            self._calls.add(call)
            self._arm()
        try:
            yield
        finally:
            self._end(call)

    def _end(self, call: _LimitedCall) -> None:
        with self._lock:
            self._calls.discard(call)
            self._arm()

    def _arm(self) -> None:
        """Arm the earliest deadline."""
        first = min(self._calls, key=lambda call: call.deadline_s, default=None)
        if first is self._first:
            return
        self._first = first
        self._armed.close()
        if first is None:
            if self._link is not None:
                self._link.say_no_limit()
            return
        left_s = max(first.deadline_s - time.monotonic(), _AT_ONCE_S)
        if self._link is not None:
            self._armed.enter_context(self._stacks.armed(left_s))
            self._link.say_limit(left_s, first.phase, first.cause, thread=first.thread)
        else:
            self._armed.enter_context(ending_process(left_s + self._alone_grace_s))
            self._armed.enter_context(on_expiry(left_s, lambda: self._expire(first)))

    def _expire(self, call: _LimitedCall) -> None:
        self._end(call)  # Python code still runs, so nothing needs to end this process
        self._fail(f"{call.cause}; it was here, the innermost call first:\n{self._stacks.now(call.thread)}", call.phase)


T = TypeVar("T")


def within(timeout_s: float, function: Callable[[], T]) -> T:
    """Return `function()`, run in a daemon thread; on timeout the thread is abandoned.

    Raises:
        TimeoutError: it took longer. The thread does not keep the process alive.
        BaseException: raised by `function`.
    """
    answer = Worker("grpo-deadline").run(function)
    if not wait([answer], timeout_s).done:
        raise TimeoutError(f"no answer within {timeout_s:.0f} s")
    return answer.result()
