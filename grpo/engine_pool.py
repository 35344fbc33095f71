"""The engines of one node as one: requests wait in a common pool and go to whichever engine has room.

On the local main. One thread per engine takes its answers and sends it more, so that engines are busy while the ranks
train; no collective runs in these threads.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from grpo.dispatch import Completions, Request
from grpo.engine.client import EngineClient, EngineError
from grpo.engine.messages import Sample, Sampled

POLL_S = 0.5  # how often a wait for completions looks for a failure elsewhere


@dataclass(slots=True, eq=False)
class Batch:
    """Requests that were submitted together."""

    requests: Sequence[Request]
    first_id: int
    """Request i has the id `first_id + i`."""
    submitted_at: float
    """time.monotonic()."""
    answers: dict[int, Sampled] = field(default_factory=dict)
    """By request id."""
    finished_at: float | None = None
    """When the last answer came."""

    @property
    def seconds(self) -> float:
        """From its submission to its last answer."""
        assert self.finished_at is not None
        return self.finished_at - self.submitted_at

    def completions(self) -> Completions:
        """Of all requests, in their order."""
        answers = [self.answers[self.first_id + index] for index in range(len(self.requests))]
        empty = np.empty(0, np.int32)
        return Completions(
            token_ids=np.concatenate([empty, *(a.token_ids for a in answers)]),
            lengths=np.concatenate([empty, *(a.lengths for a in answers)]),
            engine_logprobs=np.concatenate([empty.astype(np.float32), *(a.engine_logprobs for a in answers)]),
        )


@dataclass(slots=True, eq=False)
class _Engine:
    client: EngineClient
    max_num_seqs: int
    """Sequences that it runs at once; more would only wait inside it, where no other engine can take them."""
    outstanding: dict[int, Request] = field(default_factory=dict)
    """Sent and not answered, by id."""
    num_seqs: int = 0
    cost_tokens: int = 0
    """Of what is outstanding."""
    idle_since: float | None = None
    idle_s: float = 0.0

    def has_room(self, request: Request) -> bool:
        return not self.outstanding or self.num_seqs + request.n <= self.max_num_seqs


class EnginePool:
    """Samples batches of requests on all engines of the node.

    Args:
        max_num_seqs: of each engine, the sequences that it runs at once.
        cost_tokens: the most tokens that a request may occupy.
    """

    def __init__(
        self,
        clients: Sequence[EngineClient],
        *,
        max_num_seqs: Sequence[int],
        cost_tokens: Callable[[Request], int],
    ) -> None:
        now = time.monotonic()
        self._engines = [
            _Engine(client, limit, idle_since=now) for client, limit in zip(clients, max_num_seqs, strict=True)
        ]
        self._cost_tokens = cost_tokens
        self._changed = threading.Condition()
        self._waiting: list[tuple[int, Request]] = []  # id and request; the dearest last
        self._batches: dict[int, Batch] = {}  # request id -> its batch, while unanswered
        self._next_id = 0
        self._error: EngineError | None = None
        for engine in self._engines:
            threading.Thread(
                target=self._serve, args=[engine], name=f"grpo-{engine.client.name}-answers", daemon=True
            ).start()

    # -- a batch --------------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> Batch:
        """Start sampling; returns at once.

        Raises:
            EngineError: an engine is dead, or does not read.
        """
        with self._changed:
            batch = Batch(requests, self._next_id, time.monotonic())
            ids = range(self._next_id, self._next_id + len(requests))
            self._next_id += len(requests)
            self._batches.update(dict.fromkeys(ids, batch))
            # The dearest first (Graham, "Bounds on Multiprocessing Timing Anomalies", 1969).
            self._waiting += zip(ids, requests, strict=True)
            self._waiting.sort(key=lambda each: (self._cost_tokens(each[1]), -each[0]))
            if not requests:
                batch.finished_at = batch.submitted_at
        self._feed()
        return batch

    def collect(self, batch: Batch, timeout_s: float, check: Callable[[], None] = lambda: None) -> Completions:
        """Wait until the whole batch has been answered.

        Args:
            timeout_s: from the batch's submission on.
            check: called again and again meanwhile; what it raises ends the wait.

        Raises:
            EngineError: an engine died or refused a request, or the time is up.
        """
        deadline = batch.submitted_at + timeout_s
        while True:
            check()
            with self._changed:
                if batch.finished_at is not None:
                    return batch.completions()
                if self._error is not None:
                    raise self._error
                late = max(self._engines, key=lambda engine: len(engine.outstanding))
                missing = len(batch.requests) - len(batch.answers)
                if time.monotonic() <= deadline:
                    self._changed.wait(min(POLL_S, max(0.0, deadline - time.monotonic())))
                    continue
            raise late.client.error(
                f"is one of those that have not answered {missing} of {len(batch.requests)} requests after "
                f"{timeout_s:.0f} s (vllm_generate_timeout)"
            )

    def drop(self, batch: Batch) -> None:
        """Forget a batch, whatever has become of it; engines stop sampling it."""
        with self._changed:
            ids = range(batch.first_id, batch.first_id + len(batch.requests))
            for request_id in ids:
                self._batches.pop(request_id, None)
            self._waiting = [each for each in self._waiting if each[0] not in ids]
            sent = [(engine, [i for i in engine.outstanding if i in ids]) for engine in self._engines]
            for engine, dropped in sent:
                for request_id in dropped:
                    self._take_back(engine, request_id)
        for engine, dropped in sent:
            if dropped:
                engine.client.abort(dropped)
        self._feed()

    # -- what engines wait for ------------------------------------------------------------------------------------

    def take_idle_s(self) -> float:
        """Seconds since the last call in which an engine had nothing to sample, in the mean over engines."""
        now = time.monotonic()
        with self._changed:
            total_s = 0.0
            for engine in self._engines:
                if engine.idle_since is not None:
                    engine.idle_s += now - engine.idle_since
                    engine.idle_since = now
                total_s += engine.idle_s
                engine.idle_s = 0.0
        return total_s / len(self._engines)

    @contextlib.contextmanager
    def busy_otherwise(self) -> Iterator[None]:
        """Around a push: this time does not count as idle."""
        begun = time.monotonic()
        try:
            yield
        finally:
            with self._changed:
                for engine in self._engines:
                    if engine.idle_since is not None:
                        engine.idle_since += time.monotonic() - begun

    # -- threads --------------------------------------------------------------------------------------------------

    def _feed(self) -> None:
        """Send what waits to the engines with room, each to the one with the fewest outstanding tokens."""
        sent: list[tuple[_Engine, list[Sample]]] = []
        with self._changed:
            while self._waiting:
                request_id, request = self._waiting[-1]
                roomy = [engine for engine in self._engines if engine.has_room(request)]
                if not roomy:
                    break
                self._waiting.pop()
                engine = min(roomy, key=lambda engine: engine.cost_tokens)
                engine.outstanding[request_id] = request
                engine.num_seqs += request.n
                engine.cost_tokens += self._cost_tokens(request)
                if engine.idle_since is not None:
                    engine.idle_s += time.monotonic() - engine.idle_since
                    engine.idle_since = None
                sample = Sample(request_id=request_id, token_ids=request.token_ids, n=request.n, seed=request.seed)
                sent.append((engine, [sample]))
        for engine, samples in sent:
            engine.client.submit(samples)

    def _take_back(self, engine: _Engine, request_id: int) -> None:
        """Note that a request is no longer outstanding. With the lock held."""
        request = engine.outstanding.pop(request_id)
        engine.num_seqs -= request.n
        engine.cost_tokens -= self._cost_tokens(request)
        if not engine.outstanding:
            engine.idle_since = time.monotonic()

    def _serve(self, engine: _Engine) -> None:
        while True:
            try:
                answer = engine.client.next_sampled(POLL_S)
                if answer is not None:
                    self._note(engine, answer)
                    self._feed()
            except EngineError as error:
                with self._changed:
                    self._error = self._error or error
                    self._changed.notify_all()
                return

    def _note(self, engine: _Engine, answer: Sampled) -> None:
        with self._changed:
            if answer.request_id in engine.outstanding:
                self._take_back(engine, answer.request_id)
            batch = self._batches.pop(answer.request_id, None)
            if batch is None:
                return  # dropped
            batch.answers[answer.request_id] = answer
            if len(batch.answers) == len(batch.requests):
                batch.finished_at = time.monotonic()
                self._changed.notify_all()
