"""Requests that were submitted together, and what came of them so far."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from grpo.engine.messages import Sampled
from grpo.rollout.packing import REFUSED, Completions, pack_completions


@dataclass(slots=True, eq=False, kw_only=True)
class Batch:
    """Requests that were submitted together."""

    ids: range
    """Of their completions, in the order of the requests."""
    name: str
    """For messages."""
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
    policy_versions: dict[int, int] = field(default_factory=dict)
    """As in `Completions`, by completion id."""

    def add(self, answer: Sampled, *, engine: int, policy_version: int) -> None:
        """What came of one of them; of a refusal, from whom does not count."""
        completion = answer.completion_id
        self.answers[completion] = answer
        self.engines[completion] = REFUSED if answer.is_refusal else engine
        self.policy_versions[completion] = REFUSED if answer.is_refusal else policy_version

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

    def completions(self) -> Completions:
        """Of all requests, in their order."""
        answers = [self.answers[completion] for completion in self.ids]
        return pack_completions(
            [answer.token_ids for answer in answers],
            [answer.engine_logprobs for answer in answers],
            [self.policy_versions[completion] for completion in self.ids],
            [self.engines[completion] for completion in self.ids],
        )
