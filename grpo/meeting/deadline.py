"""A deadline for what has none of its own: a file system that hangs, a driver, a store whose host went dark."""

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def within(timeout_s: float, function: Callable[[], T]) -> T:
    """`function()`, in a thread that is left to itself when it takes longer.

    Raises:
        TimeoutError: it took longer. The thread is a daemon: it does not keep the process.
        BaseException: whatever `function` raised.
    """
    answers: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def call() -> None:
        try:
            answers.put((function(), None))
        except BaseException as error:  # noqa: BLE001  the edge of a thread: raised again in the caller's
            answers.put((None, error))

    threading.Thread(target=call, daemon=True).start()
    try:
        value, error = answers.get(timeout=timeout_s)
    except queue.Empty:
        raise TimeoutError(f"no answer within {timeout_s:.0f} s") from None
    if error is not None:
        raise error
    return value  # type: ignore[return-value]
