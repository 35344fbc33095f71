"""How far engine and trainer may be apart, and what follows: numbers by hand, and figures that others have seen."""

import numpy as np
import pytest
import torch

from grpo.weights.limits import GapVerdict, gap_between, judge, rounding_limit, tight_limit
from grpo.weights.report import LogprobGap

BF16 = 0.15
TOKENS = 124  # that four prompts of 32 give log-probabilities of


def gap_of(differences: np.ndarray, *, has_routers: bool) -> LogprobGap:
    trainer = np.full(len(differences), -9.0)
    return gap_between((trainer + differences).tolist(), trainer, has_routers=has_routers)


def flips(count: int, nats: float, elsewhere: float) -> np.ndarray:
    """Rounding `elsewhere`, of either sign, and `count` tokens that went to other experts."""
    differences = np.full(TOKENS, elsewhere) * np.resize([1, -1], TOKENS)
    differences[:: TOKENS // count][:count] = nats
    return differences


def test_gap_between_computes_mean_and_max() -> None:
    gap = gap_between([[-1.0, -2.0], [-3.0, -4.0]], np.array([[-1.0, -2.5], [-3.0, -4.0]]), has_routers=False)
    assert (gap.mean, gap.max, gap.judged) == (0.125, 0.5, 0.125)
    assert str(gap) == "0.125 nats in the mean and 0.5 at most"
    nothing = gap_between([[float("nan")]], np.array([[-1.0]]), has_routers=False)
    assert (nothing.mean, nothing.judged) == (float("inf"), float("inf"))
    assert gap_between([[-1.0, float("nan")]], np.array([[-1.0, -1.0]]), has_routers=True).judged == float("inf")


def test_gap_between_with_routers_discounts_worst_tokens() -> None:
    """Of 40 tokens 38 count in the trimmed mean: 10 of 1.0 among them, and the median is 0."""
    differences = np.array([0.0] * 28 + [1.0] * 10 + [6.0] * 2)
    gap = gap_of(differences, has_routers=True)
    assert (gap.mean, gap.max) == (0.55, 6.0)
    assert gap.judged == pytest.approx(max(10 / 38 / 2.5, 0.55 / 5, 0.0))
    assert gap_of(differences, has_routers=False).judged == 0.55
    assert str(gap) == "0.55 nats in the mean and 6 at most, which counts as 0.11 in a model with routers"


KNOWN = {  # bfloat16, by others, with the same weights on both sides
    "dense, Qwen2.5-7B, RMS 0.04": (flips(1, 0.32, 0.03), False),
    "dense, Qwen3-1.7B, mean 0.046, max 0.32": (flips(2, 0.32, 0.0415), False),
    "dense, three times that for random tokens": (flips(2, 0.96, 0.12), False),
    "Qwen3-Omni-30B-A3B, mean 0.064": (flips(2, 1.6, 0.039), True),
    "experts flip in 8 of 124 tokens": (flips(8, 3.5, 0.0), True),
    "DeepSeek-V4-Flash, same routing: mean 0.139, max 0.537": (flips(4, 0.537, 0.126), True),
    "DeepSeek-V4-Flash: mean 0.37, max 3.55, few flips": (flips(9, 3.3, 0.139), True),
    "DeepSeek-V4-Flash: mean 0.37, many flips": (flips(31, 1.06, 0.139), True),
}


@pytest.mark.parametrize("seen", KNOWN)
def test_judge_of_published_harmless_gaps_passes(seen: str) -> None:
    differences, has_routers = KNOWN[seen]
    gap = gap_of(differences, has_routers=has_routers)
    assert judge(gap.judged, hard=BF16, tight=None, was_sent_again=False) is GapVerdict.PASS, gap


WRONG = {
    "every token off by 0.2, dense": (np.full(TOKENS, 0.2), False),
    "every token off by 0.2, routers": (np.full(TOKENS, 0.2), True),
    "8 tokens of a dense model": (flips(8, 3.5, 0.0), False),
    "one shard of eight of the vocabulary": (flips(15, 8.0, 0.02), True),
    "a third of the tokens off by 1.5": (flips(41, 1.5, 0.02), True),
}


@pytest.mark.parametrize("what", WRONG)
def test_judge_of_gaps_beyond_rounding_refuses(what: str) -> None:
    differences, has_routers = WRONG[what]
    gap = gap_of(differences, has_routers=has_routers)
    assert judge(gap.judged, hard=BF16, tight=None, was_sent_again=False) is GapVerdict.REFUSE, gap


def test_judge_with_tight_and_hard_limit_returns_verdict() -> None:
    def follows(gap: float, *, tight: float | None = 0.05, again: bool = False) -> GapVerdict:
        return judge(gap, hard=0.15, tight=tight, was_sent_again=again)

    assert [follows(gap, tight=None) for gap in (0.149, 0.151)] == [GapVerdict.PASS, GapVerdict.REFUSE]
    assert [follows(gap) for gap in (0.05, 0.051, 0.5)] == [
        GapVerdict.PASS,
        GapVerdict.SEND_AGAIN,
        GapVerdict.SEND_AGAIN,
    ]
    assert [follows(gap, again=True) for gap in (0.05, 0.051, 0.15)] == [
        GapVerdict.PASS,
        GapVerdict.WARN,
        GapVerdict.WARN,
    ]
    assert [follows(gap, again=True) for gap in (0.151, float("inf"))] == [GapVerdict.END, GapVerdict.END]


def test_tight_limit_follows_first_gap_and_never_exceeds_hard() -> None:
    def limit(first: float, hard: float = BF16) -> float:
        return round(tight_limit(hard, LogprobGap(mean=9.0, max=9.0, judged=first)), 6)

    assert limit(0.012) == 0.06
    assert limit(0.001) == 0.015  # a tenth of the limit: kernels may round otherwise for other tokens
    assert limit(0.149) == 0.15  # a first weight sync that is bad is not the measure
    assert limit(3e-6, hard=1e-3) == 1e-4
    assert [limit(first, hard=0.4) for first in (0.001, 0.02, 0.3)] == [0.04, 0.1, 0.4], "a limit of the user's, too"


def test_rounding_limit_matches_dtype_table() -> None:
    of = {(name, gpus): rounding_limit(getattr(torch, name), on_gpus=gpus) for name in NAMES for gpus in (False, True)}
    assert of["float32", False] == 1e-3
    assert of["float32", True] == 5e-3
    assert of["float16", True] == of["float16", False] == 3e-2
    assert of["bfloat16", True] == of["bfloat16", False] == of["float64", False] == 0.15


NAMES = ("float32", "float16", "bfloat16", "float64")
