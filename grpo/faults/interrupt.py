"""From another thread into a main thread that is busy: at a deadline, or with the job's failure."""

import contextlib
import ctypes
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partialmethod
from types import FrameType

from grpo.faults.failure import FailureRecord, JobFailed

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


def raise_in_main_thread(record: FailureRecord) -> None:
    """Raise `JobFailed` where the main thread is; it arrives when that thread runs Python code again."""
    # The interpreter makes the instance, without arguments.
    members = {"__init__": partialmethod(JobFailed.__init__, record), "__module__": JobFailed.__module__}
    elsewhere = type("JobFailed", (JobFailed,), members)
    main_id = ctypes.c_ulong(threading.main_thread().ident or 0)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(main_id, ctypes.py_object(elsewhere))
    for strike in [*_calls]:
        strike.set()
