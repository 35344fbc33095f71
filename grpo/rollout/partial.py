"""Partial rollouts: batches in progress at a checkpoint, and their continuation by engines after a resume.

Partial rollouts as in Kimi k1.5 (https://arxiv.org/abs/2501.12599, section 2.6.2), beyond the end of a process.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from grpo.engine.client import EngineError
from grpo.engine.like import EngineLike
from grpo.engine.messages import Begun
from grpo.rollout.ages import Moment
from grpo.rollout.packing import Completions

_log = logging.getLogger(__name__)

SO_FAR_S = 20.0  # for an engine to return its completions so far


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Kept:
    """A batch in progress at a checkpoint."""

    completions: Completions
    """Completions of all its rows; see `Batch.so_far`."""
    step: int
    """Optimizer steps of the weights at submission."""
    lag: int
    """Policy versions between those weights and the ones at the resume."""

    def moment(self, step: int, now: Moment) -> Moment:
        """Estimate the time of the weights of `step` in present weight syncs, assuming equal steps between syncs."""
        share = (step - self.step) / (now.step - self.step) if now.step > self.step else 0
        return Moment(step=step, syncs=now.syncs - self.lag + round(self.lag * share))


def ask_engines(clients: Sequence[EngineLike]) -> dict[int, tuple[Begun, int]]:
    """Tokens so far of completions in progress, and their engine, by completion id."""
    found: dict[int, tuple[Begun, int]] = {}
    for engine, client in enumerate(clients):
        try:
            found |= {each: (begun, engine) for each, begun in client.call("so_far", SO_FAR_S).items()}
        except EngineError as error:  # it is dead or dying: other engines sample its completions again
            _log.warning("nothing is kept of what engine %d is at work on: %s", engine, error)
    return found
