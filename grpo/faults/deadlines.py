"""Deadlines for what has none of its own: waits in libraries, code of others, a main thread that is busy.

By what has to run for them: another thread of Python, a signal to the main thread, or none of this process.
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

REMINDER_S = 60.0  # of a wait, between two lines about it
AGAIN_S = 5.0  # after which code that has caught `DeadlinePassed` and goes on gets it once more
_calls: set[threading.Event] = set()
"""Of the calls in `interrupted_after`: set, the main thread is woken from a system call."""


class DeadlinePassed(BaseException):
    """A call takes longer than it may. No `except Exception` around it catches this."""


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


@contextlib.contextmanager
def every_minute(act: Callable[[float], None]) -> Iterator[None]:
    """Around a long wait in a library: call `act` with the seconds so far, from another thread, once a minute."""
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
    """Around a call of the user's code in the main thread, which a signal interrupts, in a system call too; so does the
    job's failure. In another thread it may take as long as it likes.

    The signal is SIGUSR2: SIGALRM is left to the code inside. An alarm that this has set does not outlive it.

    Raises:
        DeadlinePassed: inside, wherever the main thread is; and outside, where the code has caught that.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    deadline, had_alarm = time.monotonic() + timeout_s, signal.getitimer(signal.ITIMER_REAL)[0] > 0
    is_inside, has_passed, strike = True, False, threading.Event()

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal has_passed
        if is_inside and time.monotonic() >= deadline:  # else the job's failure, which follows by itself
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
        watcher.join()  # a signal that is under way arrives before the handler goes
        signal.signal(signal.SIGUSR2, before)
        if has_passed and not had_alarm:
            signal.setitimer(signal.ITIMER_REAL, 0)
    if has_passed:
        raise DeadlinePassed


@contextlib.contextmanager
def ending_process(timeout_s: float) -> Iterator[None]:
    """The process shows its stacks on stderr and ends with exit code 1 if the inside takes longer: the last resort
    where nobody else can end it."""
    faulthandler.dump_traceback_later(timeout_s, file=2, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def raise_in_main_thread(record: FailureRecord) -> None:
    """Raise `JobFailed` where the main thread is; it arrives when that thread runs Python code again."""
    # The interpreter makes the instance, without arguments.
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
    """time.monotonic()"""
    thread: int
    """`threading.get_ident()`: its stack is shown first."""


class CallLimits:
    """Calls under way in this process, in any threads. The earliest deadline that passes is the job's failure, with
    the stacks of this process.

    The sentinel keeps it, as Python code may not run here. One process alone ends `alone_grace_s` later with its
    stacks on stderr.

    Args:
        link: to the node's sentinel; None for one process alone.
        fail: makes a cause the job's failure, in a phase.
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
        """Around a call that ends within `timeout_s`, or `cause` is why the job fails in `phase`."""
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
        """See to the call that has to end first."""
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
        self._end(call)  # Python code runs: nothing has to end this process
        self._fail(f"{call.cause}; it was here, the innermost call first:\n{self._stacks.now(call.thread)}", call.phase)


T = TypeVar("T")


def within(timeout_s: float, function: Callable[[], T]) -> T:
    """`function()`, in a thread that is left to itself when it takes longer.

    Raises:
        TimeoutError: it took longer. The thread is a daemon: it does not keep the process.
        BaseException: whatever `function` raised.
    """
    answer = Worker("grpo-deadline").run(function)
    if not wait([answer], timeout_s).done:
        raise TimeoutError(f"no answer within {timeout_s:.0f} s")
    return answer.result()
