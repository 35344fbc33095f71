"""A deadline for what has none of its own: a file system that hangs, a driver, a store whose host went dark."""

from collections.abc import Callable
from concurrent.futures import wait
from typing import TypeVar

from grpo.faults.worker import Worker

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
