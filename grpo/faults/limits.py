"""How long code of others may take that may never return, with the interpreter's lock held or without."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from grpo.faults.interrupt import on_expiry
from grpo.faults.sentinel_link import SentinelLink
from grpo.faults.stacks import Stacks, ending_process

ALONE_GRACE_S = 30.0  # beyond a deadline: a process without a sentinel, whose Python threads do not run either
_AT_ONCE_S = 0.001


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Call:
    phase: str
    cause: str
    deadline_s: float
    """time.monotonic()"""
    thread: int
    """`threading.get_ident()`: its stack is shown first."""


class CallLimits:
    """Calls under way in this process, in any threads. The earliest deadline that passes is the job's failure, with
    the stacks of this process.

    The sentinel keeps it, as Python code may not run here. One process alone ends `ALONE_GRACE_S` later with its
    stacks on stderr.

    Args:
        link: to the node's sentinel; None for one process alone.
        fail: makes a cause the job's failure, in a phase.
    """

    def __init__(self, link: SentinelLink | None, fail: Callable[[str, str], None]) -> None:
        self._link, self._fail = link, fail
        self._stacks = Stacks() if link is None else link.stacks
        self._calls: set[_Call] = set()
        self._lock = threading.Lock()
        self._first: _Call | None = None
        self._armed = contextlib.ExitStack()

    @contextlib.contextmanager
    def around(self, phase: str, timeout_s: float, cause: str) -> Iterator[None]:
        """Around a call that ends within `timeout_s`, or `cause` is why the job fails in `phase`."""
        deadline_s = time.monotonic() + timeout_s
        call = _Call(phase=phase, cause=cause, deadline_s=deadline_s, thread=threading.get_ident())
        with self._lock:
            self._calls.add(call)
            self._arm()
        try:
            yield
        finally:
            self._end(call)

    def _end(self, call: _Call) -> None:
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
            self._armed.enter_context(ending_process(left_s + ALONE_GRACE_S))
            self._armed.enter_context(on_expiry(left_s, lambda: self._expire(first)))

    def _expire(self, call: _Call) -> None:
        self._end(call)  # Python code runs: nothing has to end this process
        self._fail(f"{call.cause}; it was here, the innermost call first:\n{self._stacks.now(call.thread)}", call.phase)
