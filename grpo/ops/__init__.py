"""What a person runs before, around and after a job: one package for each command, and what `train.py` runs.

The command line alone imports it, and nothing of the trainer does.
Commands must not know each other; what two of them share stands below them.
"""

from collections.abc import Sequence

MOST_AHEAD = 8
"""The largest `generation_lookahead` that is advised: each batch more makes completions one weight sync older."""


def first_and_last(steps: Sequence[int], values: Sequence[float], *, end: int) -> tuple[float, float]:
    """How a metric of a run began and ended: its means over the first steps and over the last until `end` (`windows`).

    Args:
        steps: of the logs that have it, in order; at least one. Of few logs the first and the last one count.
    """
    points = list(zip(steps, values, strict=True))
    num_first, num_last = windows(end)
    first = [value for step, value in points if step <= max(num_first, steps[0])]
    last = [value for step, value in points if step > min(end - num_last, steps[-1] - 1)]
    return sum(first) / len(first), sum(last) / len(last)


def windows(end: int) -> tuple[int, int]:
    """How many steps are a run's first and last ones: 10 and 20; of less than 30 steps a third and the rest."""
    first = max(1, min(10, end // 3))
    return first, max(1, min(20, end - first))
