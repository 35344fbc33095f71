"""Which prompt ends any engine that samples it: how it is searched for, and what is sent meanwhile; without threads."""

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
KNOWN_GOOD = range(-1, 0)  # the id of a completion that belongs to no batch
Prompt = TypeVar("Prompt", bound=Hashable)


class DeadlyRequests(EngineError):
    """Engines died again and again with the same requests in flight, and no prompt was found to be to blame."""


class Search(Generic[Prompt]):
    """One search among prompts at which engines have died. Each trial has an engine to itself.

    The first trial is a prompt that was answered before: who dies of that one would die of any. Then come halves of
    the suspects, and the last of them alone: dying beside others proves nothing.

    Args:
        suspects: different prompts, at least one.
    """

    def __init__(self, suspects: Sequence[Prompt]) -> None:
        self.suspects = [*suspects]
        self.trial: list[Prompt] = []
        """What is to be sampled now; nothing: the prompt that was answered before."""
        self.num_deaths = 0

    def answered(self) -> None:
        """The trial was: none of its prompts is to blame. It is over where no suspects are left."""
        self.suspects = [prompt for prompt in self.suspects if prompt not in self.trial]
        self._halve()

    def died(self) -> Prompt | None:
        """The engine has died of the trial: the prompt that is to blame, where there is only one in it.

        All other suspects are let go: if there is a second one among them, it is searched for by itself.
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
    """Its tokens and its images."""
    return b"".join([sample.token_ids.tobytes(), *(digest(file).encode() for file in sample.pictures)])


class Trials:
    """Stands between a pool and its queue: holds back what is suspected while a search is on, and all else with it.

    Args:
        queue: where what is not suspected waits.
        unsent: the pool's, by the first of their ids: what chunks are of.
        known_good: tried first until something has been answered.
    """

    def __init__(self, queue: RequestQueue, unsent: dict[int, Sample], known_good: Sample) -> None:
        self.known_good = known_good
        self.deadly: dict[bytes, str] = {}
        """By prompt: why no engine is given it again."""
        self._queue, self._unsent = queue, unsent
        self._search: Search[bytes] | None = None
        self._held: list[Chunk] = []
        self._under_way: set[int] = set()  # completions of the trial that an engine is at

    def refusal(self, request: Request, max_model_len: int) -> str | None:
        """Why no engine is given it; None: one may be."""
        if request.num_tokens >= max_model_len:
            held = f"the engine holds {max_model_len} with the completion (vllm_max_model_length)"
            return f"a prompt has {request.num_tokens} tokens; {held}"
        return self.deadly.get(prompt_of(request))

    def suspect(self, samples: Iterable[Sample]) -> None:
        """Engines have died at work on these. Goes on with the search that is on, if there is one."""
        prompts = [prompt for prompt in dict.fromkeys(map(prompt_of, samples)) if prompt not in self.deadly]
        if self._search is None and prompts:
            self._search = Search(prompts)
            _log.warning("engines die of one of %d prompts, perhaps: they are tried", len(prompts), extra=FILE_ONLY)

    def add(self, chunks: Iterable[Chunk]) -> None:
        """Chunks that an engine has not answered, to be sampled again."""
        self._held += chunks
        self._let_go()

    def send(self) -> list[tuple[int, Sequence[int]]]:
        """As `RequestQueue.send`; while a search is on, the next trial, to an engine that holds nothing else."""
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
        """Of the completions that `send` gives out the sample; what was cut off is one of its own then."""
        sample, num_sent = self._unsent.pop(ids[0]), len(ids)
        if rest := sample.ids[num_sent:]:
            self._unsent[rest.start] = replace(sample, ids=rest, seed=sample.seed + num_sent)
        return replace(sample, ids=sample.ids[:num_sent])

    def settle(self, completions: Iterable[int]) -> None:
        """These are answered, or no longer wanted."""
        if self._search is None:
            return
        was_under_way = bool(self._under_way)
        self._under_way.difference_update(completions)
        self._held = [chunk for chunk in self._held if chunk.ids[0] in self._unsent]
        if was_under_way and not self._under_way:
            self._search.answered()
        self._let_go()

    def judge(self, owed: Mapping[int, Sample], error: EngineDied) -> str | None:
        """An engine is gone, which owed these.

        Returns:
            Why no prompt is to blame, if that is known now.
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
                f"engines die of a prompt of {length} tokens, which none is given again [GRPO-416]: {first_line}"
            )
        elif self._search.num_deaths == MAX_MORE_DEATHS:
            return f"and {MAX_MORE_DEATHS} times at parts of them"
        return None

    def interrupt(self, owed: Iterable[int]) -> None:
        """An engine was replaced that lived, and owed these: the trial is made once more."""
        if self._under_way.intersection(owed):
            self._under_way.clear()

    def suspected(self) -> list[Sample]:
        """What is held back."""
        suspects = [] if self._search is None else self._search.suspects
        return [self._unsent[chunk.ids[0]] for chunk in self._held if self._is_among(suspects, chunk)]

    def take_deadly(self) -> list[Sample]:
        """What waits, and is given to no engine."""
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
        """What is held and not suspected any more waits with all else."""
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
    """The cause, where the search has ended without a prompt.

    Args:
        samples: that engines died at work on.
        batches: by completion id, of what is unanswered.
        why: the search has ended.
    """
    completions = sorted({completion for sample in samples for completion in sample.ids} & batches.keys())
    names = " and ".join(sorted({batches[completion].name for completion in completions}))
    rows = [completion - batches[completion].ids.start for completion in completions]
    tokens = sorted({len(sample.token_ids) for sample in samples if sample.ids != KNOWN_GOOD})
    return (
        f"engines died again and again at work on the same completions, {why}: rows {rows} of {names}, with prompts of "
        f"{tokens} tokens [GRPO-410]; the last one: {error}"
    )
