"""Sends filled buckets to the engines from threads of its own, while the main thread gathers the next one."""

import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch
from vllm.distributed.weight_transfer.base import VLLMWeightSyncClient

from grpo.engine.client import EngineError
from grpo.weights.buckets import NUM_BUFFERS, Bucket


class Transport(Protocol):
    """Packed buffers, and how their content reaches the engines. For the main thread, but for `abort`."""

    in_flight: int
    """How many updates the engines may be told of before they have answered the first."""

    def open(self, engines: VLLMWeightSyncClient, on_refusal: Callable[[EngineError], None]) -> None:
        """Meet the engines; once. `on_refusal` is told, from any thread, of one that refuses."""

    def places(self, index: int, bucket: Bucket) -> list[torch.Tensor]:
        """Where the parameters of a bucket stand in buffer `index`."""

    def update_info(self, index: int, bucket: Bucket) -> dict[str, Any]:
        """What the engines are told of a filled buffer."""

    def start_sending(self, index: int, bucket: Bucket) -> None:
        """What is left to do on this side once the engines were told. May wait for them the first time."""

    def abort(self) -> None:
        """End what is in flight, from any thread."""

    def close(self) -> None: ...


class Sender:
    """One push of a local main. Its threads make socket calls alone; each has a deadline, and so all waits here end.

    After an engine's error nothing more is sent, and `free_buffer` says None.

    Args:
        held: checkpoint names that this push leaves out, because the engines have them.
        timeout_s: deadline of one call to the engines.
    """

    def __init__(
        self, transport: Transport, engines: VLLMWeightSyncClient, *, held: Sequence[str], timeout_s: float
    ) -> None:
        self._transport = transport
        self._engines = engines
        self._held = list(held)
        self._timeout_s = timeout_s
        self._error: EngineError | None = None
        self._failed_call = sys.maxsize
        self._lock = threading.Lock()
        self._calls, self._busy_since, self._busy_s = 0, 0.0, 0.0
        self._sent: list[Future[None]] = []
        self._threads = ThreadPoolExecutor(max_workers=transport.in_flight, thread_name_prefix="grpo-push")
        self._started = self._threads.submit(self._call, 0, engines.start_weight_update)

    @property
    def busy_s(self) -> float:
        """Seconds in which at least one call to the engines was under way; after `finish`."""
        return self._busy_s

    def free_buffer(self) -> int | None:
        """The next buffer to fill, once the engines are done with what it held; None after an error."""
        if len(self._sent) >= NUM_BUFFERS:
            self._wait(self._sent[-NUM_BUFFERS])
        return len(self._sent) % NUM_BUFFERS if self._error is None else None

    def places(self, buffer: int, bucket: Bucket) -> list[torch.Tensor]:
        return self._transport.places(buffer, bucket)

    def send(self, buffer: int, bucket: Bucket) -> None:
        """Send a filled buffer, the one of the last `free_buffer`."""
        info = self._transport.update_info(buffer, bucket) | {"held": self._held if not self._sent else []}
        self._sent.append(self._threads.submit(self._update, 1 + len(self._sent), info))
        if self._error is None:
            self._transport.start_sending(buffer, bucket)

    def finish(self, complete: Callable[[], None]) -> EngineError | None:
        """Wait for all that was sent, then for `complete`, the last calls. Returns what went wrong in an engine."""
        for call in (self._started, *self._sent):
            self._wait(call)
        self._wait(self._threads.submit(self._call, 1 + len(self._sent), complete))
        self._threads.shutdown()
        return self._error

    def abandon(self, why: BaseException) -> None:
        """Send nothing more and wait for nothing. The engines' update stays open: they are of no use any more."""
        self._error = self._error or EngineError(f"the push was given up: {type(why).__name__}: {why}")
        self._transport.abort()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _update(self, number: int, info: dict[str, Any]) -> None:
        self._wait(self._started)
        self._call(number, self._engines.update_weights, info)

    def _call(self, number: int, call: Callable[..., None], *args: Any) -> None:
        if self._error is not None:
            return
        with self._lock:
            self._calls += 1
            if self._calls == 1:
                self._busy_since = time.perf_counter()
        try:
            call(*args)
        except EngineError as error:
            with self._lock:
                if number < self._failed_call:  # what fails after it fails because of it
                    self._failed_call, self._error = number, error
        finally:
            with self._lock:
                self._calls -= 1
                if self._calls == 0:
                    self._busy_s += time.perf_counter() - self._busy_since

    def _wait(self, call: Future[None]) -> None:
        call.result((NUM_BUFFERS + 3) * self._timeout_s)  # it, and what may stand before it, end within their deadlines
