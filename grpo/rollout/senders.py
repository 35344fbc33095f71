"""Sender threads for messages to engines; the pool decides under its lock, but a socket may block."""

import queue
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

from grpo.engine.like import EngineLike
from grpo.engine.messages import Sample

_Outbox = queue.SimpleQueue[Sample | tuple[int, ...] | None]
"""Messages to an engine: completions to sample, completions to drop; None ends its thread."""


class Senders:
    """One thread for each engine, sending its messages in order.

    Args:
        noting_errors: context manager around the work of a thread.
    """

    def __init__(self, num_engines: int, noting_errors: Callable[[], AbstractContextManager[None]]) -> None:
        self._noting_errors = noting_errors
        self._outboxes: list[_Outbox] = [queue.SimpleQueue() for _ in range(num_engines)]
        self._threads: list[threading.Thread] = []

    def start(self, engine: int, client: EngineLike) -> None:
        """Send queued and later messages of engine `engine` to this client."""
        thread = threading.Thread(
            target=self._send, args=[client, self._outboxes[engine]], name=f"grpo-{client.name}-sender", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def put(self, engine: int, message: Sample | tuple[int, ...]) -> None:
        """Queue completions to sample, or the ids of completions to drop. Never waits."""
        self._outboxes[engine].put(message)

    def stop(self, engine: int) -> None:
        """End the thread of a lost engine. Later messages are kept for its successor."""
        self._outboxes[engine].put(None)
        self._outboxes[engine] = queue.SimpleQueue()

    def end(self) -> None:
        """End all threads. Never waits."""
        for outbox in self._outboxes:
            outbox.put(None)

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    def _send(self, client: EngineLike, outbox: _Outbox) -> None:
        with self._noting_errors():
            while (message := outbox.get()) is not None:
                if isinstance(message, tuple):
                    client.abort(message)
                else:
                    client.submit(message)
