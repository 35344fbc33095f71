"""The text of multimodal and hybrid checkpoints: two ranks with ZeRO-3, real engines, three families."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor, LlavaProcessor

from grpo.__main__ import main as grpo
from tests.support.finished import MAX_GAP, finish, finish_on_policy
from tests.support.launching import Job, start_tiny_job
from tests.support.multimodal_models import engines_environment, save_multimodal_model, towers_of
from tests.support.resumed_runs import expect, run, steps

BF16_GAP = 2e-2
LORA = {"r": 4, "target_modules": "all-linear"}
LOCAL = {
    "use_vllm": True,
    "check_rewards": False,
    "vllm_max_model_length": 64,
    "vllm_engine_kwargs": {"enforce_eager": True},
    "save_steps": 2,
}


def said(job: Job, words: str) -> None:
    assert job.output().count(words) == 1, job.fail(f"not said once: {words!r}")


@pytest.mark.long  # `test_images.py` trains such a model too
@pytest.mark.parametrize("family", ["llava", "mistral3"])
def test_text_training_of_multimodal_model_saves_unchanged_towers(family: str, tmp_path: Path) -> None:
    model = save_multimodal_model(family, tmp_path / family)
    config = {"save_strategy": "steps", "save_steps": 3}
    job = start_tiny_job(model, tmp_path / "out", config=config, env=engines_environment())
    finish_on_policy(job)
    name = type(AutoModelForImageTextToText.from_pretrained(model)).__name__
    said(job, f"trains the text part of {name}: vision_tower and multi_modal_projector (")

    saved = tmp_path / "out" / "checkpoint-3"
    assert grpo(["export", str(saved), str(tmp_path / "exported")]) == 0
    before, after = towers_of(model), towers_of(tmp_path / "exported")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    trained = AutoModelForImageTextToText.from_pretrained(tmp_path / "exported")
    untrained = AutoModelForImageTextToText.from_pretrained(model)
    assert not torch.equal(trained.lm_head.weight, untrained.lm_head.weight)
    for folder in (saved, tmp_path / "exported") if family == "llava" else ():  # the other one has no processor here
        assert isinstance(AutoProcessor.from_pretrained(folder), LlavaProcessor)


@pytest.mark.long
def test_gemma_3_on_two_nodes_survives_engine_death(tmp_path: Path) -> None:
    model = save_multimodal_model("gemma3", tmp_path / "gemma3")
    job = start_tiny_job(
        model, tmp_path / "out", nodes=2, ranks_per_node=1, strikes=[("generate", 2, "inner")],
        config={"max_steps": 4}, env=engines_environment(),
    )  # fmt: skip
    lines = finish(job)
    assert lines[-1]["engine/restarts"] >= 1
    for line in lines:
        assert max(line["weight_sync/logprob_gap_max"], line["sampling/sampling_logp_difference/max"]) < MAX_GAP, line


@pytest.mark.long
@pytest.mark.parametrize(("ahead", "more"), [(0, {}), (2, {}), (2, {"lora": LORA})], ids=["now", "ahead", "adapters"])
def test_qwen_3_5_with_lookahead_or_lora_keeps_bf16_gap_limit(ahead: int, more: dict[str, Any], tmp_path: Path) -> None:
    """A hybrid: its engine computes in bfloat16, in which vLLM's kernels of linear attention do."""
    model = save_multimodal_model("qwen3_5", tmp_path / "qwen3_5")
    config = {"bf16": True, "generation_lookahead": ahead, "max_steps": 5, "learning_rate": 1e-4}
    job = start_tiny_job(model, tmp_path / "out", config=config, env=engines_environment(), **more)
    lines = finish(job)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    for line in lines:
        assert line["weight_sync/logprob_gap_max"] < BF16_GAP, line
        assert ahead or line["sampling/sampling_logp_difference/max"] < BF16_GAP, line
    said(job, "trains the text part of Qwen3_5ForConditionalGeneration: visual (")


@pytest.mark.long
@pytest.mark.parametrize("family", ["llava", "qwen3_5"])
def test_multimodal_resume_matches_whole_run(family: str, tmp_path: Path) -> None:
    model = save_multimodal_model(family, tmp_path / family)
    config = {**LOCAL, "bf16": family == "qwen3_5", "max_steps": 4}
    whole, parts, env = tmp_path / "whole", tmp_path / "parts", engines_environment()
    expect(run(model, whole, num_prompts=40, config=config, env=env), success=True)
    shutil.copytree(whole / "checkpoint-2", parts / "checkpoint-2")
    config["resume_from_checkpoint"] = "auto"
    resumed = run(model, parts, num_prompts=40, attempt=1, config=config, env=env)
    assert "goes on after step 2" in expect(resumed, success=True)
    rewards = {step: line["reward"] for step, line in steps(whole).items() if step > 2}
    assert {step: line["reward"] for step, line in steps(parts).items()} == rewards
    assert (parts / "weights").read_text() == (whole / "weights").read_text()
