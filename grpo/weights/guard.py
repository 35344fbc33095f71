"""Guard on sampled tokens: compares log-probabilities of engine and trainer on each training batch.

The verification of a weight sync scores a few random tokens, and not after every sync. The guard covers every batch, at
real lengths and no cost. One limit does not fit all models: kernels, dtypes and sampling cut-offs separate the two
sides from the start. So each node is compared with its own start.
"""

import statistics
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

REFERENCE_BATCHES = 20
IN_A_ROW = 3  # batches: a single one may contain a few odd tokens

# Limits on the rise of a gap. Over 150 steps of the demo it changes by less than half (0.004 to 0.008 nats in bfloat16,
# three seeds). A rise below the least changes importance ratios by a hundredth, and is no alarm in float32.
FACTOR = 3.0
LEAST_RISE = 0.01  # nats

GapSums = Mapping[int, tuple[float, int]]
"""Sum of absolute differences of log-probabilities, in nats, and number of tokens, by sampling node.

Example:
    {0: (12.5, 2048), 1: (11.9, 1990)}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """A drift of one node's engines away from the trainer."""

    node: int
    gap: float
    """Mean gap of the last `IN_A_ROW` batches, in nats like the others."""
    reference: float
    """Gap after the last full weight sync."""
    limit: float
    """Limit exceeded by each of the last batches."""


def gaps_by_node(of_ranks: Iterable[GapSums]) -> dict[int, float]:
    """Mean absolute difference over all tokens of each node, in nats; nodes without tokens are left out."""
    sums: dict[int, tuple[float, int]] = {}
    for of_rank in of_ranks:
        for node, (difference, tokens) in of_rank.items():
            before, counted = sums.get(node, (0.0, 0))
            sums[node] = (before + difference, counted + tokens)
    return {node: difference / tokens for node, (difference, tokens) in sorted(sums.items()) if tokens}


class LogprobGuard:
    """Compares each node's gap with that of the `REFERENCE_BATCHES` batches after the last full weight sync.

    The reference is fixed until the next full sync: a rolling one would follow a slow drift. It is the lower quartile
    of these batches, so a fault starting among them does not raise it. With a reference of 0.012 nats, three batches in
    a row above 0.036 are a drift; with 1e-6 (float32), three above 0.01.
    """

    def __init__(self, num_alarms: int = 0) -> None:
        self.num_alarms = num_alarms
        self._references: defaultdict[int, list[float]] = defaultdict(list)
        self._latest: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=IN_A_ROW))

    def restarted(self) -> "LogprobGuard":
        """Return a guard that takes new references: all engines have received all weights."""
        return LogprobGuard(self.num_alarms)

    def judge(self, gaps: Mapping[int, float]) -> list[Drift]:
        """Add one batch: each node's gap, in nats, of rows sampled with the present weights.

        Returns:
            The drifted nodes; together they count as one alarm.
        """
        drifts = []
        for node, gap in gaps.items():
            reference = self._references[node]
            if len(reference) < REFERENCE_BATCHES:
                reference.append(gap)
                continue
            latest = self._latest[node]
            latest.append(gap)
            usual = statistics.quantiles(reference, n=4)[0]
            limit = max(FACTOR * usual, usual + LEAST_RISE)
            if len(latest) == IN_A_ROW and min(latest) > limit:
                drifts.append(Drift(node=node, gap=statistics.fmean(latest), reference=usual, limit=limit))
        self.num_alarms += bool(drifts)
        return drifts
