"""Evaluation metrics over the completions of a prompt: pass@k and avg@n."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np


def best_of(rewards: np.ndarray, k: int) -> np.ndarray:
    """Expected best of k completions, over all choices of k out of n. [prompts] float64.

    For rewards of 0 and 1 this is the unbiased estimate of pass@k, `1 - C(n - c, k) / C(n, k)` with c correct ones
    (Chen et al., https://arxiv.org/abs/2107.03374, section 2.1).

    Args:
        rewards: [prompts, n].
        k: 1 to n.

    Example:
        >>> best_of(np.array([[0.0, 1.0, 0.0, 0.0]]), 2)
        array([0.5])
    """
    n = rewards.shape[1]
    # The i-th smallest, from 0, is the best in C(i, k - 1) choices: those with all others below it.
    weights = np.array([math.comb(i, k - 1) / math.comb(n, k) for i in range(n)])
    return np.sort(rewards.astype(np.float64), axis=1) @ weights


@dataclass(kw_only=True, eq=False)
class Passes:
    """Rewards of one evaluation, batch by batch; the same on every rank.

    Args:
        names: of the reward functions.
        weights: [functions], of their sum.
        num_generations: completions of a prompt, adjacent.
        at: values of k in pass@k.
        pass_reward: least reward of a correct completion; None: rewards are used as they are.
        num_rows: number of completions to score; later ones pad the last batch. None: unknown.
    """

    names: Sequence[str]
    weights: np.ndarray
    num_generations: int
    at: Sequence[int]
    pass_reward: float | None = None
    num_rows: int | None = None
    _batches: list[np.ndarray] = field(default_factory=list)

    def add(self, rewards: np.ndarray) -> None:
        """Add [completions, functions] rewards of all ranks, in the order of rows; NaN: no reward."""
        self._batches.append(rewards)

    def metrics(self) -> Mapping[str, float]:
        """Compute `pass@k` and `avg@n`, by name; with several functions also for each, under `rewards/<name>/`.

        A completion without a reward counts as 0, as in TRL's sum. {} if nothing was scored.
        """
        rows = np.concatenate(self._batches)[: self.num_rows] if self._batches else np.empty((0, len(self.names)))
        rows = np.nan_to_num(rows[: len(rows) // self.num_generations * self.num_generations])
        if not len(rows):
            return {}
        found = self._of("", rows @ self.weights)
        if len(self.names) > 1:
            for number, name in enumerate(self.names):
                found |= self._of(f"rewards/{name}/", rows[:, number])
        return found

    def _of(self, prefix: str, rewards: np.ndarray) -> dict[str, float]:
        groups = rewards.reshape(-1, self.num_generations)
        counted = groups if self.pass_reward is None else (groups >= self.pass_reward).astype(np.float64)
        passes = {f"{prefix}pass@{k}": float(best_of(counted, k).mean()) for k in self.at}
        return {**passes, f"{prefix}avg@{self.num_generations}": float(groups.mean())}
