"""Weights that arrive amid completions of a model with recurrent layers: their states stay, as keys and values do."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from tests.support.flights import Flight, same_weights_change_no_bit
from tests.support.multimodal_models import engines_environment, save_multimodal_model

pytestmark = pytest.mark.long


def test_sync_of_same_weights_in_hybrid_model_changes_no_bit_in_flight(tmp_path: Path) -> None:
    path = save_multimodal_model("qwen3_5", tmp_path / "qwen3_5")
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.bfloat16)
    flight = Flight(
        model,
        path,
        tmp_path,
        environment=engines_environment(),
        dtype="bfloat16",
        language_model_only=True,
        enable_prefix_caching=False,
        enable_chunked_prefill=False,
    )
    try:
        flight.meet()
        flight.listen()
        same_weights_change_no_bit(flight)
        flight.syncer.close()
    finally:
        flight.client.close()
