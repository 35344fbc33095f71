"""Whether engines know what they sampled: a log-probability that is no finite number says nothing of its token."""

from collections import Counter

import numpy as np

MAX_SHARE = 0.01
"""Of an engine's tokens since the last report. A sound engine has none at all. TRL trains on such a token as if engine
and trainer agreed on it (1.16), which a hundredth of a batch bears; an engine whose weights or kernels are broken has
nothing else."""


class FiniteCheck:
    """Counts the log-probabilities of a node's engines that are not finite.

    Args:
        node: of the engines.
    """

    def __init__(self, node: int) -> None:
        self._node = node
        self._tokens: Counter[int] = Counter()  # by engine
        self._not_finite: Counter[int] = Counter()

    def note(self, engine: int, logprobs: np.ndarray) -> None:
        """Of a completion."""
        self._tokens[engine] += len(logprobs)
        self._not_finite[engine] += len(logprobs) - int(np.isfinite(logprobs).sum())

    def take(self) -> tuple[int, str | None]:
        """How many there were since the last call, and what is wrong with the worst engine, where they are too many."""
        tokens, self._tokens = self._tokens, Counter()
        counts, self._not_finite = self._not_finite, Counter()
        shares = {engine: counts[engine] / tokens[engine] for engine in tokens if tokens[engine]}
        worst = max(shares, key=lambda engine: shares[engine], default=None)
        if worst is None or shares[worst] <= MAX_SHARE:
            return counts.total(), None
        return counts.total(), (
            f"engine {worst} of node {self._node} gave {counts[worst]} of {tokens[worst]} tokens log-probabilities "
            f"that are no finite numbers; more than {MAX_SHARE:.0%} end the job [GRPO-417]"
        )
