"""QLoRA on real ranks with ZeRO-2: the engines hold what training computes with, also one that has died; the run is
resumed as if it had not stopped, and its adapter merged into the base as it was before it was quantised."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from grpo.cli import main as grpo
from tests.support.finished import MAX_GAP, finish, lines_of
from tests.support.launching import Job, start_tiny_job_by_torchrun

LORA = {"r": 4, "lora_alpha": 16, "target_modules": "all-linear"}
FOUR_BITS = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
ZERO2 = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 2},
}
EQUAL = ("loss", "reward", "kl", "grad_norm", "entropy", "completions/mean_length", "weight_sync/bytes")


def start_job(model: Path, out: Path, **settings: object) -> Job:
    out.mkdir(parents=True, exist_ok=True)
    zero2 = out / "zero2.json"
    zero2.write_text(json.dumps(ZERO2))
    config = {"deepspeed": str(zero2), "max_steps": 4, "beta": 0.1, "save_strategy": "steps", "save_steps": 2}
    config |= settings.pop("config", {})  # type: ignore[operator]
    return start_tiny_job_by_torchrun(
        model, out, config=config, zero3=False, lora=LORA, four_bits=FOUR_BITS, **settings
    )


@pytest.fixture(scope="module")
def whole(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Four steps with a reference, which is the base; the engine is killed in the second one."""
    job = start_job(tiny_model, tmp_path_factory.mktemp("four-bits") / "whole", strikes=[("generate", 1, "inner")])
    finish(job)
    return job


def test_qlora_engines_match_trainer_after_each_sync(whole: Job) -> None:
    lines = whole.metrics()
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert "the engines get the base once, then adapters alone" in whole.output()
    assert lines[-1]["engine/restarts"] == 1, whole.fail(str(lines))
    assert lines[-1]["kl"] > 0
    for line in lines:
        assert line["weight_sync/logprob_gap_max"] < MAX_GAP, whole.fail(str(line))
        assert line["sampling/logprob_gap_max"] < MAX_GAP, whole.fail(str(line))
    adapters = sum(tensor.nbytes for tensor in adapter_of(whole, 4).values())
    assert {line["weight_sync/bytes"] for line in lines} == {adapters}, (
        "the base travels once to each engine, before a step's"
    )


@pytest.mark.long
def test_qlora_resume_matches_whole_run(whole: Job, tiny_model: Path, tmp_path: Path) -> None:
    parts = tmp_path / "parts"
    shutil.copytree(whole.output_dir / "checkpoint-2", parts / "checkpoint-2")
    job = start_job(tiny_model, parts, config={"resume_from_checkpoint": "auto"})
    later = finish(job)
    assert "goes on after step 2" in job.output()
    assert [line["step"] for line in later] == [3, 4]
    for line, same in zip(later, whole.metrics()[2:], strict=True):
        assert {name: line[name] for name in EQUAL} == {name: same[name] for name in EQUAL}
    for rank in (0, 1):
        samples = lines_of(whole, f"samples-{rank}.jsonl")
        assert lines_of(job, f"samples-{rank}.jsonl") == [line for line in samples if line["step"] >= 2]
    resumed, before = adapter_of(job, 4), adapter_of(whole, 4)
    assert all(torch.equal(resumed[name], tensor) for name, tensor in before.items())
    assert any((tensor != adapter_of(whole, 2)[name]).any() for name, tensor in before.items())


def test_export_of_qlora_merges_into_unquantised_base(whole: Job, tiny_model: Path, tmp_path: Path) -> None:
    checkpoint = whole.output_dir / "checkpoint-4"
    assert not list(checkpoint.glob("model*.safetensors")), "the base is no part of it"
    assert grpo(["export", str(checkpoint), str(tmp_path / "merged"), "--merge"]) == 0
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())
    base, merged = (load_file(folder / "model.safetensors") for folder in (tiny_model, tmp_path / "merged"))
    adapter = adapter_of(whole, 4)
    scale = LORA["lora_alpha"] / LORA["r"]  # type: ignore[operator]
    changed = 0
    for name, weight in merged.items():
        path = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{path}.lora_A.weight" in adapter:
            change = scale * adapter[f"{path}.lora_B.weight"].float() @ adapter[f"{path}.lora_A.weight"].float()
            torch.testing.assert_close(weight, base[name] + change, rtol=1e-5, atol=1e-6)
            changed += 1
        else:
            assert torch.equal(weight, base[name])
    assert changed == len(adapter) // 2


def adapter_of(job: Job, step: int) -> dict[str, torch.Tensor]:
    return load_file(job.output_dir / f"checkpoint-{step}" / "adapter_model.safetensors")
