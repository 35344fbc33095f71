"""Where completions end: the engines are asked with the tokens that TRL counts as ends."""

import json
import shutil
from pathlib import Path

import pytest

from tests.support.scripted_trainer import train, use_scripted_engines

SETTINGS = {"max_steps": 1, "vllm_max_logprob_gap": 1e9}  # the engine computes nothing
OUTSIDE = 10**6  # of the vocabulary, which vLLM refuses


@pytest.mark.parametrize("lookahead", [0, 1])
def test_end_tokens_of_requests_follow_generation_config(
    lookahead: int, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "model")
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 1, OUTSIDE]}))
    script = use_scripted_engines(monkeypatch)
    trainer = train(model, tmp_path / "out", [], **SETTINGS, generation_lookahead=lookahead)
    assert trainer.eos_token_ids == [9, 1, OUTSIDE]
    assert {sample.end_tokens for sample in script.samples} == {(9, 1)}
