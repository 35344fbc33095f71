"""Requests that were submitted together, and what came of them so far."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from grpo.engine.messages import Sampled
from grpo.rollout.ages import Age, Moment
from grpo.rollout.packing import REFUSED, Completions, pack_completions
from grpo.rollout.report import Newer


@dataclass(slots=True, eq=False, kw_only=True)
class Batch:
    """Requests that were submitted together."""

    ids: range
    """Of their completions, in the order of the requests."""
    name: str
    """For messages."""
    submitted: Moment = field(default_factory=Moment)
    """Where the engines stood then."""
    order: int = 0
    """Its completions are sent before those of a batch with a higher one."""
    on_done: Callable[["Batch"], None] | None = None
    """Called once, when it is finished, by whichever thread finds that out; must not wait."""
    submitted_at: float = field(default_factory=time.monotonic)
    asked_at: float = field(default_factory=time.monotonic)
    """time.monotonic() when engines were last given all that was left of it."""
    finished_at: float = math.inf
    """When the last answer came."""
    answers: dict[int, Sampled] = field(default_factory=dict)
    """By completion id."""
    engines: dict[int, int] = field(default_factory=dict)
    """As in `Completions`, by completion id."""
    ages: dict[int, Age] = field(default_factory=dict)
    """By completion id, but of refused ones."""

    def add(self, answer: Sampled, *, engine: int = REFUSED, age: Age | None = None) -> None:
        """What came of one of them; of a refusal, from whom does not count."""
        completion = answer.completion_id
        self.answers[completion] = answer
        self.engines[completion] = REFUSED if answer.is_refusal else engine
        if age is not None and not answer.is_refusal:
            self.ages[completion] = age

    def refuse(self, completion: int, why: str) -> None:
        """No engine is given this one."""
        none = np.empty(0)
        self.add(Sampled(completion_id=completion, token_ids=none, engine_logprobs=none, error=why, is_refusal=True))

    @property
    def policy_versions(self) -> dict[int, int]:
        """As in `Completions`, by completion id."""
        return {
            completion: self.ages[completion].first.step if completion in self.ages else REFUSED
            for completion in self.answers
        }

    @property
    def is_finished(self) -> bool:
        return self.finished_at < math.inf

    @property
    def seconds(self) -> float:
        """From its submission to its last answer."""
        return self.finished_at - self.submitted_at

    @property
    def refusals(self) -> list[str]:
        """Why, of each that was refused, in their order; of a batch that is finished."""
        answers = [self.answers[completion] for completion in self.ids]
        return [str(answer.error) for answer in answers if answer.is_refusal]

    @property
    def newer(self) -> Newer:
        """By how much newer the policies are that have sampled it than when it was submitted."""
        begun = [age.first.pushes - self.submitted.pushes for age in self.ages.values()]
        num_tokens = sum(len(answer.token_ids) for answer in self.answers.values() if not answer.is_refusal)
        return Newer(
            versions=sum(begun),
            steps=sum(age.first.step - self.submitted.step for age in self.ages.values()),
            token_versions=sum(age.token_pushes for age in self.ages.values()) - num_tokens * self.submitted.pushes,
            least=min(begun, default=0),
        )

    def completions(self) -> Completions:
        """Of all requests, in their order."""
        answers = [self.answers[completion] for completion in self.ids]
        policy_versions = self.policy_versions
        return pack_completions(
            [answer.token_ids for answer in answers],
            [answer.engine_logprobs for answer in answers],
            [policy_versions[completion] for completion in self.ids],
            [self.engines[completion] for completion in self.ids],
        )
