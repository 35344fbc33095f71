"""Requests that were submitted together, and what came of them so far."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from grpo.engine.messages import Sampled
from grpo.rollout.packing import Completions, Request, pack_completions


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
    policy_versions: dict[int, int] = field(default_factory=dict)
    """As in `Completions`, by completion id."""
    engines: dict[int, int] = field(default_factory=dict)
    """As in `Completions`, by completion id."""
    refusals: dict[int, str] = field(default_factory=dict)
    """Why, by completion id."""
    asked_at: float = 0.0
    """time.monotonic() when engines were last given all that was left of it."""
    finished_at: float = math.inf
    """When the last answer came."""
    name: str = "this node's generation batch"
    on_done: Callable[["Batch"], None] | None = None
    """Called once, when it is finished, by whichever thread finds that out; must not wait."""

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
        return pack_completions(
            [answer.token_ids for answer in answers],
            [answer.engine_logprobs for answer in answers],
            [self.policy_versions[completion] for completion in self.ids],
            [self.engines[completion] for completion in self.ids],
        )
