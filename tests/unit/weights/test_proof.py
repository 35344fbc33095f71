"""The probe, the gap between engine and trainer, and its limit."""

import contextlib
from typing import Any

import numpy as np
import pytest
import torch

from grpo.weights.proof import LogprobGap, Prover, gap_between, gap_limit, is_due, probe_prompts
from tests.support.tiny_models import VOCAB_SIZE, tiny_model


def test_the_probe_is_fixed_and_leaves_special_tokens_out() -> None:
    probe = probe_prompts(100, 4096, special_ids=(0, 1, 50))
    assert probe == probe_prompts(100, 4096, special_ids=(0, 1, 50))
    assert (len(probe), {len(prompt) for prompt in probe}) == (4, {32})
    assert not {0, 1, 50} & {token for prompt in probe for token in prompt}
    assert {len(prompt) for prompt in probe_prompts(100, 10)} == {9}


def test_gaps() -> None:
    gap = gap_between([[-1.0, -2.0], [-3.0, -4.0]], np.array([[-1.0, -2.5], [-3.0, -4.0]]))
    assert (gap.mean, gap.max) == (0.125, 0.5)
    assert gap_between([[float("nan")]], np.array([[-1.0]])).mean == float("inf")
    assert [number for number in range(1, 41) if is_due(number)] == [*range(1, 11), 20, 30, 40]


def test_the_first_gap_tightens_the_limit_and_never_loosens_it() -> None:
    def limit(first: float | None, asked: float | None = None, dtype: torch.dtype = torch.bfloat16) -> float:
        gap = None if first is None else LogprobGap(mean=first, max=9.0)
        return round(gap_limit(dtype, asked=asked, first=gap), 6)

    assert limit(None) == 0.15
    assert limit(0.012) == 0.06
    assert limit(0.001) == 0.015  # a tenth of the dtype's: kernels may round otherwise for other tokens
    assert limit(0.149) == 0.15  # a first push that is bad is not the measure
    assert limit(3e-6, dtype=torch.float32) == 1e-4
    assert [limit(first, asked=0.4) for first in (None, 0.001, 0.3)] == [0.4] * 3


def test_weights_that_are_no_numbers_are_not_the_engines_fault() -> None:
    """On every rank, whether it has engines or not: nobody waits for another."""
    model = tiny_model("qwen3-tied")
    with torch.no_grad():
        model.get_input_embeddings().weight[5:] = float("nan")
    settings: dict[str, Any] = {"dtype": torch.float32, "asked_limit": None, "autocast": contextlib.nullcontext}
    settings |= {"cast_lm_head_to_fp32": False, "timeout_s": 1.0}
    prover = Prover(model=model, clients=[], probe=probe_prompts(VOCAB_SIZE, 64, (0, 1)), **settings)
    with pytest.raises(FloatingPointError, match="not finite in push 3"):
        prover.prove(3, engines_work=False)
