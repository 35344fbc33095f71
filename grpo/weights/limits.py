"""How far engine and trainer may be apart when a weight sync is verified, and what follows where they are further.

All gaps are absolute differences of natural-log probabilities, in nats. Figures that others have seen in bfloat16 with
the same weights on both sides: dense 7B 0.02 to 0.05 in the mean (Fast-LLM's pull request 525, vllm #18352; 0.002 all
in float32, on GPUs); with routers 0.03 to 0.06 (slime, verl-omni #637), and for DeepSeek-V4-Flash 0.37 with 3.6 at
most, 0.14 and 0.54 of it where both sides route alike (miles #2722). They are of ordinary text; the random half of the
probe has less likely tokens, whose log-probabilities are rounded two or three times as coarsely.
"""

from enum import StrEnum

import numpy as np
import torch

from grpo.weights.report import LogprobGap

# Of the figure that is judged: kernels differ in the order of sums, by 2e-2 in bfloat16; a stale or missing tensor
# shows as 0.1 up. In float32 CPUs differ by 1e-6 and GPUs by 2e-3, since some kernels multiply in TF32.
LIMITS = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1.5e-1}
FLOAT32_ON_GPUS = 5e-3

# Rounding sends a token to other experts where two are nearly level, and then that token is off by nats: the mean of a
# model with routers is made by a few tokens. So the mean without the worst of them decides, in multiples of the limit;
# the plain mean has a wide bound, and the median, which no such token moves, a narrow one against what is off in all.
WORST_SHARE = 0.05
TRIMMED_FACTOR, MEAN_FACTOR, MEDIAN_FACTOR = 2.5, 5.0, 1.2

# The limits are made for any model: one may stay far below, and a tensor that goes stale later would hide under them.
# The first verification shows what rounding costs with this model and these kernels, and later ones are held to a
# multiple of that, which leaves space for a policy that sharpens. It only tightens: were the first weight sync bad, its
# own gap would become the measure. And not without end: a verification that ends good runs is as bad as none.
FIRST_GAP_FACTOR = 5.0
LEAST_SHARE = 0.1  # of the limit


class GapVerdict(StrEnum):
    """What follows from a gap."""

    PASS = "pass"
    REFUSE = "refuse"
    """The job ends: training has not begun, and another start would meet it again."""
    SEND_AGAIN = "send again"
    """The whole model is sent once more, and verified."""
    WARN = "warn"
    """The job goes on: sending everything did not help, but the gap is one that the limit lets pass."""
    END = "end"
    """The last finished step is saved, and the job ends."""


def judge(gap: float, *, hard: float, tight: float | None, was_sent_again: bool) -> GapVerdict:
    """What follows from the worst gap of the job; see `hard_limit` and `tight_limit`.

    Args:
        tight: None in the first verification.
        was_sent_again: whether the whole model was sent because a gap in this weight sync was beyond the limit.
    """
    if gap <= (hard if tight is None else tight):
        return GapVerdict.PASS
    if tight is None:
        return GapVerdict.REFUSE
    if not was_sent_again:
        return GapVerdict.SEND_AGAIN
    return GapVerdict.WARN if gap <= hard else GapVerdict.END


def rounding_limit(dtype: torch.dtype, *, on_gpus: bool) -> float:
    """What rounding explains between two implementations that compute in `dtype`; wide for one that is not known."""
    if dtype is torch.float32 and on_gpus:
        return FLOAT32_ON_GPUS
    return LIMITS.get(dtype, LIMITS[torch.bfloat16])


def tight_limit(hard: float, first: LogprobGap) -> float:
    """Of verifications behind the first one, which has found `first`."""
    return min(hard, max(FIRST_GAP_FACTOR * first.judged, LEAST_SHARE * hard))


def gap_between(engine: list[list[float]], trainer: np.ndarray, *, has_routers: bool) -> LogprobGap:
    """The gap over all tokens; a NaN counts as infinite.

    Args:
        engine: [P][L-1] log-probabilities; `trainer` has its own in the same shape.
    """
    difference = np.sort(np.nan_to_num(np.abs(np.asarray(engine, np.float64) - trainer), nan=np.inf), axis=None)
    mean, judged = float(difference.mean()), float(difference.mean())
    if has_routers:
        trimmed = difference[: int(len(difference) * (1 - WORST_SHARE))].mean()
        judged = float(max(trimmed / TRIMMED_FACTOR, mean / MEAN_FACTOR, np.median(difference) / MEDIAN_FACTOR))
    return LogprobGap(mean=mean, max=float(difference[-1]), judged=judged)
