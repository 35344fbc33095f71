"""The guard on real tokens: log-probabilities of engine and trainer, of what was sampled and is trained on.

The verification of a weight sync scores a few random tokens, and not after every sync. These come with every batch,
at their real lengths, and cost nothing. They cannot be held to one figure for all models: kernels, dtypes and what
sampling cuts off set the two sides apart from the start, so each node is held to its own beginning.
"""

import statistics
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

REFERENCE_BATCHES = 20
IN_A_ROW = 3  # batches: one alone may hold a few odd tokens

# How far a gap may rise. Over 150 steps of the demo it moves by less than half (0.004 to 0.008 nats in bfloat16, three
# seeds). A rise below the least changes importance ratios by a hundredth, and is no alarm in float32.
FACTOR = 3.0
LEAST_RISE = 0.01  # nats

GapSums = Mapping[int, tuple[float, int]]
"""By the node that sampled: absolute differences of log-probabilities, in nats, added up, and over how many tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """The engines of one node have moved away from the trainer."""

    node: int
    gap: float
    """Mean of the last `IN_A_ROW` batches, in nats, as the others."""
    reference: float
    """What it was after the last full weight sync."""
    limit: float
    """Above which each of the last batches was."""


def gaps_by_node(of_ranks: Iterable[GapSums]) -> dict[int, float]:
    """The mean absolute difference over all tokens of each node, in nats; nodes without a token are left out."""
    sums: dict[int, tuple[float, int]] = {}
    for of_rank in of_ranks:
        for node, (difference, tokens) in of_rank.items():
            before, counted = sums.get(node, (0.0, 0))
            sums[node] = (before + difference, counted + tokens)
    return {node: difference / tokens for node, (difference, tokens) in sorted(sums.items()) if tokens}


class LogprobGuard:
    """Holds each node's gap to what it was in the `REFERENCE_BATCHES` batches after the last full weight sync.

    The reference stays as it is until the next one: what drifts slowly would carry a rolling one along. It is the lower
    quartile of these batches, which a fault that begins among them does not raise. With one of 0.012 nats three batches
    in a row above 0.036 are a drift; with one of 1e-6 (float32) three above 0.01.
    """

    def __init__(self, num_alarms: int = 0) -> None:
        self.num_alarms = num_alarms
        self._references: defaultdict[int, list[float]] = defaultdict(list)
        self._latest: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=IN_A_ROW))

    def restarted(self) -> "LogprobGuard":
        """One that takes new references: all engines have got all weights."""
        return LogprobGuard(self.num_alarms)

    def judge(self, gaps: Mapping[int, float]) -> list[Drift]:
        """Take one batch: each node's gap, in nats, of rows that the present weights have sampled.

        Returns:
            The nodes that have drifted, which count as one alarm.
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
