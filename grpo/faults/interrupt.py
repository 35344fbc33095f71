"""From another thread into a main thread that is busy: at a deadline, or with the job's failure."""

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from functools import partialmethod

from grpo.faults.failure import FailureRecord, JobFailed


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


def raise_in_main_thread(record: FailureRecord) -> None:
    """Raise `JobFailed` where the main thread is; it arrives when that thread runs Python code again."""
    # The interpreter makes the instance, without arguments.
    members = {"__init__": partialmethod(JobFailed.__init__, record), "__module__": JobFailed.__module__}
    elsewhere = type("JobFailed", (JobFailed,), members)
    main_id = ctypes.c_ulong(threading.main_thread().ident or 0)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(main_id, ctypes.py_object(elsewhere))
