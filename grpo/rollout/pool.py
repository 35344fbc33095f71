"""Pool of a node's engines: completions wait in a common queue and go to the next engine with a free slot.

On the local main. Answers arrive in threads of the engines' clients, and one thread per engine sends it more requests,
so that engines are busy while the ranks train; no collective runs in these threads.
"""

import contextlib
import itertools
import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field, replace
from functools import partial

import numpy as np

from grpo.engine.client import EngineDied, EngineError
from grpo.engine.like import EngineLike
from grpo.engine.messages import Sample, Sampled
from grpo.place.log import FILE_ONLY
from grpo.record.timeline.recorder import Recorder
from grpo.rollout.accounts import Accounts
from grpo.rollout.ages import Ages
from grpo.rollout.batch import Batch
from grpo.rollout.packing import Completions, Request, engine_id
from grpo.rollout.partial import Kept, ask_engines
from grpo.rollout.queue import Chunk, RequestQueue, ranges
from grpo.rollout.search import KNOWN_GOOD, DeadlyRequests, Trials, about_deadly, prompt_of
from grpo.rollout.senders import Senders

_log = logging.getLogger(__name__)

POLL_S = 0.5  # interval of checks for a failure elsewhere, or for the end of the pool
MAX_DEATHS = 2  # of engines at work on the same completion, before a search for the fatal prompt


@dataclass(eq=False)
class EnginePool:
    """Samples batches of requests on all engines of the node.

    Completions of a dead engine go to the others; without any they wait for `take_up`. A request keeps its seeds, so
    the result is the same. A prompt that kills engines is found by trials (`Trials`), and refused.
    """

    clients: InitVar[Sequence[EngineLike]]
    _: KW_ONLY
    max_num_seqs: InitVar[Sequence[int]]
    """Number of sequences each engine runs at once."""
    max_tokens: int
    """Longest completion."""
    max_model_len: int = sys.maxsize
    """Longest sequence of an engine, prompt and completion; a prompt as long as this is not sent."""
    end_tokens: tuple[int, ...] = ()
    """End tokens of a completion for the trainer, whatever the engines' files say."""
    in_flight: bool = False
    """Weight syncs run during generation."""
    node: int = 0
    """Number of this node."""
    timeline: Recorder = field(default_factory=Recorder)
    """Timeline of each engine's work."""
    num_spare: int = 0
    """Number of slots of each engine kept free."""

    def __post_init__(self, clients: Sequence[EngineLike], max_num_seqs: Sequence[int]) -> None:
        self._clients = [*clients]
        self._cache_salt: str | None = None
        self._adapter: int | None = None
        self._changed = threading.Condition()
        # Completions without a slot wait here, even for a single engine: its death is then blamed only on those it was
        # sampling.
        self._queue = RequestQueue(max_num_seqs, self.num_spare)
        self._unsent: dict[int, Sample] = {}  # by its first id
        known_good = Sample(ids=KNOWN_GOOD, token_ids=np.array(self.end_tokens[:1] or [0], np.int32), seed=0)
        self._trials = Trials(self._queue, self._unsent, known_good)
        self._sent: dict[int, Sample] = {}  # by completion id, while unanswered
        self._deaths: Counter[int] = Counter()  # by completion id: deaths of engines that had it
        self._num_reissued = self._num_delivered = 0
        self._batches: dict[int, Batch] = {}  # by completion id, while unanswered
        self._next_id = 0
        self._error: Exception | None = None
        self._on_trouble: Callable[[Exception | None], None] | None = None
        self._ages = Ages()
        self.accounts = Accounts(self._changed, num_engines=len(self._clients), node=self.node, timeline=self.timeline)
        self._senders = Senders(len(self._clients), self._noting_errors)
        for engine, client in enumerate(self._clients):
            self._attach(engine, client)

    def _attach(self, engine: int, client: EngineLike) -> None:
        client.listen(partial(self._on_answer, engine, client))  # first: it may answer at once
        self._senders.start(engine, client)

    @property
    def policy_version(self) -> int:
        """Optimizer steps of the engines' weights from now on."""
        return self._ages.now.step

    # -- a batch --------------------------------------------------------------------------------------------------

    def submit(
        self,
        requests: Sequence[Request],
        *,
        name: str = "this node's generation batch",
        order: int = 0,
        on_done: Callable[[Batch], None] | None = None,
        kept: Kept | None = None,
    ) -> Batch:
        """Start sampling; returns at once. Errors are raised by `collect`, or passed to the callback of `subscribe`.

        Args:
            name: of the batch, for messages.
            order: see `Batch`.
            on_done: called when all its completions are there, from another thread or this one; must not wait.
            kept: the batch from a checkpoint: only its missing parts are sampled.
        """
        with self._changed:
            every = range(self._next_id, self._next_id + sum(request.n for request in requests))
            batch = Batch(ids=every, name=name, submitted=self._ages.now, order=order, on_done=on_done)
            if kept is not None:
                batch.resume(kept, self._ages.now)
            self._batches.update(dict.fromkeys([each for each in batch.ids if each not in batch.answers], batch))
            chunks = []
            for request in requests:
                ids = range(self._next_id, self._next_id + request.n)
                self._next_id = ids.stop
                if (why := self._trials.refusal(request, self.max_model_len)) is not None:
                    self._refuse(batch, ids, why)
                    continue
                for asked in batch.samples(request, ids, num_engines=len(self._clients)):
                    sample = replace(asked, end_tokens=self.end_tokens, adapter=self._adapter)
                    self._unsent[sample.ids.start] = sample
                    chunks.append(Chunk(ids=sample.ids, tokens=self._most(request), home=request.home, order=order))
            _log.debug("%s of %d completions begins: %d prompts", name, len(every), len(requests))
            self._end_if_answered(batch)
            self._queue.add(chunks)
            self._feed()
        return batch

    def _most(self, asked: Request | Sample) -> int:
        return asked.num_tokens + asked.overrides.get("max_tokens", self.max_tokens)

    def collect(self, batch: Batch, timeout_s: float, check: Callable[[], None] = lambda: None) -> Completions | None:
        """Wait until the whole batch has been answered.

        Args:
            timeout_s: from `Batch.asked_at`: its submission, or the replacement of an engine.
            check: called repeatedly meanwhile; an exception from it ends the wait.

        Returns:
            None if all engines are lost before.

        Raises:
            EngineError: an engine failed at a request or does not read, or the time is up.
            DeadlyRequests: it killed engines.
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

    def so_far(self, batches: Sequence[Batch]) -> list[Completions]:
        """Return the completions of each batch in their present state: see `Batch.so_far`. Engines continue."""
        if not batches:
            return []
        found = ask_engines([*self._clients])  # without the lock, needed by their answers
        with self._changed:
            begun = {
                each: (tokens, self._ages.first(each).step, engine_id(self.node, engine))
                for each, (tokens, engine) in found.items()
            }
            return [batch.so_far(begun) for batch in batches]

    def _too_late(self, batch: Batch, timeout_s: float) -> EngineError:
        late = self._clients[self._queue.fullest()]
        return late.error(
            f"is one of those that have not answered {len(batch.ids) - len(batch.answers)} of {len(batch.ids)} "
            f"completions after {timeout_s:g} s (vllm_generate_timeout) [GRPO-411]"
        )

    def subscribe(self, on_trouble: Callable[[Exception | None], None]) -> None:
        """Set a callback for the errors `collect` would raise, for code that waits for batches in another way.

        Args:
            on_trouble: called from another thread, or immediately, with the error that ends the pool, and with None
                when its last engine is lost until `take_up`; must not wait.
        """
        with self._changed:
            self._on_trouble = on_trouble
            self._say_trouble()

    @property
    def is_in_trouble(self) -> bool:
        """True if no engine samples: all are lost, or one has failed."""
        return self._error is not None or not self._queue.has_engines()

    def _say_trouble(self) -> None:
        if self._on_trouble is not None and self.is_in_trouble:
            self._on_trouble(self._error)

    def drop(self, batch: Batch) -> None:
        """Drop a batch, in any state; engines stop sampling it."""
        with self._changed:
            for completion in batch.ids:
                for owed in (self._batches, self._unsent, self._sent, self._deaths):
                    owed.pop(completion, None)
                self._ages.forget(completion)
            for engine, completions in self._queue.forget(batch.ids):
                self._senders.put(engine, tuple(completions))
            self._trials.settle(batch.ids)
            self._feed()

    def note_paused(self, step: int, of_engines: Sequence[Mapping[int, int]]) -> None:
        """Record that all engines are paused, and will continue with the weights of `step`.

        Args:
            of_engines: tokens so far of unfinished completions, by engine.
        """
        with self._changed:
            self._ages.sync(step, of_engines)

    def take_up(self, clients: Sequence[EngineLike], *, policy_version: int, adapter: int | None = None) -> None:
        """Continue with these engines, all of which have the weights of `policy_version`.

        Args:
            adapter: number of the adapter for later submissions.
        """
        _log.debug("engines go on with policy version %d", policy_version)
        with self._changed:
            self._ages.sync(policy_version)
            self._adapter = adapter
            if self.in_flight:
                self._num_delivered += 1
                if self._adapter is None:  # else vLLM's prefix cache is keyed on the adapter
                    self._cache_salt = f"{self.policy_version}-{self._num_delivered}"
                self.accounts.cut(self.policy_version)
                # an engine that survives from one weight sync to the next is not killed by these
                for completion in self._sent:
                    self._deaths.pop(completion, None)
        for engine, client in enumerate(clients):
            if client is not self._clients[engine]:
                self._replace(engine, client)
        with self._changed:
            self._say_trouble()  # for an engine that has died since the weight sync

    def _replace(self, engine: int, client: EngineLike) -> None:
        with self._changed:
            self._senders.stop(engine)  # of one that we closed
            self._clients[engine] = client
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
        """End the threads; the engines keep running, and may join another pool. Safe to call twice."""
        self._senders.end()
        self._senders.join()

    # -- load -----------------------------------------------------------------------------------------------------

    @property
    def num_owed(self) -> int:
        """Number of unanswered completions."""
        with self._changed:
            return len(self._batches)

    def adapters_in_use(self) -> set[int]:
        """Adapters of unanswered completions."""
        with self._changed:
            return {each.adapter for each in (*self._sent.values(), *self._unsent.values()) if each.adapter is not None}

    def take_num_reissued(self) -> int:
        """Return the number of completions sent again since the last call, because their engine had died."""
        with self._changed:
            count, self._num_reissued = self._num_reissued, 0
        return count

    # -- with the lock held ---------------------------------------------------------------------------------------

    def _feed(self) -> None:
        chunks = self._trials.send()
        together = self._queue.all_sent()  # if others wait for a slot, each completion is answered when it ends
        for engine, chunk in chunks:
            sample = replace(self._trials.take(chunk), together=together, cache_salt=self._cache_salt)
            self._sent.update(dict.fromkeys(chunk, sample))
            for completion in chunk:
                batch = self._batches.get(completion)  # None: it was dropped
                self._ages.begin(completion, None if batch is None else batch.begins(completion, sample.adapter))
            self._senders.put(engine, sample)
        for engine in range(len(self._clients)):
            self.accounts.set(engine, is_idle=self._queue.is_idle(engine), policy_version=self.policy_version)

    def _lose(self, engine: int, error: EngineDied) -> None:
        self._senders.stop(engine)
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
            self._refuse(batch := self._batches[sample.ids.start], sample.ids, self._trials.deadly[prompt_of(sample)])
            self._end_if_answered(batch)
        self._feed()
        self._say_trouble()
        self._changed.notify_all()

    def _issue_again(self, owed: Sequence[int]) -> None:
        """Put a lost engine's completions back into the queue, with their seeds."""
        if KNOWN_GOOD.start in owed:
            owed = []  # it was alone in its engine
        chunks = []
        for _, run in itertools.groupby(owed, key=lambda completion: self._sent[completion].ids.start):
            for ids in ranges(run):
                old = self._sent[ids.start]
                self._unsent[ids.start] = replace(old, ids=ids, seed=old.seed + ids.start - old.ids.start)
                order = self._batches[ids.start].order if ids.start in self._batches else 0
                chunks.append(Chunk(ids=ids, tokens=self._most(old), order=order))
        for completion in owed:
            del self._sent[completion]
        self._num_reissued += len(owed)
        self._trials.add(chunks)

    # -- threads --------------------------------------------------------------------------------------------------

    def _on_answer(self, engine: int, client: EngineLike, answer: Sampled | EngineError) -> None:
        with self._noting_errors(), self._changed:
            if client is not self._clients[engine]:
                return  # of an earlier engine
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
        self.accounts.note(engine, answer)
        age = self._ages.end(answer.completion_id, len(answer.token_ids))
        if batch is not None:  # else it was dropped
            batch.add(answer, engine=engine_id(self.node, engine), age=age)
            self._end_if_answered(batch)
        self._feed()

    def _refuse(self, batch: Batch, ids: range, why: str) -> None:
        for completion in ids:
            if self._batches.pop(completion, None) is not None:  # else it is complete in the checkpoint
                batch.refuse(completion, why)

    def _end_if_answered(self, batch: Batch) -> None:
        if len(batch.answers) == len(batch.ids):
            batch.finished_at = time.monotonic()
            _log.debug("%s of %d completions ends, after %.2f s", batch.name, len(batch.ids), batch.seconds)
            self._changed.notify_all()
            if batch.on_done is not None:
                batch.on_done(batch)

    @contextlib.contextmanager
    def _noting_errors(self) -> Iterator[None]:
        """Keep the first error in a thread's work for `collect`, and end the pool."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  thread boundary: the main thread raises it
            with self._changed:
                self._error = self._error or error
                self._say_trouble()
                self._changed.notify_all()
            self._senders.end()
