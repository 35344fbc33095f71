"""Limits on the log-probability gap between engine and trainer in a verification, and the reactions beyond them.

All gaps are absolute differences of natural-log probabilities, in nats. Figures others have published for bfloat16 with
the same weights on both sides: dense 7B 0.02 to 0.05 in the mean (Fast-LLM's pull request 525, vllm #18352; 0.002 all
in float32, on GPUs); with routers 0.03 to 0.06 (slime, verl-omni #637), and for DeepSeek-V4-Flash 0.37 with a maximum
of 3.6, of which 0.14 and 0.54 if both sides route alike (miles #2722). They are for ordinary text; the random half of
the probe has less likely tokens, with log-probabilities rounded two or three times as coarsely.
"""

from enum import StrEnum

import numpy as np
import torch

from grpo.weights.report import LogprobGap

# On the judged figure. Kernels differ in the order of sums, by 2e-2 in bfloat16; a stale or missing tensor shows as 0.1
# or more. In float32 CPUs differ by 1e-6 and GPUs by 2e-3, since some kernels multiply in TF32.
LIMITS = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1.5e-1}
FLOAT32_ON_GPUS = 5e-3

# If two experts are nearly level, rounding may send a token to the other one, and that token is off by nats: a few
# tokens make the mean of a model with routers. So the mean without the worst of them decides, in multiples of the
# limit. The plain mean has a wide bound; the median, not affected by such tokens, has a narrow one against errors in
# all tokens.
WORST_SHARE = 0.05
TRIMMED_FACTOR, MEAN_FACTOR, MEDIAN_FACTOR = 2.5, 5.0, 1.2

# The limits fit any model: a particular one may stay far below, and hide a tensor that goes stale later. The first
# verification shows the rounding of this model and these kernels, and later ones are held to a multiple of it, with
# a margin for a sharpening policy. The limit only tightens: otherwise a bad first sync would set its own measure.
# It also has a floor: a verification that ends good runs is as bad as none.
FIRST_GAP_FACTOR = 5.0
LEAST_SHARE = 0.1  # of the limit


class GapVerdict(StrEnum):
    """Reaction to a gap."""

    PASS = "pass"
    REFUSE = "refuse"
    """End the job: training has not begun, and a restart would fail again."""
    SEND_AGAIN = "send again"
    """Send the whole model again, and verify."""
    WARN = "warn"
    """Continue: sending everything did not help, but the gap is within the hard limit."""
    END = "end"
    """Save the last finished step, and end the job."""


def judge(gap: float, *, hard: float, tight: float | None, was_sent_again: bool) -> GapVerdict:
    """Decide by the job's worst gap; see `hard_limit` and `tight_limit`.

    Args:
        tight: None in the first verification.
        was_sent_again: the whole model was sent again because of a gap in this weight sync.
    """
    if gap <= (hard if tight is None else tight):
        return GapVerdict.PASS
    if tight is None:
        return GapVerdict.REFUSE
    if not was_sent_again:
        return GapVerdict.SEND_AGAIN
    return GapVerdict.WARN if gap <= hard else GapVerdict.END


def rounding_limit(dtype: torch.dtype, *, on_gpus: bool) -> float:
    """Gap explained by rounding between two implementations in `dtype`; wide for an unknown dtype."""
    if dtype is torch.float32 and on_gpus:
        return FLOAT32_ON_GPUS
    return LIMITS.get(dtype, LIMITS[torch.bfloat16])


def tight_limit(hard: float, first: LogprobGap) -> float:
    """Limit of later verifications, based on the `first` one's gap."""
    return min(hard, max(FIRST_GAP_FACTOR * first.judged, LEAST_SHARE * hard))


def gap_between(engine: list[list[float]], trainer: np.ndarray, *, has_routers: bool) -> LogprobGap:
    """Gap over all tokens; a NaN counts as infinite.

    Args:
        engine: [P][L-1] log-probabilities; `trainer` has its own in the same shape.
    """
    difference = np.sort(np.nan_to_num(np.abs(np.asarray(engine, np.float64) - trainer), nan=np.inf), axis=None)
    mean, judged = float(difference.mean()), float(difference.mean())
    if has_routers:
        trimmed = difference[: int(len(difference) * (1 - WORST_SHARE))].mean()
        judged = float(max(trimmed / TRIMMED_FACTOR, mean / MEAN_FACTOR, np.median(difference) / MEDIAN_FACTOR))
    return LogprobGap(mean=mean, max=float(difference[-1]), judged=judged)
