"""A rank's connection to its node's broker: sends turns, receives answers in any order."""

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from grpo.rollout.turns.messages import Answer, Ask, Cancel, Message, OutOfEngines, Pipe


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Open:
    future: "Future[Answer]"
    name: str
    since: float
    """Start of the wait, by time.monotonic()."""


class TurnChannel:
    """Requests turns, from any thread."""

    def __init__(self, pipe: Pipe) -> None:
        self.trouble: str | None = None
        """Reason to fail the step instead of waiting for new engines."""
        self._deliveries = 0
        self._stalled_after: int | None = None  # value of _deliveries when the last engine died
        self._pipe = pipe
        self._open: dict[int, _Open] = {}
        self._numbers = itertools.count()
        self._asked_again_at = 0.0
        self._lock, self._send_lock = threading.Lock(), threading.Lock()
        self.is_gone = False
        """True if the local main is gone."""
        threading.Thread(target=self._receive, name="grpo-turns-receiver", daemon=True).start()

    @classmethod
    def to(cls, address: str) -> "TurnChannel":
        """Connect a rank other than the local main.

        Raises:
            OSError: the local main does not listen there.
        """
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(address)
        return cls(Pipe(connection))

    def ask(
        self, token_ids: np.ndarray, *, place: int, order: int, seed: int, name: str, overrides: Mapping[str, Any]
    ) -> "Future[Answer]":
        """Request a turn; cancel the future to drop it.

        Args:
            token_ids: [L] int32.
            place, order: see `Ask`.
            name: for messages.
        """
        opened = _Open(future=Future(), name=name, since=time.monotonic())
        with self._lock:
            number = next(self._numbers)
            self._open[number] = opened
            is_gone = self.is_gone
        ask = Ask(
            number=number,
            place=place,
            order=order,
            name=name,
            token_ids=token_ids,
            seed=seed,
            overrides=overrides,
        )
        try:
            if is_gone:
                raise ConnectionError("the node's local main is gone")
            with self._send_lock:
                self._pipe.send(ask)
        except Exception as error:  # noqa: BLE001  raised by the future
            with self._lock:
                self._open.pop(number, None)
            opened.future.set_exception(error)
        opened.future.add_done_callback(lambda future: self._cancel(number) if future.cancelled() else None)
        return opened.future

    def _cancel(self, number: int) -> None:
        with self._lock:
            is_open = self._open.pop(number, None) is not None
        if is_open:
            self._say(Cancel(number))

    def _say(self, message: Message) -> None:
        with contextlib.suppress(OSError), self._send_lock:  # the next turn reports that the local main is gone
            self._pipe.send(message)

    @property
    def is_stalled(self) -> bool:
        """True if the node has lost its last engine since the last weight sync."""
        return self.trouble is not None or self._stalled_after == self._deliveries

    def delivered(self) -> None:
        """Record a weight sync: all engines of the job have weights, and work on pending turns. Called equally often on
        every rank."""
        with self._lock:
            self._deliveries += 1
            self._asked_again_at = time.monotonic()

    def slowest(self, asked: "Collection[Future[Answer]]", since: float) -> tuple[float, str] | None:
        """Return the longest wait among these turns, and its name.

        Args:
            since: time.monotonic(); earlier waits do not count.
        """
        with self._lock:
            mine = [each for each in self._open.values() if each.future in asked]
            first = min(mine, key=lambda each: each.since, default=None)
            if first is None:
                return None
            return time.monotonic() - max(first.since, self._asked_again_at, since), first.name

    def close(self) -> None:
        self._pipe.close()

    def _receive(self) -> None:
        try:
            while True:
                match message := self._pipe.receive():
                    case Answer():
                        with self._lock:
                            opened = self._open.pop(message.number, None)
                        if opened is not None and opened.future.set_running_or_notify_cancel():
                            opened.future.set_result(message)
                    case OutOfEngines():
                        with self._lock:
                            self._stalled_after = message.deliveries
                            self.trouble = self.trouble or message.trouble
        except (EOFError, OSError, ValueError) as error:
            with self._lock:
                self.is_gone = True
                left, self._open = self._open, {}
            for each in left.values():
                if each.future.set_running_or_notify_cancel():
                    each.future.set_exception(ConnectionError(f"the node's local main is gone: {error}"))
