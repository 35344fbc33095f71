"""Sends filled buckets: one call tells the engines of all of them, and the transport says when each has been taken."""

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

ANSWER_PATIENCE_S = 5.0  # how long a broken transport waits for an engine's word, which is nearer to the cause
POLL_S = 0.2


class Transport(Protocol):
    """Packed buffers, and how their content reaches the engines. For the main thread, but for `abort`.

    Made with `buffer_bytes`, space for any bucket, and `num_workers`, of all engines of the node. Bucket `number` of a
    weight sync, from 0, stands in buffer `number % NUM_BUFFERS`.
    """

    device: str
    """The kind of device on which its buffers are."""

    def open(self, engines: "NodeEngines", on_refusal: Callable[[EngineError], None]) -> None:
        """Meet the engines; once. `on_refusal` is reported, from any thread, of one that refuses."""

    def begin(self) -> None:
        """Before a weight sync. Raises EngineError after an `abort`."""

    def places(self, number: int, bucket: Bucket) -> list[torch.Tensor]:
        """Where the parameters of this bucket stand in its buffer."""

    def start_sending(self, number: int, bucket: Bucket) -> None:
        """Let the engines have this bucket, which is filled.

        May wait for them the first time.

        Raises EngineError when it fails, unless `abort` was the reason."""

    def is_taken(self, number: int, wait_s: float) -> bool:
        """Whether the buffer of this bucket, which was sent, may be filled again; waits for that, `wait_s` at most."""

    def end(self) -> None:
        """After a weight sync, however it went: what only a weight sync needs is given back."""

    def abort(self) -> None:
        """End what is in flight, from any thread: the engines give the weight sync up."""

    def close(self) -> None: ...


@dataclass(eq=False)
class Sender:
    """One weight sync of a local main. Its thread makes socket calls alone; each has a deadline, and so all waits here
    end.

    After an error of an engine or of the transport nothing more is sent, and `places` says None.
    """

    transport: Transport
    engines: "NodeEngines"
    buckets: Sequence[Bucket]
    """All that will be sent, in order."""
    _: KW_ONLY
    held: Sequence[str]
    """Checkpoint names that this weight sync leaves out, because the engines have them."""
    sums_bits: bool
    """Whether the engines sum what arrives."""
    timeout_s: float
    """Deadline of each bucket on its way, and of every call to the engines but that of all buckets."""
    on_stuck: Callable[[EngineError], None] = lambda error: None
    """Told, from another thread, that the transport holds the main thread for good."""
    pause: Callable[[], None] | None = None
    """Called before the first call to the engines, from another thread; those come as late as they can then, which
    is when the first bucket is filled."""
    timeouts: Timeouts = USUAL

    def __post_init__(self) -> None:
        self._held = [*self.held]
        self._error: EngineError | None = None
        self._distance = 3  # of the error from its cause, see `_note`
        self._is_broken = False
        self._lock = threading.Lock()
        self._num_sent, self._first_sent = 0, 0.0
        self.send_s = 0.0
        """Seconds from the first bucket on its way until the self.engines have taken up all; after `finish`."""
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
            timeout_s = (3 + len(self.buckets)) * self.timeout_s  # each has its own deadline, see `_wait`
            info = described([meta for bucket in self.buckets for meta in bucket.metas])
            info["sizes"] = [len(bucket.metas) for bucket in self.buckets]
            more = {"held": self._held, "sums_bits": self.sums_bits, "timeout_s": timeout_s}
            self.engines.update_weights(info | more, timeout_s)

    def places(self, bucket: Bucket) -> list[torch.Tensor] | None:
        """Where the next bucket is to be put, once the engines are done with what stood there; None after an error."""
        if self._num_sent >= NUM_BUFFERS:
            self._wait_taken(self._num_sent - NUM_BUFFERS)
        return self.transport.places(self._num_sent, bucket) if self._error is None else None

    def send(self, bucket: Bucket) -> None:
        """Send the bucket that stands in its `places`."""
        self._start()
        if self._num_sent == 0:
            self._first_sent = time.perf_counter()
        self._num_sent += 1
        if self._error is not None:
            return
        begun, limit_s = time.monotonic(), self._limit_s(self._num_sent - 1)
        try:
            # A library may hold the main thread here, and nothing in Python can end that.
            stuck_s = limit_s + self.timeouts.sync_stuck_s
            with on_expiry(limit_s, self.transport.abort), on_expiry(stuck_s, self._tell_stuck):
                self.transport.start_sending(self._num_sent - 1, bucket)
        except EngineError as error:
            self._break(2, error)
        if time.monotonic() - begun > limit_s:
            self._give_up(self._taken(self._num_sent - 1), limit_s)

    def finish(self, complete: Callable[[], None]) -> EngineError | None:
        """Wait for all that was sent, then for `complete`, the last calls. Returns what went wrong."""
        updated = self._start()
        for number in range(max(0, self._num_sent - NUM_BUFFERS), self._num_sent):
            self._wait_taken(number)
        self._wait(lambda wait_s: bool(wait([updated], wait_s).done), "loaded the last bucket", self.timeout_s)
        if self._is_broken:  # the engines may wait for what never comes
            wait([updated], ANSWER_PATIENCE_S)
        else:
            updated.result()  # raises what no engine has said
            self._thread.submit(self._call, complete).result()  # each of its calls has its deadline
        self._thread.shutdown(wait=not self._is_broken, cancel_futures=True)
        if self._num_sent:
            self.send_s = time.perf_counter() - self._first_sent
        return self._error

    def abandon(self, why: BaseException) -> None:
        """Send nothing more and wait for nothing. The engines' update stays open: they are of no use any more."""
        self._note(0, EngineError(f"the weight sync was given up: {type(why).__name__}: {why}"))
        self.transport.abort()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _wait_taken(self, number: int) -> None:
        self._wait(lambda wait_s: self.transport.is_taken(number, wait_s), self._taken(number), self._limit_s(number))

    def _taken(self, number: int) -> str:
        return f"taken bucket {number + 1} of {len(self.buckets)}"

    def _limit_s(self, number: int) -> float:
        """Before the first bucket come the pause and the start of the update."""
        return self.timeout_s if number else 3 * self.timeout_s

    def _wait(self, is_over: Callable[[float], bool], what: str, limit_s: float) -> None:
        """Until it is over, or the engines have answered with whatever; a deadline that passes breaks the weight
        sync."""
        deadline = time.monotonic() + limit_s
        while not self._is_broken and not self._start().done() and not is_over(POLL_S):
            if time.monotonic() > deadline:
                self._give_up(what, limit_s)

    def _give_up(self, what: str, limit_s: float) -> None:
        self._is_broken = True
        self.transport.abort()
        wait([self._start()], ANSWER_PATIENCE_S)  # who answers to that was not the one
        self._note(0, self.engines.late(f"has not {what} within {limit_s:.0f} s"))

    def _call(self, call: Callable[[], None]) -> None:
        if self._error is not None:
            return
        try:
            call()
        except EngineError as error:
            self._note(1, error)

    def _note(self, distance: int, error: EngineError) -> None:
        """Keep the error nearest to the cause: what has ended the weight sync here, what an engine said, what broke
        then."""
        with self._lock:
            if distance < self._distance:
                self._distance, self._error = distance, error

    def _break(self, distance: int, error: EngineError) -> None:
        """The transport has failed: nothing can be sent any more."""
        self._note(distance, error)
        self._is_broken = True
        self.transport.abort()

    def _tell_stuck(self) -> None:
        waited_s = self._limit_s(self._num_sent - 1) + self.timeouts.sync_stuck_s
        self.on_stuck(EngineError(f"bucket {self._num_sent} is stuck on its way to the engines: {waited_s:.0f} s"))
