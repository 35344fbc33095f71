"""Search for a prompt that kills every engine, and scheduling meanwhile; without threads."""

import logging
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

from grpo.engine.client import EngineDied, EngineError
from grpo.engine.messages import Sample
from grpo.model.pictures import digest
from grpo.place.log import FILE_ONLY
from grpo.rollout.batch import Batch
from grpo.rollout.packing import Request
from grpo.rollout.queue import Chunk, RequestQueue

_log = logging.getLogger(__name__)

MAX_MORE_DEATHS = 4  # finds one among 16 in any case; a half that is answered costs none
KNOWN_GOOD = range(-1, 0)  # id of a completion that belongs to no batch
Prompt = TypeVar("Prompt", bound=Hashable)


class DeadlyRequests(EngineError):
    """Engines died repeatedly with the same requests in progress, and no guilty prompt was found."""


class Search(Generic[Prompt]):
    """Binary search among prompts at which engines have died. Each trial has an engine to itself.

    The first trial is a prompt answered before: an engine that dies of it would die of any. Then come halves of the
    suspects, and the last suspect alone, because a death beside others does not convict it.

    Args:
        suspects: distinct prompts, at least one.
    """

    def __init__(self, suspects: Sequence[Prompt]) -> None:
        self.suspects = [*suspects]
        self.trial: list[Prompt] = []
        """Prompts to sample now; empty: the prompt answered before."""
        self.num_deaths = 0

    def answered(self) -> None:
        """Record an answered trial: none of its prompts is guilty. The search is over if no suspects are left."""
        self.suspects = [prompt for prompt in self.suspects if prompt not in self.trial]
        self._halve()

    def died(self) -> Prompt | None:
        """Record a death in the trial; return the guilty prompt, if it was alone.

        All other suspects are released: a second guilty one among them gets a search of its own.
        """
        self.num_deaths += 1
        if len(self.trial) == 1:
            self.suspects = []
            return self.trial[0]
        self.suspects = self.trial
        self._halve()
        return None

    def _halve(self) -> None:
        self.trial = self.suspects[: (len(self.suspects) + 1) // 2]


def prompt_of(sample: Sample | Request) -> bytes:
    """Key of a prompt: its tokens and its images."""
    return b"".join([sample.token_ids.tobytes(), *(digest(file).encode() for file in sample.pictures)])


class Trials:
    """Stage between a pool and its queue: holds back suspects, and everything else, during a search.

    Args:
        queue: queue of unsuspected chunks.
        unsent: the pool's samples by their first id; chunks are parts of samples.
        known_good: first trial until something has been answered.
    """

    def __init__(self, queue: RequestQueue, unsent: dict[int, Sample], known_good: Sample) -> None:
        self.known_good = known_good
        self.deadly: dict[bytes, str] = {}
        """Reason against sending, by prompt."""
        self._queue, self._unsent = queue, unsent
        self._search: Search[bytes] | None = None
        self._held: list[Chunk] = []
        self._under_way: set[int] = set()  # completions of the trial in an engine

    def refusal(self, request: Request, max_model_len: int) -> str | None:
        """Reason against sending a request; None: it may be sent."""
        if request.num_tokens >= max_model_len:
            held = f"the engine holds {max_model_len} with the completion (vllm_max_model_length)"
            return f"a prompt has {request.num_tokens} tokens; {held}"
        return self.deadly.get(prompt_of(request))

    def suspect(self, samples: Iterable[Sample]) -> None:
        """Suspect these samples: engines have died sampling them. Continues the present search, if there is one."""
        prompts = [prompt for prompt in dict.fromkeys(map(prompt_of, samples)) if prompt not in self.deadly]
        if self._search is None and prompts:
            self._search = Search(prompts)
            _log.warning("engines die of one of %d prompts, perhaps: they are tried", len(prompts), extra=FILE_ONLY)

    def add(self, chunks: Iterable[Chunk]) -> None:
        """Add chunks left unanswered by a lost engine, to be sampled again."""
        self._held += chunks
        self._let_go()

    def send(self) -> list[tuple[int, Sequence[int]]]:
        """Return completions as `RequestQueue.send`; during a search the next trial, for an idle engine."""
        if self._search is None:
            return self._queue.send()
        if self._under_way:
            return []
        chunks = [chunk for chunk in self._held if self._is_among(self._search.trial, chunk)]
        if not self._search.trial:
            # Its adapter may be gone.
            self._unsent[KNOWN_GOOD.start] = replace(self.known_good, ids=KNOWN_GOOD, adapter=None)
            chunks = [Chunk(ids=KNOWN_GOOD, tokens=0)]
        sent = self._queue.send_alone(chunks)
        if sent:
            self._held = [chunk for chunk in self._held if chunk not in chunks]
            self._under_way = {completion for chunk in chunks for completion in chunk.ids}
        return sent

    def take(self, ids: Sequence[int]) -> Sample:
        """Return the sample of completions from `send`; a cut-off rest becomes a sample of its own."""
        sample, num_sent = self._unsent.pop(ids[0]), len(ids)
        if rest := sample.ids[num_sent:]:
            self._unsent[rest.start] = replace(sample, ids=rest, seed=sample.seed + num_sent)
        return replace(sample, ids=sample.ids[:num_sent])

    def settle(self, completions: Iterable[int]) -> None:
        """Record that these are answered, or no longer wanted."""
        if self._search is None:
            return
        was_under_way = bool(self._under_way)
        self._under_way.difference_update(completions)
        self._held = [chunk for chunk in self._held if chunk.ids[0] in self._unsent]
        if was_under_way and not self._under_way:
            self._search.answered()
        self._let_go()

    def judge(self, owed: Mapping[int, Sample], error: EngineDied) -> str | None:
        """Judge the death of an engine with these unanswered samples.

        Returns:
            Reason why no prompt is guilty, if known by now.
        """
        if self._search is None or not self._under_way.intersection(owed):
            return None
        self._under_way.clear()
        if not self._search.trial:
            return "and then at one that had been answered before"
        error.is_requests_fault = True
        _log.warning("an engine died of a trial of %d prompts", len(self._search.trial), extra=FILE_ONLY)
        prompt = self._search.died()
        if prompt is not None:
            first_line = error.what.partition("\n")[0]
            length = len(next(iter(owed.values())).token_ids)
            self.deadly[prompt] = (
                f"engines die of a prompt of {length} tokens, which is not sampled again [GRPO-416]: {first_line}"
            )
        elif self._search.num_deaths == MAX_MORE_DEATHS:
            return f"and {MAX_MORE_DEATHS} times at parts of them"
        return None

    def interrupt(self, owed: Iterable[int]) -> None:
        """Repeat the trial: a living engine with these completions was replaced."""
        if self._under_way.intersection(owed):
            self._under_way.clear()

    def suspected(self) -> list[Sample]:
        """Samples held back."""
        suspects = [] if self._search is None else self._search.suspects
        return [self._unsent[chunk.ids[0]] for chunk in self._held if self._is_among(suspects, chunk)]

    def take_deadly(self) -> list[Sample]:
        """Remove and return waiting samples of guilty prompts."""
        waiting = [sample for sample in self._unsent.values() if sample.ids != KNOWN_GOOD]
        samples = [sample for sample in waiting if prompt_of(sample) in self.deadly]
        for sample in samples:
            del self._unsent[sample.ids.start]
            self._queue.forget(sample.ids)
        self._held = [chunk for chunk in self._held if chunk.ids[0] in self._unsent]
        return samples

    def _is_among(self, prompts: Sequence[bytes], chunk: Chunk) -> bool:
        return prompt_of(self._unsent[chunk.ids[0]]) in prompts

    def _let_go(self) -> None:
        """Release held chunks no longer suspected."""
        search = self._search
        while search is not None and search.trial and not self._under_way:
            if any(self._is_among(search.trial, chunk) for chunk in self._held):
                break
            search.answered()  # the trial is no longer wanted
        if search is not None and not search.suspects:
            self._search = search = None
            _log.warning("the search for a prompt is over: %d known", len(self.deadly), extra=FILE_ONLY)
        suspects = [] if search is None else search.suspects
        free = [chunk for chunk in self._held if not self._is_among(suspects, chunk)]
        self._held = [chunk for chunk in self._held if chunk not in free]
        self._queue.add(free)


def about_deadly(samples: Sequence[Sample], batches: Mapping[int, Batch], why: str, error: EngineDied) -> str:
    """Error text for a search without a guilty prompt.

    Args:
        samples: those at which engines died.
        batches: by completion id, of unanswered completions.
        why: reason for the end of the search.
    """
    completions = sorted({completion for sample in samples for completion in sample.ids} & batches.keys())
    names = " and ".join(sorted({batches[completion].name for completion in completions}))
    rows = [completion - batches[completion].ids.start for completion in completions]
    tokens = sorted({len(sample.token_ids) for sample in samples if sample.ids != KNOWN_GOOD})
    return (
        f"engines died again and again at work on the same completions, {why}: rows {rows} of {names}, with prompts of "
        f"{tokens} tokens [GRPO-410]; the last one: {error}"
    )
