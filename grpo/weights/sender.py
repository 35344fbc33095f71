"""Sends filled buckets: threads announce each to the engines, and the transport moves its bytes where it has to."""

import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, Protocol

import torch

from grpo.engine.client import EngineError
from grpo.faults.interrupt import on_expiry
from grpo.weights.buckets import NUM_BUFFERS, Bucket

if TYPE_CHECKING:
    from vllm.distributed.weight_transfer.base import VLLMWeightSyncClient

ANSWER_PATIENCE_S = 5.0  # how long a broken transport waits for an engine's word, which is nearer to the cause
STUCK_S = 30.0  # beyond an engine's deadline, which ends the transport's operations: what still waits then is stuck


class Transport(Protocol):
    """Packed buffers, and how their content reaches the engines. For the main thread, but for `abort`.

    Made with `buffer_bytes`, room for any bucket, and `num_workers`, of all engines of the node.
    """

    in_flight: int
    """How many updates the engines may be told of before they have answered the first."""
    device: str
    """The kind of device on which its buffers are."""

    def open(self, engines: "VLLMWeightSyncClient", on_refusal: Callable[[EngineError], None]) -> None:
        """Meet the engines; once. `on_refusal` is told, from any thread, of one that refuses."""

    def begin(self) -> None:
        """Before a push. Raises EngineError after an `abort`."""

    def places(self, index: int, bucket: Bucket) -> list[torch.Tensor]:
        """Where the parameters of a bucket stand in buffer `index`."""

    def update_info(self, index: int, bucket: Bucket) -> dict[str, Any]:
        """What the engines are told of a filled buffer."""

    def start_sending(self, index: int, bucket: Bucket) -> None:
        """Move the bytes of buffer `index`, which is announced to the engines; a no-op in shared memory.

        May wait for them the first time.

        Raises EngineError when it fails, unless `abort` was the reason."""

    def end(self) -> None:
        """After a push, however it went: what only a push needs is given back."""

    def abort(self) -> None:
        """End what is in flight, from any thread."""

    def close(self) -> None: ...


class Sender:
    """One push of a local main. Its threads make socket calls alone; each has a deadline, and so all waits here end.

    After an error of an engine or of the transport nothing more is sent, and `places` says None.

    Args:
        held: checkpoint names that this push leaves out, because the engines have them.
        sums_bits: whether the engines sum what arrives.
        timeout_s: deadline of one call to the engines.
        on_stuck: told, from another thread, that the transport holds the main thread for good.
        pause: called before the first call to the engines, from another thread; those come as late as they can then,
            which is when the first bucket is filled.
    """

    def __init__(
        self,
        transport: Transport,
        engines: "VLLMWeightSyncClient",
        *,
        held: Sequence[str],
        sums_bits: bool,
        timeout_s: float,
        on_stuck: Callable[[EngineError], None] = lambda error: None,
        pause: Callable[[], None] | None = None,
    ) -> None:
        self._transport = transport
        self._engines = engines
        self._held = list(held)
        self._sums_bits = sums_bits
        self._timeout_s = timeout_s
        self._on_stuck = on_stuck
        self._pause = pause
        self._error: EngineError | None = None
        self._failed_call: float = sys.maxsize
        self._is_broken = False
        self._lock = threading.Lock()
        self._calls, self._busy_since = 0, 0.0
        self.busy_s = 0.0
        """Seconds in which at least one call to the engines was under way; after `finish`."""
        self._sent: list[Future[None]] = []
        self._threads = ThreadPoolExecutor(max_workers=transport.in_flight, thread_name_prefix="grpo-push")
        try:
            transport.begin()
        except EngineError as error:
            self._break(-1, error)
        self._started: Future[None] | None = None
        if pause is None:
            self._start()

    def _start(self) -> Future[None]:
        if self._started is None:
            self._started = self._threads.submit(self._call, 0, self._begin_update)
        return self._started

    def _begin_update(self) -> None:
        if self._pause is not None:
            self._pause()
        self._engines.start_weight_update()

    def places(self, bucket: Bucket) -> list[torch.Tensor] | None:
        """Where the next bucket is to be put, once the engines are done with what stood there; None after an error."""
        if len(self._sent) >= NUM_BUFFERS:
            self._wait(self._sent[-NUM_BUFFERS])
        return self._transport.places(len(self._sent) % NUM_BUFFERS, bucket) if self._error is None else None

    def send(self, bucket: Bucket) -> None:
        """Send the bucket that stands in its `places`."""
        buffer = len(self._sent) % NUM_BUFFERS
        first_alone = {"held": self._held if not self._sent else []}
        info = self._transport.update_info(buffer, bucket) | first_alone | {"sums_bits": self._sums_bits}
        started = self._start()
        self._sent.append(self._threads.submit(self._update, started, 1 + len(self._sent), info))
        if self._error is None:
            try:
                # A library may hold the main thread here, and nothing in Python can end that.
                with on_expiry(self._timeout_s + STUCK_S, self._tell_stuck):
                    self._transport.start_sending(buffer, bucket)
            except EngineError as error:
                self._break(len(self._sent) + 0.5, error)  # the update's own error comes before it

    def finish(self, complete: Callable[[], None]) -> EngineError | None:
        """Wait for all that was sent, then for `complete`, the last calls. Returns what went wrong."""
        calls = [self._start(), *self._sent]
        if self._is_broken:  # the engines may wait for what never comes, until their deadline
            wait(calls, ANSWER_PATIENCE_S)
        else:
            for call in calls:
                self._wait(call)
            self._wait(self._threads.submit(self._call, 1 + len(self._sent), complete))
        self._threads.shutdown(wait=not self._is_broken, cancel_futures=True)
        return self._error

    def abandon(self, why: BaseException) -> None:
        """Send nothing more and wait for nothing. The engines' update stays open: they are of no use any more."""
        self._note(-1, EngineError(f"the push was given up: {type(why).__name__}: {why}"))
        self._transport.abort()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _update(self, started: Future[None], number: int, info: dict[str, Any]) -> None:
        self._wait(started)
        self._call(number, self._engines.update_weights, info)

    def _call(self, number: int, call: Callable[..., None], *args: Any) -> None:
        if number > self._failed_call:
            return
        with self._lock:
            self._calls += 1
            if self._calls == 1:
                self._busy_since = time.perf_counter()
        try:
            call(*args)
        except EngineError as error:
            self._note(number, error)
        finally:
            with self._lock:
                self._calls -= 1
                if self._calls == 0:
                    self.busy_s += time.perf_counter() - self._busy_since

    def _note(self, number: float, error: EngineError) -> None:
        with self._lock:
            if number < self._failed_call:  # what fails after it fails because of it
                self._failed_call, self._error = number, error

    def _break(self, number: float, error: EngineError) -> None:
        """The transport has failed: nothing can be sent any more."""
        self._note(number, error)
        self._is_broken = True
        self._transport.abort()

    def _tell_stuck(self) -> None:
        waited_s = self._timeout_s + STUCK_S
        self._on_stuck(EngineError(f"bucket {len(self._sent)} is stuck on its way to the engines: {waited_s:.0f} s"))

    def _wait(self, call: Future[None]) -> None:
        call.result((NUM_BUFFERS + 3) * self._timeout_s)  # it, and what may stand before it, end within their deadlines
