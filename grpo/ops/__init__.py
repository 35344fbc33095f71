"""Tools to run before, around and after a job: one package per command, and the code of `train.py`.

Only the command line imports it; nothing of the trainer does. Commands must not know each other; shared code is in
packages below them.
"""

from collections.abc import Sequence

MOST_AHEAD = 8
"""Largest recommended `generation_lookahead`: each further batch makes completions one weight sync older."""


def first_and_last(steps: Sequence[int], values: Sequence[float], *, end: int) -> tuple[float, float]:
    """Start and end of a metric over a run: means over the first and the last steps until `end` (`windows`).

    Args:
        steps: of the logs with this metric, in order; at least one. With few logs the first and the last one count.
    """
    points = list(zip(steps, values, strict=True))
    num_first, num_last = windows(end)
    first = [value for step, value in points if step <= max(num_first, steps[0])]
    last = [value for step, value in points if step > min(end - num_last, steps[-1] - 1)]
    return sum(first) / len(first), sum(last) / len(last)


def windows(end: int) -> tuple[int, int]:
    """Numbers of first and last steps of a run: 10 and 20; in less than 30 steps a third and the rest."""
    first = max(1, min(10, end // 3))
    return first, max(1, min(20, end - first))
