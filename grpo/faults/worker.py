"""A thread for calls that may hang, the user's say: no pool's, as the interpreter waits at its end for those."""

import contextlib
import contextvars
import queue
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")
_Calls = queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]


@contextlib.contextmanager
def exits_as_errors(told: str = "", *, in_main_thread: bool = False) -> Iterator[None]:
    """Around code of the user's: an `exit()` in it would end an event loop, or a rank, and nobody would hear of it.

    Args:
        told: what the error begins with; of another error than an exit a note.
        in_main_thread: where an interrupt is Ctrl-C, and stays one.
    """
    exits = SystemExit if in_main_thread else (SystemExit, KeyboardInterrupt)
    try:
        yield
    except exits as error:
        raise RuntimeError(f"{told}{type(error).__name__}: {error}") from error
    except Exception as error:
        if told:
            error.add_note(f"{told}{type(error).__name__}")
        raise


async def surviving(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """What the user's coroutine returns; see `exits_as_errors`."""
    with exits_as_errors():
        return await coroutine


class Worker:
    """Runs calls one after the other, in a thread of its own, which ends with this object and what it was given.

    Args:
        prepare: called first in the thread.
    """

    def __init__(self, name: str, prepare: Callable[[], None] = lambda: None) -> None:
        self._calls: _Calls = queue.SimpleQueue()
        thread = threading.Thread(target=_work, args=[self._calls, prepare], name=name, daemon=True)
        thread.start()
        self.thread_id = thread.ident
        weakref.finalize(self, self._calls.put, None)

    def run(self, call: Callable[[], Result]) -> "Future[Result]":
        """What it brings; in the caller's context variables."""
        future: Future[Result] = Future()
        context = contextvars.copy_context()
        self._calls.put((lambda: context.run(call), future))
        return future


def _work(calls: _Calls, prepare: Callable[[], None]) -> None:
    trouble: BaseException | None = None
    try:
        prepare()
    except BaseException as error:  # noqa: BLE001  thread boundary: every call brings it
        trouble = error
    while (given := calls.get()) is not None:
        call, future = given
        if future.set_running_or_notify_cancel():
            try:
                if trouble is not None:
                    raise trouble
                future.set_result(call())
            except StopIteration as error:  # which no future of asyncio's takes
                future.set_exception(RuntimeError(f"StopIteration: {error}"))
            except BaseException as error:  # noqa: BLE001  thread boundary: whoever waits for it raises it
                future.set_exception(error)
        del given, call, future  # while this thread waits it holds nothing of anybody's
