"""Sends filled buckets: one call announces all of them to the engines, and the transport reports each one as taken."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from grpo.engine.client import EngineError
from grpo.faults.deadlines import on_expiry
from grpo.place.timeouts import USUAL, Timeouts
from grpo.weights.buckets import NUM_BUFFERS, Bucket, described

if TYPE_CHECKING:
    from grpo.weights.node_engines import NodeEngines

ANSWER_PATIENCE_S = 5.0  # time a broken transport waits for an engine's answer, which is nearer to the cause
POLL_S = 0.2


class Transport(Protocol):
    """Packed buffers, and their way to the engines. For the main thread, except `abort`.

    Made with `buffer_bytes`, capacity for any bucket, and `num_workers`, of all engines of the node. Bucket `number` of
    a weight sync, from 0, is in buffer `number % NUM_BUFFERS`.
    """

    device: str
    """Device type of its buffers."""

    def open(self, engines: "NodeEngines", on_refusal: Callable[[EngineError], None]) -> None:
        """Connect to the engines; once. `on_refusal` is called, from any thread, for a refusing one."""

    def begin(self) -> None:
        """Begin a weight sync. Raises EngineError after an `abort`."""

    def places(self, number: int, bucket: Bucket) -> list[torch.Tensor]:
        """Return the places of this bucket's parameters in its buffer."""

    def start_sending(self, number: int, bucket: Bucket) -> None:
        """Start sending this filled bucket.

        May wait for the engines the first time. Raises EngineError on failure, unless `abort` was the reason.
        """

    def is_taken(self, number: int, wait_s: float) -> bool:
        """Wait until the buffer of this sent bucket may be filled again, at most `wait_s`; return False on timeout."""

    def end(self) -> None:
        """End a weight sync, successful or not: release resources used only during one."""

    def abort(self) -> None:
        """Abort transfers in progress, from any thread: the engines give up the weight sync."""

    def close(self) -> None: ...


@dataclass(eq=False)
class Sender:
    """One weight sync of a local main. Its thread only makes socket calls; each has a deadline, so all waits here end.

    After an error of an engine or of the transport nothing more is sent, and `places` returns None.
    """

    transport: Transport
    engines: "NodeEngines"
    buckets: Sequence[Bucket]
    """Buckets to send, in order."""
    _: KW_ONLY
    held: Sequence[str]
    """Checkpoint names left out of this weight sync, because the engines hold them."""
    sums_bits: bool
    """The engines checksum received tensors."""
    timeout_s: float
    """Deadline of each bucket, and of every call to the engines except that of all buckets."""
    on_stuck: Callable[[EngineError], None] = lambda error: None
    """Called from another thread if the transport blocks the main thread for good."""
    pause: Callable[[], None] | None = None
    """Called before the first call to the engines, from another thread. With it, that call comes as late as possible:
    when the first bucket is filled."""
    timeouts: Timeouts = USUAL

    def __post_init__(self) -> None:
        self._held = [*self.held]
        self._error: EngineError | None = None
        self._distance = 3  # of the error from its cause, see `_note`
        self._is_broken = False
        self._lock = threading.Lock()
        self._num_sent, self._first_sent = 0, 0.0
        self.send_s = 0.0
        """Seconds from the first bucket sent until the engines have loaded all; set by `finish`."""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grpo-sync")
        try:
            self.transport.begin()
        except EngineError as error:
            self._break(0, error)
        self._updated: Future[None] | None = None
        if self.pause is None:
            self._start()

    def _start(self) -> Future[None]:
        if self._updated is None:
            self._updated = self._thread.submit(self._call, self._update)
        return self._updated

    def _update(self) -> None:
        if self.pause is not None:
            self.pause()
        self.engines.start_weight_update()
        if self.buckets:
            timeout_s = (3 + len(self.buckets)) * self.timeout_s  # each bucket has its own deadline, see `_wait`
            info = described([meta for bucket in self.buckets for meta in bucket.metas])
            info["sizes"] = [len(bucket.metas) for bucket in self.buckets]
            more = {"held": self._held, "sums_bits": self.sums_bits, "timeout_s": timeout_s}
            self.engines.update_weights(info | more, timeout_s)

    def places(self, bucket: Bucket) -> list[torch.Tensor] | None:
        """Return the places for the next bucket, once the engines have taken the old content; None after an error."""
        if self._num_sent >= NUM_BUFFERS:
            self._wait_taken(self._num_sent - NUM_BUFFERS)
        return self.transport.places(self._num_sent, bucket) if self._error is None else None

    def send(self, bucket: Bucket) -> None:
        """Send the bucket filled into its `places`."""
        self._start()
        if self._num_sent == 0:
            self._first_sent = time.perf_counter()
        self._num_sent += 1
        if self._error is not None:
            return
        begun, limit_s = time.monotonic(), self._limit_s(self._num_sent - 1)
        try:
            # A library may block the main thread here, and nothing in Python can end that.
            stuck_s = limit_s + self.timeouts.sync_stuck_s
            with on_expiry(limit_s, self.transport.abort), on_expiry(stuck_s, self._report_stuck):
                self.transport.start_sending(self._num_sent - 1, bucket)
        except EngineError as error:
            self._break(2, error)
        if time.monotonic() - begun > limit_s:
            self._give_up(self._taken(self._num_sent - 1), limit_s)

    def finish(self, complete: Callable[[], None]) -> EngineError | None:
        """Wait until all sent buckets are loaded, then run `complete`, the last calls. Returns the error, if any."""
        updated = self._start()
        for number in range(max(0, self._num_sent - NUM_BUFFERS), self._num_sent):
            self._wait_taken(number)
        self._wait(lambda wait_s: bool(wait([updated], wait_s).done), "loaded the last bucket", self.timeout_s)
        if self._is_broken:  # the engines may wait for buckets that never come
            wait([updated], ANSWER_PATIENCE_S)
        else:
            updated.result()  # raises errors that no engine has reported
            self._thread.submit(self._call, complete).result()  # each of its calls has its deadline
        self._thread.shutdown(wait=not self._is_broken, cancel_futures=True)
        if self._num_sent:
            self.send_s = time.perf_counter() - self._first_sent
        return self._error

    def abandon(self, why: BaseException) -> None:
        """Stop sending, without waiting. The engines' update stays open: they are useless from now on."""
        self._note(0, EngineError(f"the weight sync was given up: {type(why).__name__}: {why}"))
        self.transport.abort()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _wait_taken(self, number: int) -> None:
        self._wait(lambda wait_s: self.transport.is_taken(number, wait_s), self._taken(number), self._limit_s(number))

    def _taken(self, number: int) -> str:
        return f"taken bucket {number + 1} of {len(self.buckets)}"

    def _limit_s(self, number: int) -> float:
        """Deadline of a bucket; before the first one come the pause and the start of the update."""
        return self.timeout_s if number else 3 * self.timeout_s

    def _wait(self, is_over: Callable[[float], bool], what: str, limit_s: float) -> None:
        """Wait until it is over, or the engines have answered anything; a missed deadline breaks the weight sync."""
        deadline = time.monotonic() + limit_s
        while not self._is_broken and not self._start().done() and not is_over(POLL_S):
            if time.monotonic() > deadline:
                self._give_up(what, limit_s)

    def _give_up(self, what: str, limit_s: float) -> None:
        self._is_broken = True
        self.transport.abort()
        wait([self._start()], ANSWER_PATIENCE_S)  # an engine that answers now was not the late one
        self._note(0, self.engines.late(f"has not {what} within {limit_s:.0f} s"))

    def _call(self, call: Callable[[], None]) -> None:
        if self._error is not None:
            return
        try:
            call()
        except EngineError as error:
            self._note(1, error)

    def _note(self, distance: int, error: EngineError) -> None:
        """Keep the error nearest to the cause: first a reason to stop here, then an engine's answer, then secondary
        errors."""
        with self._lock:
            if distance < self._distance:
                self._distance, self._error = distance, error

    def _break(self, distance: int, error: EngineError) -> None:
        """Note that the transport has failed: nothing more can be sent."""
        self._note(distance, error)
        self._is_broken = True
        self.transport.abort()

    def _report_stuck(self) -> None:
        waited_s = self._limit_s(self._num_sent - 1) + self.timeouts.sync_stuck_s
        self.on_stuck(EngineError(f"bucket {self._num_sent} is stuck on its way to the engines: {waited_s:.0f} s"))
