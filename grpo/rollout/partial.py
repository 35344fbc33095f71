"""Batches that were under way when a checkpoint was made, and how engines go on with them.

Partial rollouts, as Kimi k1.5 has them (https://arxiv.org/abs/2501.12599, section 2.6.2), over the end of a process.
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

SO_FAR_S = 20.0  # of an engine, for what it has by now


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Kept:
    """A batch that was under way when a checkpoint was made."""

    completions: Completions
    """Of all its rows; see `Batch.so_far`."""
    step: int
    """Optimizer steps of the weights when it was submitted."""
    lag: int
    """Policy versions between those weights and the ones with which training goes on."""

    def moment(self, step: int, now: Moment) -> Moment:
        """When the weights of `step` came, as weight syncs count now. Each has come as many steps after the one
        before."""
        share = (step - self.step) / (now.step - self.step) if now.step > self.step else 0
        return Moment(step=step, syncs=now.syncs - self.lag + round(self.lag * share))


def ask_engines(clients: Sequence[EngineLike]) -> dict[int, tuple[Begun, int]]:
    """By completion id: the tokens of those that engines are at work on, and which engine."""
    found: dict[int, tuple[Begun, int]] = {}
    for engine, client in enumerate(clients):
        try:
            found |= {each: (begun, engine) for each, begun in client.call("so_far", SO_FAR_S).items()}
        except EngineError as error:  # it is dead, or will be found so: others sample again what it had begun
            _log.warning("nothing is kept of what engine %d is at work on: %s", engine, error)
    return found
