"""The main thread as what runs a rank's tools, while it waits for their episodes."""

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
    """Takes calls from any thread, and runs them one at a time where `serve` is called."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self.busy_s = 0.0
        """In calls, since `begin`."""

    def begin(self) -> None:
        """A new batch: calls that are left of the one before are forgotten."""
        self._calls, self.busy_s = queue.SimpleQueue(), 0.0

    def run(self, call: Callable[[], Any], *, timeout_s: float) -> "Future[Any]":
        """What it brings; `DeadlinePassed` where it takes longer than `timeout_s`, counted from its beginning."""
        future: Future[Any] = Future()
        self._calls.put(_Call(run=call, timeout_s=timeout_s, future=future))
        return future

    def wake(self) -> None:
        """Have `serve` return, if it waits for a call."""
        self._calls.put(None)

    def serve(self, wait_s: float, *, left_s: float, check: Callable[[], None]) -> None:
        """Run a call, if one comes within `wait_s`. In the main thread.

        Args:
            left_s: all that a call may take, whatever its own limit.
            check: called behind it, before what it brings counts: raises what ends the batch, and the call may have
                caught.

        Raises:
            JobFailed, KeyboardInterrupt: in the call, which they do not concern.
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
        except BaseException as raised:  # noqa: BLE001  the caller that waits for it raises it
            # No future of asyncio's takes the first.
            error = RuntimeError(f"StopIteration: {raised}") if isinstance(raised, StopIteration) else raised
        finally:
            self.busy_s += time.monotonic() - begun
        check()
        if error is None:
            call.future.set_result(result)
        else:
            call.future.set_exception(error)
