"""Tool calls in the main thread, while it waits for a rank's episodes."""

import queue
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from grpo.faults.deadlines import interrupted_after
from grpo.faults.failure import JobFailed
from grpo.faults.users_code import exits_as_errors


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Call:
    run: Callable[[], Any]
    timeout_s: float
    future: "Future[Any]"


class MainThread:
    """Takes calls from any thread, and runs them one at a time in `serve`."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self.busy_s = 0.0
        """Seconds in calls, since `begin`."""

    def begin(self) -> None:
        """Begin a new batch; drops calls left from the last one."""
        self._calls, self.busy_s = queue.SimpleQueue(), 0.0

    def run(self, call: Callable[[], Any], *, timeout_s: float) -> "Future[Any]":
        """Queue a call; its future raises `DeadlinePassed` if it runs longer than `timeout_s`."""
        future: Future[Any] = Future()
        self._calls.put(_Call(run=call, timeout_s=timeout_s, future=future))
        return future

    def wake(self) -> None:
        """Make `serve` return, if it waits for a call."""
        self._calls.put(None)

    def serve(self, wait_s: float, *, left_s: float, check: Callable[[], None]) -> None:
        """Run a call, if one comes within `wait_s`. In the main thread.

        Args:
            left_s: upper limit on the call's time, besides its own.
            check: called after it, before its result counts: raises errors that end the batch and that the call may
                have caught.

        Raises:
            JobFailed, KeyboardInterrupt: raised in the call, but not about it.
        """
        try:
            call = self._calls.get(timeout=wait_s)
        except queue.Empty:
            return
        if call is None or not call.future.set_running_or_notify_cancel():
            return
        result, error, begun = None, None, time.monotonic()
        try:
            with interrupted_after(min(call.timeout_s, left_s)), exits_as_errors(in_main_thread=True):
                result = call.run()
        except (JobFailed, KeyboardInterrupt):
            raise
        except BaseException as raised:  # noqa: BLE001  raised by the waiting caller
            # asyncio futures refuse StopIteration.
            error = RuntimeError(f"StopIteration: {raised}") if isinstance(raised, StopIteration) else raised
        finally:
            self.busy_s += time.monotonic() - begun
        check()
        if error is None:
            call.future.set_result(result)
        else:
            call.future.set_exception(error)
