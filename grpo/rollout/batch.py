"""Requests submitted together, and their results so far."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from grpo.engine.messages import Begun, Sample, Sampled
from grpo.rollout.ages import Age, Moment
from grpo.rollout.packing import REFUSED, UNFINISHED, Completions, Request, pack_completions, seed_behind, to_arrays
from grpo.rollout.partial import Kept
from grpo.rollout.queue import ranges
from grpo.rollout.report import Newer


@dataclass(slots=True, eq=False, kw_only=True)
class Batch:
    """Requests submitted together."""

    ids: range
    """Ids of their completions, in the order of the requests."""
    name: str
    """Name for messages."""
    submitted: Moment = field(default_factory=Moment)
    """Policy version of the engines at submission."""
    order: int = 0
    """Priority: its completions are sent before those of a batch with a higher order."""
    on_done: Callable[["Batch"], None] | None = None
    """Called once it is finished, by the thread that notices; must not wait."""
    submitted_at: float = field(default_factory=time.monotonic)
    asked_at: float = field(default_factory=time.monotonic)
    """Time of the last (re)submission to engines, by time.monotonic()."""
    finished_at: float = math.inf
    """Time of the last answer."""
    answers: dict[int, Sampled] = field(default_factory=dict)
    """Answers by completion id."""
    engines: dict[int, int] = field(default_factory=dict)
    """Engines as in `Completions`, by completion id."""
    ages: dict[int, Age] = field(default_factory=dict)
    """Ages by completion id, except for refused ones."""
    resumed: Moment | None = None
    """Policy version of the engines when it was resumed."""
    begun: dict[int, tuple[Begun, Moment]] = field(default_factory=dict)
    """Unfinished completions from a checkpoint, and their start, by completion id."""

    def add(self, answer: Sampled, *, engine: int = REFUSED, age: Age | None = None) -> None:
        """Add a result; the engine of a refusal is not recorded."""
        completion = answer.completion_id
        self.answers[completion] = answer
        self.engines[completion] = REFUSED if answer.is_refusal else engine
        if age is not None and not answer.is_refusal:
            self.ages[completion] = age

    def refuse(self, completion: int, why: str) -> None:
        """Refuse a completion without sending it."""
        none = np.empty(0)
        self.add(Sampled(completion_id=completion, token_ids=none, engine_logprobs=none, error=why, is_refusal=True))

    def resume(self, kept: Kept, now: Moment) -> None:
        """Continue from a checkpoint, before anything is sampled. All tokens of a kept completion count with the policy
        version of its first one."""
        self.resumed = now
        self.submitted = kept.moment(kept.step, now)
        found = kept.completions
        rows = zip(self.ids, *to_arrays(found), found.policy_versions.tolist(), found.engines.tolist(), strict=True)
        for completion, token_ids, logprobs, step, engine in rows:
            begun = Begun(token_ids=token_ids, engine_logprobs=logprobs, is_whole=engine != UNFINISHED)
            if not begun.is_whole:
                if len(token_ids):
                    self.begun[completion] = begun, kept.moment(step, now)
                continue
            answer = Sampled(completion_id=completion, token_ids=token_ids, engine_logprobs=logprobs)
            first = kept.moment(step, now)
            self.add(answer, engine=engine, age=Age(first=first, token_syncs=first.syncs * len(token_ids)))

    def samples(self, request: Request, ids: range, *, num_engines: int) -> Iterator[Sample]:
        """Yield messages to engines for a request's missing completions; those already begun one by one.

        Args:
            ids: of all completions of the request.
            num_engines: of the node; a message requests at most an engine's share of the batch.
        """
        fair_share = -(-len(self.ids) // num_engines)  # a larger part would leave an engine idle
        share = 1 if request.overrides.get("temperature") == 0 else fair_share  # vLLM: one at a time (0.31)
        prompt: dict[str, Any] = {"token_ids": request.token_ids, "overrides": dict(request.overrides)}
        prompt |= {"pictures": request.pictures, "expanded": request.expanded}
        missing = [completion for completion in ids if completion not in self.answers]
        for run in ranges(completion for completion in missing if completion not in self.begun):
            for first in range(0, len(run), share):
                part = run[first : first + share]
                seed = request.seed + part.start - ids.start
                yield Sample(ids=part, seed=seed, **prompt)
        for completion in missing:
            if completion in self.begun:
                one, (begun, _) = range(completion, completion + 1), self.begun[completion]
                seed = seed_behind(request.seed + completion - ids.start, len(begun.token_ids))
                yield Sample(ids=one, seed=seed, begun=begun, **prompt)

    def begins(self, completion: int, adapter: int | None) -> Moment | None:
        """Policy version recorded for its tokens; None: the present one."""
        if completion in self.begun:
            return self.begun[completion][1]
        return None if adapter is None else self.resumed or self.submitted

    def so_far(self, begun: Mapping[int, tuple[Begun, int, int]]) -> Completions:
        """Return the completions of all requests, in order, in their present state: finished, begun or empty.

        Args:
            begun: tokens, policy version and engine of completions in progress, by completion id.
        """
        rows = []
        policy_versions = self.policy_versions
        nothing = Begun(token_ids=np.empty(0, np.int32), engine_logprobs=np.empty(0, np.float32))
        for completion in self.ids:
            if (answer := self.answers.get(completion)) is not None:
                engine = self.engines[completion]
                rows.append((answer.token_ids, answer.engine_logprobs, policy_versions[completion], engine))
                continue
            held, version, engine = begun.get(completion, (nothing, UNFINISHED, UNFINISHED))
            rows.append((held.token_ids, held.engine_logprobs, version, engine if held.is_whole else UNFINISHED))
        return pack_completions(*zip(*rows, strict=True)) if rows else pack_completions([], [], [], [])

    @property
    def policy_versions(self) -> dict[int, int]:
        """Policy versions as in `Completions`, by completion id."""
        return {
            completion: self.ages[completion].first.step if completion in self.ages else REFUSED
            for completion in self.answers
        }

    @property
    def is_finished(self) -> bool:
        return self.finished_at < math.inf

    @property
    def seconds(self) -> float:
        """Duration from its submission to its last answer."""
        return self.finished_at - self.submitted_at

    @property
    def refusals(self) -> list[str]:
        """Reason of each refusal, in order; for a finished batch."""
        answers = [self.answers[completion] for completion in self.ids]
        return [str(answer.error) for answer in answers if answer.is_refusal]

    @property
    def newer(self) -> Newer:
        """Policy versions gained between submission and sampling."""
        begun = [age.first.syncs - self.submitted.syncs for age in self.ages.values()]
        num_tokens = sum(len(answer.token_ids) for answer in self.answers.values() if not answer.is_refusal)
        return Newer(
            versions=sum(begun),
            steps=sum(age.first.step - self.submitted.step for age in self.ages.values()),
            token_versions=sum(age.token_syncs for age in self.ages.values()) - num_tokens * self.submitted.syncs,
            least=min(begun, default=0),
        )

    def completions(self) -> Completions:
        """Return the completions of all requests, in order."""
        answers = [self.answers[completion] for completion in self.ids]
        policy_versions = self.policy_versions
        return pack_completions(
            [answer.token_ids for answer in answers],
            [answer.engine_logprobs for answer in answers],
            [policy_versions[completion] for completion in self.ids],
            [self.engines[completion] for completion in self.ids],
        )
