"""The engines of one node as one: completions wait in a common queue and go to whichever engine has room.

On the local main. Answers come from the engines' clients, in threads of theirs, and a thread for each engine sends it
more, so that engines are busy while the ranks train; no collective runs in these threads.
"""

import contextlib
import math
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from grpo.engine.client import EngineClient, EngineError
from grpo.engine.messages import Sample, Sampled
from grpo.rollout.packing import Completions, Request, pack_completions
from grpo.rollout.queue import RequestQueue

POLL_S = 0.5  # how often a wait looks for a failure elsewhere, or for the end of the pool


@dataclass(slots=True, eq=False)
class Batch:
    """Requests that were submitted together."""

    requests: Sequence[Request]
    ids: range
    """Of their completions, in the order of the requests."""
    submitted_at: float
    """time.monotonic()."""
    answers: dict[int, Sampled] = field(default_factory=dict)
    """By completion id."""
    finished_at: float = math.inf
    """When the last answer came."""

    @property
    def is_finished(self) -> bool:
        return self.finished_at < math.inf

    @property
    def seconds(self) -> float:
        """From its submission to its last answer."""
        return self.finished_at - self.submitted_at

    def completions(self) -> Completions:
        """Of all requests, in their order."""
        answers = [self.answers[completion] for completion in self.ids]
        return pack_completions([a.token_ids for a in answers], [a.engine_logprobs for a in answers])


class EnginePool:
    """Samples batches of requests on all engines of the node.

    Args:
        max_num_seqs: of each engine, the sequences that it runs at once.
        max_tokens: of a completion.
    """

    def __init__(
        self,
        clients: Sequence[EngineClient],
        *,
        max_num_seqs: Sequence[int],
        max_tokens: int,
    ) -> None:
        self._clients = clients
        self._max_tokens = max_tokens
        self._changed = threading.Condition()
        # What an engine has no room for waits here, unless no other engine could take it.
        self._queue = RequestQueue(max_num_seqs if len(clients) > 1 else [sys.maxsize])
        self._unsent: dict[int, Sample] = {}  # by the first of its ids
        self._batches: dict[int, Batch] = {}  # by completion id, while unanswered
        self._next_id = 0
        self._error: Exception | None = None
        self._idle = [IdleClock() for _ in clients]
        # What is decided under the lock is sent outside of it, in the same order: a socket may block.
        self._outboxes: list[queue.SimpleQueue[Sample | tuple[int, ...] | None]] = [
            queue.SimpleQueue() for _ in clients
        ]
        self._threads = [
            threading.Thread(target=self._send, args=[engine], name=f"grpo-{client.name}-sender", daemon=True)
            for engine, client in enumerate(clients)
        ]
        for thread in self._threads:
            thread.start()
        for engine, client in enumerate(clients):
            client.listen(partial(self._hear, engine))

    # -- a batch --------------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> Batch:
        """Start sampling; returns at once. What goes wrong is raised by `collect`."""
        with self._changed:
            num_completions = sum(request.n for request in requests)
            batch = Batch(requests, range(self._next_id, self._next_id + num_completions), time.monotonic())
            self._batches.update(dict.fromkeys(batch.ids, batch))
            fair_share = -(-num_completions // len(self._clients))  # a larger chunk would leave an engine without work
            chunks = []
            for request in requests:
                ids = range(self._next_id, self._next_id + request.n)
                self._next_id = ids.stop
                for begin in range(0, request.n, fair_share):
                    chunk = ids[begin : begin + fair_share]
                    self._unsent[chunk.start] = Sample(
                        ids=chunk, token_ids=request.token_ids, seed=request.seed + begin
                    )
                    chunks.append((len(request.token_ids) + self._max_tokens, chunk))
            if not requests:
                batch.finished_at = batch.submitted_at
            self._queue.add(chunks)
            self._feed()
        return batch

    def collect(self, batch: Batch, timeout_s: float, check: Callable[[], None] = lambda: None) -> Completions:
        """Wait until the whole batch has been answered.

        Args:
            timeout_s: from the batch's submission on.
            check: called again and again meanwhile; what it raises ends the wait.

        Raises:
            EngineError: an engine died, refused a request or does not read, or the time is up.
        """
        deadline = batch.submitted_at + timeout_s
        while True:
            check()
            with self._changed:
                if batch.is_finished:
                    return batch.completions()
                if self._error is not None:
                    raise self._error
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise self._too_late(batch, timeout_s)
                self._changed.wait(min(POLL_S, left_s))

    def _too_late(self, batch: Batch, timeout_s: float) -> EngineError:
        late = self._clients[self._queue.fullest()]
        return late.error(
            f"is one of those that have not answered {len(batch.ids) - len(batch.answers)} of {len(batch.ids)} "
            f"completions after {timeout_s:g} s (vllm_generate_timeout)"
        )

    def drop(self, batch: Batch) -> None:
        """Forget a batch, whatever has become of it; engines stop sampling it."""
        with self._changed:
            for completion in batch.ids:
                self._batches.pop(completion, None)
                self._unsent.pop(completion, None)
            for engine, completions in self._queue.forget(batch.ids):
                self._outboxes[engine].put(tuple(completions))
            self._feed()

    def close(self) -> None:
        """End the threads; the engines go on, and may be another pool's afterwards. Safe to call twice."""
        self._end()
        for thread in self._threads:
            thread.join()

    def _end(self) -> None:
        for outbox in self._outboxes:
            outbox.put(None)

    # -- what engines wait for ------------------------------------------------------------------------------------

    def take_idle_s(self) -> float:
        """Seconds since the last call in which an engine had nothing to sample, in the mean over engines."""
        with self._changed:
            return sum(clock.take_s() for clock in self._idle) / len(self._idle)

    @contextlib.contextmanager
    def busy_otherwise(self) -> Iterator[None]:
        """Around a push: this time does not count as idle."""
        with self._changed:
            for clock in self._idle:
                clock.pause()
        try:
            yield
        finally:
            with self._changed:
                for clock in self._idle:
                    clock.resume()

    # -- with the lock held ---------------------------------------------------------------------------------------

    def _feed(self) -> None:
        chunks = self._queue.send()
        together = self._queue.all_sent()  # where something waits for a place, each is to be heard of when it ends
        for engine, chunk in chunks:
            self._outboxes[engine].put(replace(self._unsent.pop(chunk[0]), together=together))
        for engine, clock in enumerate(self._idle):
            clock.set(self._queue.is_idle(engine))

    # -- threads --------------------------------------------------------------------------------------------------

    def _hear(self, engine: int, answer: Sampled | EngineError) -> None:
        with self._noting_errors():
            if isinstance(answer, EngineError):
                raise answer
            with self._changed:
                self._note(engine, answer)

    def _note(self, engine: int, answer: Sampled) -> None:
        self._queue.answered(engine, answer.completion_id)
        batch = self._batches.pop(answer.completion_id, None)
        if batch is not None:  # else it was dropped
            batch.answers[answer.completion_id] = answer
            if len(batch.answers) == len(batch.ids):
                batch.finished_at = time.monotonic()
                self._changed.notify_all()
        self._feed()

    def _send(self, engine: int) -> None:
        with self._noting_errors():
            while (message := self._outboxes[engine].get()) is not None:
                if isinstance(message, tuple):
                    self._clients[engine].abort(message)
                else:
                    self._clients[engine].submit(message)

    @contextlib.contextmanager
    def _noting_errors(self) -> Iterator[None]:
        """Around the work of a thread: the first error is kept for `collect`, and ends the pool."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  thread boundary: the main thread raises it
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()
            self._end()


class IdleClock:
    """How long an engine has nothing to sample."""

    def __init__(self) -> None:
        self._total_s = 0.0
        self._since: float | None = time.monotonic()
        self._idle = True
        self._paused = False

    def _run(self) -> None:
        now = time.monotonic()
        if self._since is not None:
            self._total_s += now - self._since
        self._since = now if self._idle and not self._paused else None

    def set(self, idle: bool) -> None:
        self._idle = idle
        self._run()

    def pause(self) -> None:
        self._paused = True
        self._run()

    def resume(self) -> None:
        self._paused = False
        self._run()

    def take_s(self) -> float:
        """Since the last call."""
        self._run()
        total_s, self._total_s = self._total_s, 0.0
        return total_s
