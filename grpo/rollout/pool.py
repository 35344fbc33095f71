"""The engines of one node as one: completions wait in a common queue and go to whichever engine has room.

On the local main. Answers come from the engines' clients, in threads of theirs, and a thread for each engine sends it
more, so that engines are busy while the ranks train; no collective runs in these threads.
"""

import contextlib
import itertools
import logging
import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from grpo.engine.client import EngineDied, EngineError
from grpo.engine.like import EngineLike
from grpo.engine.messages import Sample, Sampled
from grpo.place.log import FILE_ONLY
from grpo.record.timeline.recorder import Recorder
from grpo.rollout.batch import Batch
from grpo.rollout.finite import FiniteCheck
from grpo.rollout.packing import REFUSED, Completions, Request, engine_id
from grpo.rollout.queue import Chunk, RequestQueue, ranges
from grpo.rollout.search import KNOWN_GOOD, Trials, about_deadly, prompt_of
from grpo.rollout.stints import IdleClock, Stints

_log = logging.getLogger(__name__)

POLL_S = 0.5  # how often a wait looks for a failure elsewhere, or for the end of the pool
_NOTHING = np.empty(0)
MAX_DEATHS = 2  # of engines at work on the same completion, until it is searched for the prompt that they die of
_Outbox = queue.SimpleQueue[Sample | tuple[int, ...] | None]
"""What is sent to an engine: completions to sample, completions to drop; None ends its thread."""


class DeadlyRequests(EngineError):
    """Engines died again and again with the same requests in flight, and no prompt was found to be to blame."""


class EnginePool:
    """Samples batches of requests on all engines of the node.

    What an engine owes when it dies goes to the others; where there is none it waits for `take_up`. A request keeps its
    seeds, so that it is sampled as it would have been. A prompt of which engines die is found by trials (`Trials`), and
    refused.

    Args:
        max_num_seqs: of each engine, the sequences that it runs at once.
        max_tokens: of a completion.
        max_model_len: tokens of prompt and completion that an engine holds; a prompt without room for one sampled
            token is not sent.
        end_tokens: that end a completion, as the trainer counts ends, whatever the engines' files say.
        node: of the engines.
        timeline: where each engine's work is recorded.
        num_spare: places of each engine that are left free.
    """

    def __init__(
        self,
        clients: Sequence[EngineLike],
        *,
        max_num_seqs: Sequence[int],
        max_tokens: int,
        max_model_len: int = sys.maxsize,
        end_tokens: tuple[int, ...] = (),
        node: int = 0,
        timeline: Recorder | None = None,
        num_spare: int = 0,
    ) -> None:
        self.policy_version = 0
        """Optimizer steps of the weights that engines have from now on."""
        self._clients = [*clients]
        self._node = node
        self._max_tokens = max_tokens
        self._max_model_len = max_model_len
        self._end_tokens = end_tokens
        self._changed = threading.Condition()
        # What has no place waits here, with one engine too: its deaths are then blamed on what it was at work on alone.
        self._queue = RequestQueue(max_num_seqs, num_spare)
        self._unsent: dict[int, Sample] = {}  # by the first of its ids
        known_good = Sample(ids=KNOWN_GOOD, token_ids=np.array(end_tokens[:1] or [0], np.int32), seed=0)
        self._trials = Trials(self._queue, self._unsent, known_good)
        self._sent: dict[int, Sample] = {}  # by completion id, while unanswered
        self._deaths: Counter[int] = Counter()  # by completion id, of engines that had it
        self._num_reissued = 0
        self._batches: dict[int, Batch] = {}  # by completion id, while unanswered
        self._next_id = 0
        self._error: Exception | None = None
        self._on_trouble: Callable[[Exception | None], None] | None = None
        self._finite = FiniteCheck(node)
        self._idle = [IdleClock() for _ in clients]
        self._stints = [Stints(timeline or Recorder(), engine) for engine in range(len(clients))]
        # What is decided under the lock is sent outside of it, in the same order: a socket may block.
        self._outboxes: list[_Outbox] = [queue.SimpleQueue() for _ in clients]
        self._threads: list[threading.Thread] = []
        for engine, client in enumerate(clients):
            self._attach(engine, client)

    def _attach(self, engine: int, client: EngineLike) -> None:
        thread = threading.Thread(
            target=self._send, args=[client, self._outboxes[engine]], name=f"grpo-{client.name}-sender", daemon=True
        )
        self._threads.append(thread)
        client.listen(partial(self._hear, engine, client))  # first: it may answer at once
        thread.start()

    # -- a batch --------------------------------------------------------------------------------------------------

    def submit(
        self,
        requests: Sequence[Request],
        *,
        name: str = "this node's generation batch",
        on_done: Callable[[Batch], None] | None = None,
    ) -> Batch:
        """Start sampling; returns at once. What goes wrong is raised by `collect`, or told as `tell` has it.

        Args:
            name: of the batch, for messages.
            on_done: called when all its completions are there, from another thread or this one; must not wait.
        """
        with self._changed:
            num_completions = sum(request.n for request in requests)
            batch = Batch(ids=range(self._next_id, self._next_id + num_completions), name=name, on_done=on_done)
            self._batches.update(dict.fromkeys(batch.ids, batch))
            fair_share = -(-num_completions // len(self._clients))  # a larger chunk would leave an engine without work
            chunks = []
            for request in requests:
                ids = range(self._next_id, self._next_id + request.n)
                self._next_id = ids.stop
                if len(request.token_ids) >= self._max_model_len:
                    why = f"a prompt has {len(request.token_ids)} tokens; the engine holds {self._max_model_len} with "
                    self._refuse(batch, ids, why + "the completion (vllm_max_model_length)")
                    continue
                if (deadly := self._trials.deadly.get(request.token_ids.tobytes())) is not None:
                    self._refuse(batch, ids, deadly)
                    continue
                for begin in range(0, request.n, fair_share):
                    chunk = ids[begin : begin + fair_share]
                    self._unsent[chunk.start] = Sample(
                        ids=chunk,
                        token_ids=request.token_ids,
                        seed=request.seed + begin,
                        overrides=dict(request.overrides),
                        end_tokens=self._end_tokens,
                    )
                    tokens = len(request.token_ids) + self._max_tokens
                    chunks.append(Chunk(ids=chunk, tokens=tokens, home=request.home))
            _log.debug("%s of %d completions begins: %d prompts", name, num_completions, len(requests))
            self._end_if_answered(batch)
            self._queue.add(chunks)
            self._feed()
        return batch

    def collect(self, batch: Batch, timeout_s: float, check: Callable[[], None] = lambda: None) -> Completions | None:
        """Wait until the whole batch has been answered.

        Args:
            timeout_s: from the batch's submission on; again when an engine was replaced.
            check: called again and again meanwhile; what it raises ends the wait.

        Returns:
            None when all engines are gone before that.

        Raises:
            EngineError: an engine failed at a request or does not read, or the time is up.
            DeadlyRequests: engines died of it.
        """
        while True:
            check()
            with self._changed:
                if batch.is_finished:
                    return batch.completions()
                if self._error is not None:
                    raise self._error
                if not self._queue.has_engines():
                    return None
                left_s = batch.asked_at + timeout_s - time.monotonic()
                if left_s <= 0:
                    raise self._too_late(batch, timeout_s)
                self._changed.wait(min(POLL_S, left_s))

    def _too_late(self, batch: Batch, timeout_s: float) -> EngineError:
        late = self._clients[self._queue.fullest()]
        return late.error(
            f"is one of those that have not answered {len(batch.ids) - len(batch.answers)} of {len(batch.ids)} "
            f"completions after {timeout_s:g} s (vllm_generate_timeout) [GRPO-411]"
        )

    def tell(self, on_trouble: Callable[[Exception | None], None]) -> None:
        """Have what `collect` would raise told to who waits for batches otherwise.

        Args:
            on_trouble: called from another thread, or from this one at once, with the error that ends the pool, and
                with None when its last engine is gone until `take_up`; must not wait.
        """
        with self._changed:
            self._on_trouble = on_trouble
            self._say_trouble()

    def _say_trouble(self) -> None:
        if self._on_trouble is not None and (self._error is not None or not self._queue.has_engines()):
            self._on_trouble(self._error)

    def drop(self, batch: Batch) -> None:
        """Forget a batch, whatever has become of it; engines stop sampling it."""
        with self._changed:
            for completion in batch.ids:
                for owed in (self._batches, self._unsent, self._sent, self._deaths):
                    owed.pop(completion, None)
            for engine, completions in self._queue.forget(batch.ids):
                self._outboxes[engine].put(tuple(completions))
            self._trials.settle(batch.ids)
            self._feed()

    def take_up(self, clients: Sequence[EngineLike], *, policy_version: int) -> None:
        """Go on with these engines, all of which have the weights of `policy_version`; all were at rest meanwhile."""
        self.policy_version = policy_version
        _log.debug("engines go on with policy version %d", policy_version)
        for engine, client in enumerate(clients):
            if client is not self._clients[engine]:
                self._replace(engine, client)
        with self._changed:
            self._say_trouble()  # of an engine that has died since it was delivered to

    def _replace(self, engine: int, client: EngineLike) -> None:
        with self._changed:
            self._outboxes[engine].put(None)  # of one that was closed by us
            self._clients[engine], self._outboxes[engine] = client, queue.SimpleQueue()
            owed = self._queue.lose(engine)
            self._trials.interrupt(owed)
            self._queue.regain(engine)
            self._issue_again(owed)
            for batch in {*self._batches.values()}:
                batch.asked_at = time.monotonic()
        self._attach(engine, client)
        with self._changed:
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

    def take_num_reissued(self) -> int:
        """Completions since the last call that were given to an engine again, because the one before it had died."""
        with self._changed:
            count, self._num_reissued = self._num_reissued, 0
        return count

    def take_not_finite(self) -> tuple[int, str | None]:
        """See `FiniteCheck.take`."""
        with self._changed:
            return self._finite.take()

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
        chunks = self._trials.send()
        together = self._queue.all_sent()  # where something waits for a place, each is to be heard of when it ends
        for engine, chunk in chunks:
            sample = replace(self._trials.take(chunk), together=together)
            self._sent.update(dict.fromkeys(chunk, sample))
            self._outboxes[engine].put(sample)
        for engine, clock in enumerate(self._idle):
            is_idle = self._queue.is_idle(engine)
            clock.set(is_idle)
            self._stints[engine].set(is_idle, self.policy_version)

    def _lose(self, engine: int, error: EngineDied) -> None:
        self._outboxes[engine].put(None)
        owed = self._queue.lose(engine)
        _log.warning("engine %d is gone: %d completions go to others", engine, len(owed), extra=FILE_ONLY)
        samples = {completion: self._sent[completion] for completion in owed}
        if (why := self._trials.judge(samples, error)) is not None:
            suspects = [*samples.values(), *self._trials.suspected()]
            raise DeadlyRequests(about_deadly(suspects, self._batches, why, error))
        self._deaths.update(owed)
        self._trials.suspect(samples[completion] for completion in owed if self._deaths[completion] >= MAX_DEATHS)
        self._issue_again(owed)
        for sample in self._trials.take_deadly():
            batch = self._batches[sample.ids.start]
            self._refuse(batch, sample.ids, self._trials.deadly[prompt_of(sample)])
            self._end_if_answered(batch)
        self._feed()
        self._say_trouble()
        self._changed.notify_all()

    def _issue_again(self, owed: Sequence[int]) -> None:
        """Put what an engine owed back into the queue, under its seeds."""
        if KNOWN_GOOD.start in owed:
            owed = []  # nothing was beside it
        chunks = []
        for _, run in itertools.groupby(owed, key=lambda completion: self._sent[completion].ids.start):
            for ids in ranges(run):
                old = self._sent[ids.start]
                self._unsent[ids.start] = replace(old, ids=ids, seed=old.seed + ids.start - old.ids.start)
                chunks.append(Chunk(ids=ids, tokens=len(old.token_ids) + self._max_tokens))
        for completion in owed:
            del self._sent[completion]
        self._num_reissued += len(owed)
        self._trials.add(chunks)

    # -- threads --------------------------------------------------------------------------------------------------

    def _hear(self, engine: int, client: EngineLike, answer: Sampled | EngineError) -> None:
        with self._noting_errors(), self._changed:
            if client is not self._clients[engine]:
                return  # of an earlier life
            if isinstance(answer, EngineDied):
                self._lose(engine, answer)
            elif isinstance(answer, EngineError):
                raise answer
            else:
                self._note(engine, answer)

    def _note(self, engine: int, answer: Sampled) -> None:
        self._queue.answered(engine, answer.completion_id)
        if (sample := self._sent.pop(answer.completion_id, None)) is not None and not answer.is_refusal:
            self._trials.known_good = sample
        self._trials.settle([answer.completion_id])
        self._deaths.pop(answer.completion_id, None)
        batch = self._batches.pop(answer.completion_id, None)
        self._stints[engine].note(len(answer.token_ids))
        self._finite.note(engine, answer.engine_logprobs)
        if batch is not None:  # else it was dropped
            batch.add(answer, engine=engine_id(self._node, engine), policy_version=self.policy_version)
            self._end_if_answered(batch)
        self._feed()

    def _refuse(self, batch: Batch, ids: range, why: str) -> None:
        for completion in ids:
            del self._batches[completion]
            refusal = Sampled(
                completion_id=completion, token_ids=_NOTHING, engine_logprobs=_NOTHING, error=why, is_refusal=True
            )
            batch.add(refusal, engine=REFUSED, policy_version=REFUSED)

    def _end_if_answered(self, batch: Batch) -> None:
        if len(batch.answers) == len(batch.ids):
            batch.finished_at = time.monotonic()
            _log.debug("%s of %d completions ends, after %.2f s", batch.name, len(batch.ids), batch.seconds)
            self._changed.notify_all()
            if batch.on_done is not None:
                batch.on_done(batch)

    def _send(self, client: EngineLike, outbox: _Outbox) -> None:
        with self._noting_errors():
            while (message := outbox.get()) is not None:
                if isinstance(message, tuple):
                    client.abort(message)
                else:
                    client.submit(message)

    @contextlib.contextmanager
    def _noting_errors(self) -> Iterator[None]:
        """Around the work of a thread: the first error is kept for `collect`, and ends the pool."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  thread boundary: the main thread raises it
            with self._changed:
                self._error = self._error or error
                self._say_trouble()
                self._changed.notify_all()
            self._end()
