"""What evaluation makes of the rewards of a prompt's completions: pass@k and avg@n."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np


def best_of(rewards: np.ndarray, k: int) -> np.ndarray:
    """The best of k completions in the mean over all ways to choose k of the n that there are. [prompts] float64.

    Of rewards that are 0 or 1 this is the unbiased estimate of pass@k, `1 - C(n - c, k) / C(n, k)` with c that are
    right (Chen et al., https://arxiv.org/abs/2107.03374, section 2.1).

    Args:
        rewards: [prompts, n].
        k: 1 to n.

    Example:
        >>> best_of(np.array([[0.0, 1.0, 0.0, 0.0]]), 2)
        array([0.5])
    """
    n = rewards.shape[1]
    # The i-th smallest, from 0, is the best of those C(i, k - 1) choices whose others are all below it.
    weights = np.array([math.comb(i, k - 1) / math.comb(n, k) for i in range(n)])
    return np.sort(rewards.astype(np.float64), axis=1) @ weights


@dataclass(kw_only=True, eq=False)
class Passes:
    """Rewards of one evaluation, batch by batch; the same on every rank.

    Args:
        names: of the reward functions.
        weights: [functions], of their sum.
        num_generations: completions of a prompt, which are neighbours.
        at: the k of pass@k.
        pass_reward: from which on a completion counts as right; None: rewards count as they are.
        num_rows: completions that there are to score; what comes beyond them fills up the last batch. None: unknown.
    """

    names: Sequence[str]
    weights: np.ndarray
    num_generations: int
    at: Sequence[int]
    pass_reward: float | None = None
    num_rows: int | None = None
    _batches: list[np.ndarray] = field(default_factory=list)

    def add(self, rewards: np.ndarray) -> None:
        """[completions, functions], of all ranks in the order of rows; NaN: no reward."""
        self._batches.append(rewards)

    def metrics(self) -> Mapping[str, float]:
        """By name, `pass@k` and `avg@n`; with several functions also of each, below `rewards/<name>/`.

        A completion without a reward has 0, as in TRL's sum. {} where nothing was scored.
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
