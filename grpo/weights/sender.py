"""Sends filled buckets to the engines from a thread of its own, while the main thread gathers the next one."""

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

    def open(self, engines: VLLMWeightSyncClient) -> None:
        """Meet the engines; once."""

    def places(self, index: int, bucket: Bucket) -> list[torch.Tensor]:
        """Where the parameters of a bucket stand in buffer `index`."""

    def update_info(self, index: int, bucket: Bucket) -> dict[str, Any]:
        """What the engines are told of a filled buffer."""

    def start_sending(self, index: int, bucket: Bucket) -> None:
        """What is left to do on this side once the engines were told; does not wait for them."""

    def abort(self) -> None:
        """End what is in flight, from any thread."""

    def close(self) -> None: ...


class Sender:
    """One push of a local main. Its thread makes socket calls alone; each has a deadline, and so all waits here end.

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
        self._sent: list[Future[None]] = []
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grpo-push")
        self.busy_s = 0.0
        self._started = self._submit(engines.start_weight_update)

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
        self._sent.append(self._submit(self._engines.update_weights, info))
        if self._error is None:
            self._transport.start_sending(buffer, bucket)

    def finish(self, complete: Callable[[], None]) -> EngineError | None:
        """Wait for all that was sent, then for `complete`, the last calls. Returns what went wrong in an engine."""
        for call in (self._started, *self._sent, self._submit(complete)):
            self._wait(call)
        self._thread.shutdown()
        return self._error

    def _submit(self, call: Callable[..., None], *args: Any) -> Future[None]:
        return self._thread.submit(self._run, call, *args)

    def _run(self, call: Callable[..., None], *args: Any) -> None:
        if self._error is not None:
            return
        begun = time.perf_counter()
        try:
            call(*args)
        except EngineError as error:
            self._error = error
        finally:
            self.busy_s += time.perf_counter() - begun

    def _wait(self, call: Future[None]) -> None:
        call.result((NUM_BUFFERS + 3) * self._timeout_s)  # it, and what may stand before it, end within their deadlines
