"""LoRA on real ranks with ZeRO-3: resumed as if it had not stopped, exported, and with an engine that dies."""

import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from grpo.cli import main as grpo
from tests.support.finished import MAX_GAP, finish, lines_of
from tests.support.launching import start_tiny_job
from tests.support.resumed_runs import expect, run, seen, steps

LORA = {"r": 4, "lora_alpha": 16, "target_modules": "all-linear"}


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(40, 60)[None]).logits


@pytest.fixture(scope="module")
def whole(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps with a reference, which is the model without its adapter."""
    out = tmp_path_factory.mktemp("lora") / "whole"
    config = {"max_steps": 4, "save_steps": 2, "beta": 0.1}
    expect(run(tiny_model, out, num_prompts=40, config=config, lora=LORA), success=True)
    return out


def test_lora_resume_matches_whole_run(whole: Path, tiny_model: Path, tmp_path: Path) -> None:
    parts = tmp_path / "parts"
    shutil.copytree(whole / "checkpoint-2", parts / "checkpoint-2")
    for rank in (0, 1):
        (parts / f"seen-{rank}.jsonl").write_text("")
    config = {"max_steps": 4, "save_steps": 2, "beta": 0.1, "resume_from_checkpoint": "auto"}
    output = expect(run(tiny_model, parts, num_prompts=40, attempt=1, config=config, lora=LORA), success=True)
    assert "goes on after step 2" in output
    assert {step: line for step, line in steps(whole).items() if step > 2} == steps(parts)
    assert steps(whole)[4]["kl"] > 0
    for rank in (0, 1):
        assert seen(parts, rank) == [line for line in seen(whole, rank) if line["step"] >= 2]
    assert (parts / "weights").read_text() == (whole / "weights").read_text()


def test_export_of_lora_as_adapter_matches_merged_model(
    whole: Path, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = whole / "checkpoint-4"
    assert not list(checkpoint.glob("model*.safetensors")), "the base is no part of it"
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    before = logits(base)
    assert grpo(["export", str(checkpoint), str(tmp_path / "adapter")]) == 0
    assert "--merge gives a whole model" in capsys.readouterr().out
    assert load_file(tmp_path / "adapter" / "adapter_model.safetensors").keys() == (
        load_file(whole / "final" / "adapter_model.safetensors").keys()
    )
    trained = logits(PeftModel.from_pretrained(base, str(tmp_path / "adapter")))
    assert (trained - before).abs().max() > 0.1
    assert grpo(["export", str(checkpoint), str(tmp_path / "merged"), "--merge"]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert (logits(merged) - trained).abs().max() < 1e-4
    assert (tmp_path / "merged" / "tokenizer.json").exists()

    for arguments, reported in (
        (["--dtype", "bfloat16"], "--dtype is for a merged model"),
        (["--merge", "--base", "/no/such/model"], "name another place with --base"),
    ):
        assert grpo(["export", str(checkpoint), str(tmp_path / "none"), *arguments]) == 1
        assert reported in capsys.readouterr().err
        assert not (tmp_path / "none").exists()


@pytest.mark.long
def test_lora_on_two_nodes_survives_engine_death(tiny_model: Path, tmp_path: Path) -> None:
    """The one that comes back gets the base again, and an adapter of noise first."""
    config = {"max_steps": 4, "beta": 0.1, "generation_lookahead": 1}
    strikes = [("generate", 2, "inner")]
    job = start_tiny_job(
        tiny_model, tmp_path / "out", config=config, lora=LORA, nodes=2, ranks_per_node=1, strikes=strikes
    )
    lines = finish(job)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert "adapters alone" in job.output()
    assert lines[-1]["engine/restarts"] >= 1, job.fail(str(lines))
    for line in lines:
        assert line["weight_sync/logprob_gap_max"] < MAX_GAP, job.fail(str(line))
    adapter_bytes = lines[0]["weight_sync/bytes"]
    assert {line["weight_sync/bytes"] for line in lines} == {adapter_bytes}
    assert lines[-1]["kl"] > 0


@pytest.mark.long
def test_lora_runs_with_lookahead_are_equal(tiny_model: Path, tmp_path: Path) -> None:
    """Each completion is of one policy, whenever the weight sync comes that brings the next one: time decides
    nothing."""
    config = {"max_steps": 5, "generation_lookahead": 2, "learning_rate": 1e-3, "vllm_lora": "adapter"}
    found = []
    for name in ("one", "other"):
        job = start_tiny_job(tiny_model, tmp_path / name, config=config, lora=LORA)
        steps = finish(job)
        assert [line["rollout/policy_lag"] for line in steps] == [0, 1, 2, 2, 2]
        assert all("weight_sync/paused_s" not in line for line in steps)
        samples = [lines_of(job, f"samples-{rank}.jsonl") for rank in range(2)]
        found.append(([line["loss"] for line in steps], samples))
    assert found[0] == found[1]
