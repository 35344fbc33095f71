"""Order of main-thread tool calls among rows, as in TRL."""

import asyncio
import contextlib
from collections.abc import AsyncIterator


class Turnstile:
    """Admits the rows of a batch one at a time, once for each message with tool calls.

    TRL's loop (1.16) runs all rows' calls, in row order, between two turns of all. So the k-th call of a row waits for
    the k-th calls of earlier rows and the (k-1)-th calls of later rows; ended rows do not count. Example: rows 0, 1 and
    2 have two, none and one message with calls; the order is 0, 2, 0.

    For one event loop.
    """

    def __init__(self, num_rows: int) -> None:
        self._passed = dict.fromkeys(range(num_rows), 0)
        self._waiting: dict[int, asyncio.Event] = {}

    @contextlib.asynccontextmanager
    async def turn(self, row: int, *, waits: bool) -> AsyncIterator[None]:
        """Admit a message of this row.

        Args:
            waits: False: none of its calls runs in the main thread, so it need not wait for its turn.
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
        """Remove a row without further tool calls."""
        self._passed.pop(row, None)
        self._open()

    def _first(self) -> int | None:
        return min(self._passed, key=lambda row: (self._passed[row], row), default=None)

    def _open(self) -> None:
        if (first := self._first()) in self._waiting:
            self._waiting[first].set()
