"""Prompts with images: ranks with ZeRO-3, real engines, rows without any among them."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoProcessor, LlavaProcessor

from tests.support.finished import MAX_GAP, finish, finish_on_policy, lines_of
from tests.support.launching import ROOT, Job, start_tiny_job
from tests.support.multimodal_models import engines_environment, save_multimodal_model, towers_of
from tests.support.pictured_data import picture
from tests.support.resumed_runs import expect, run, steps

WITHOUT = [1, 4, 6]
"""Of 8 rows those that have no image."""


def with_torchvision(folder: Path) -> dict[str, str]:
    """The environment of a job with the Python part of torchvision, which some processors need: its compiled part fits
    one build of torch alone, and no machine without GPUs has that one.

    The tests' own environment has none, in which most of this project's users on CPUs are.
    """
    version = "0.28.0"  # that vLLM's pins name beside this torch
    assert importlib.metadata.version("torch").startswith("2.13."), "another torch: look up its torchvision"
    arguments = ["install", "--quiet", "--no-deps", "--target", str(folder), f"torchvision=={version}"]
    subprocess.run([sys.executable, "-m", "pip", *arguments], check=True)
    (folder / "torchvision" / "_meta_registrations.py").write_text("")  # of operators in its compiled part
    return {"PYTHONPATH": f"{folder}:{ROOT}"}


def said(job: Job, words: str) -> None:
    assert job.output().count(words) == 1, job.fail(f"not said once: {words!r}")


def is_on_policy(line: dict[str, Any]) -> bool:
    return max(line["weight_sync/logprob_gap_max"], line["sampling/sampling_logp_difference/max"]) < MAX_GAP


def test_image_job_with_mixed_rows_trains_vision_tower(tmp_path: Path) -> None:
    model = save_multimodal_model("llava", tmp_path / "llava")
    config = {"save_strategy": "steps", "save_steps": 3, "learning_rate": 1e-3}
    job = start_tiny_job(
        model, tmp_path / "out", config=config, env=engines_environment(),
        pictured={"where": "image", "without": WITHOUT},
    )  # fmt: skip
    logged = finish_on_policy(job)
    said(job, "trains LlavaForConditionalGeneration on prompts with images: vision_tower and multi_modal_projector (")

    processor = AutoProcessor.from_pretrained(model)
    scored = [line for rank in (0, 1) for line in lines_of(job, f"samples-{rank}.jsonl") if line["step"] == 0]
    prompts = [prompt for line in scored for prompt in line["prompts"]]
    has_image = [any(part["type"] == "image" for part in prompt[0]["content"]) for prompt in prompts]
    assert 0 < sum(has_image) < len(prompts)

    def length(prompt: Any) -> int:
        parts = [{**part, "image": picture(0)} if part["type"] == "image" else part for part in prompt[0]["content"]]
        template: dict[str, Any] = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
        return len(processor.apply_chat_template([{"role": "user", "content": parts}], **template)["input_ids"][0])

    num_completed = sum(len(ids) for line in scored for ids in line["completion_ids"])
    assert logged[0]["num_tokens"] == sum(map(length, prompts)) + num_completed

    saved = tmp_path / "out" / "checkpoint-3"
    before, after = towers_of(model), towers_of(saved)
    assert before.keys() == after.keys()
    assert not torch.equal(
        *(each["vision_tower.vision_model.embeddings.patch_embedding.weight"] for each in (before, after))
    )
    assert isinstance(AutoProcessor.from_pretrained(saved), LlavaProcessor)


@pytest.mark.long
def test_image_job_with_frozen_towers_survives_engine_death(tmp_path: Path) -> None:
    """Evaluation too, and completions in the log, which TRL gathers with their images."""
    model = save_multimodal_model("llava", tmp_path / "llava")
    config = {
        "max_steps": 4, "freeze_towers": True, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps",
        "save_steps": 4, "log_completions": True, "learning_rate": 1e-3,
    }  # fmt: skip
    job = start_tiny_job(
        model, tmp_path / "out", nodes=2, ranks_per_node=2, strikes=[("generate", 2, "inner", 0)], config=config,
        env=engines_environment(), pictured={"where": "images", "without": WITHOUT},
    )  # fmt: skip
    lines = [line for line in finish(job) if "reward" in line]
    assert lines[-1]["engine/restarts"] >= 1
    assert all(map(is_on_policy, lines)), lines
    before, after = towers_of(model), towers_of(tmp_path / "out" / "checkpoint-4")
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.long
def test_image_job_with_lora_and_two_engines_finishes_on_policy(tmp_path: Path) -> None:
    model = save_multimodal_model("llava", tmp_path / "llava")
    job = start_tiny_job(
        model, tmp_path / "out", lora={"r": 4, "target_modules": "all-linear"}, config={"vllm_engines_per_node": 2},
        env=engines_environment(), pictured={"where": "messages", "without": WITHOUT},
    )  # fmt: skip
    finish_on_policy(job)


@pytest.mark.long
def test_image_job_with_mrope_positions_finishes_on_policy(tmp_path: Path) -> None:
    """Qwen3-VL: M-RoPE, and features of its tower in several layers of the decoder."""
    environment = with_torchvision(tmp_path / "torchvision")
    maker = "import sys; from pathlib import Path; from tests.support.multimodal_models import save_multimodal_model; "
    model = tmp_path / "qwen3_vl"
    subprocess.run(
        [sys.executable, "-c", maker + "save_multimodal_model('qwen3_vl', Path(sys.argv[1]))", str(model)],
        check=True, env={**os.environ, **environment},
    )  # fmt: skip
    job = start_tiny_job(
        model, tmp_path / "out", config={"learning_rate": 1e-3}, env=environment,
        pictured={"where": "image", "without": WITHOUT},
    )  # fmt: skip
    finish_on_policy(job)


@pytest.mark.long
def test_image_job_resume_matches_whole_run(tmp_path: Path) -> None:
    model = save_multimodal_model("llava", tmp_path / "llava")
    config = {
        "use_vllm": True, "check_rewards": False, "vllm_max_model_length": 64, "save_steps": 2, "max_steps": 4,
        "vllm_engine_kwargs": {"enforce_eager": True}, "learning_rate": 1e-3,
    }  # fmt: skip
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    more: dict[str, Any] = {"env": engines_environment(), "pictured": {"where": "image", "without": WITHOUT}}
    expect(run(model, whole, num_prompts=40, config=config, **more), success=True)
    shutil.copytree(whole / "checkpoint-2", parts / "checkpoint-2")
    config["resume_from_checkpoint"] = "auto"
    resumed = run(model, parts, num_prompts=40, attempt=1, config=config, **more)
    assert "goes on after step 2" in expect(resumed, success=True)
    rewards = {step: line["reward"] for step, line in steps(whole).items() if step > 2}
    assert {step: line["reward"] for step, line in steps(parts).items()} == rewards
    assert (parts / "weights").read_text() == (whole / "weights").read_text()
