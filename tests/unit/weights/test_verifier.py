"""The verification of a weight sync by itself: what it refuses to go by, and when it is due."""

import contextlib
from typing import Any

import pytest
import torch

from grpo.weights.probe import probe_prompts
from grpo.weights.verifier import Verifier, is_due
from tests.support.tiny_models import VOCAB_SIZE, tiny_model


def test_is_due_for_first_ten_and_every_tenth_sync() -> None:
    assert [number for number in range(1, 41) if is_due(number)] == [*range(1, 11), 20, 30, 40]


def test_verify_with_nan_weights_raises_floating_point_error() -> None:
    """On every rank, whether it has engines or not: nobody waits for another."""
    model = tiny_model("qwen3-tied")
    with torch.no_grad():
        model.get_input_embeddings().weight[5:] = float("nan")
    settings: dict[str, Any] = {"dtype": torch.float32, "asked_limit": None, "autocast": contextlib.nullcontext}
    settings |= {"cast_lm_head_to_fp32": False, "timeout_s": 1.0, "largest": lambda mine: mine}
    verifier = Verifier(model=model, clients=[], probe=probe_prompts(VOCAB_SIZE, 64, (0, 1)), **settings)
    with pytest.raises(FloatingPointError, match="not finite in weight sync 3"):
        verifier.verify(3, engines_work=False)
