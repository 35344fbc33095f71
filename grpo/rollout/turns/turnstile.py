"""The order in which rows call tools that run in the main thread: TRL's."""

import asyncio
import contextlib
from collections.abc import AsyncIterator


class Turnstile:
    """Lets the rows of a batch through one at a time, once for each of their messages that calls tools.

    TRL's loop (1.16) runs all rows' calls, in row order, between two turns of all. So a row waits until each row before
    it has called as often as it is about to, and each one behind it once less, or has ended: where rows 0, 1 and 2 have
    two messages with calls, none and one, the order is 0, 2, 0.

    In one event loop.
    """

    def __init__(self, num_rows: int) -> None:
        self._passed = dict.fromkeys(range(num_rows), 0)
        self._waiting: dict[int, asyncio.Event] = {}

    @contextlib.asynccontextmanager
    async def turn(self, row: int, *, waits: bool) -> AsyncIterator[None]:
        """A message of this row's.

        Args:
            waits: False: none of its calls runs in the main thread, so that the order of others does not concern it.
        """
        try:
            if waits and self._first() != row:
                self._waiting[row] = asyncio.Event()
                await self._waiting[row].wait()
            yield
        finally:
            self._waiting.pop(row, None)
            if row in self._passed:
                self._passed[row] += 1
            self._open()

    def leave(self, row: int) -> None:
        """The row calls no more tools."""
        self._passed.pop(row, None)
        self._open()

    def _first(self) -> int | None:
        return min(self._passed, key=lambda row: (self._passed[row], row), default=None)

    def _open(self) -> None:
        if (first := self._first()) in self._waiting:
            self._waiting[first].set()
