"""`grpo export` of real checkpoints: two ranks train one step, and the export is what they held, bit for bit."""

import argparse
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from deepspeed.checkpoint import ds_to_universal
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo import cli
from grpo.engine.client import EngineClient
from grpo.engine.environment import engine_environment
from grpo.engine.messages import EngineSpec
from grpo.ops.export.exporting import export
from grpo.ops.export.writing import Options
from grpo.ops.reshape.zero import reshape_zero
from grpo.weights.engine_args import transfer_args
from tests.support.launching import ROOT, start, torchrun_command
from tests.support.tiny_models import save_tiny_model

JOB_S = 360
ENGINE_S = 300

CASES = {
    "tied": {"family": "qwen2-tied", "zero_stage": 3},
    "experts": {"family": "qwen3-moe", "zero_stage": 3, "bf16": True, "frozen": "layers.0.mlp"},  # and an untied head
    "experts-gathered": {"family": "qwen3-moe", "zero_stage": 3, "bf16": True, "gather": True},
    "zero2": {"family": "qwen2-tied", "zero_stage": 2, "bf16": True},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds `<case>/checkpoint-1` and `<case>/held.safetensors`; and `models/<family>`, what training began with."""
    folder = tmp_path_factory.mktemp("trained")
    models = {case["family"]: folder / "models" / case["family"] for case in CASES.values()}
    for family, path in models.items():
        save_tiny_model(family, path)
    cases = folder / "cases.json"
    cases.write_text(
        json.dumps([{**case, "name": name, "model": str(models[case["family"]])} for name, case in CASES.items()])
    )
    script = [str(ROOT / "tests" / "jobs" / "checkpoint_job.py"), str(folder), str(cases)]
    job = start(lambda _: torchrun_command(script), folder, env={"DS_ACCELERATOR": "cpu"})
    try:
        assert job.wait(JOB_S) == [0], job.fail("the job failed")
    finally:
        job.end()
    return folder


def parameters(folder: Path) -> dict[str, torch.Tensor]:
    """As transformers loads them, in the folder's own dtype: experts are fused again."""
    return dict(AutoModelForCausalLM.from_pretrained(folder, dtype="auto").named_parameters())


def names_on_disk(folder: Path) -> set[str]:
    names: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            names |= set(file.keys())
    return names


def assert_same_bits(got: dict[str, torch.Tensor], held: dict[str, torch.Tensor]) -> None:
    assert got.keys() == held.keys()
    for name, tensor in held.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(bits(got[name]), bits(tensor)), name


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("case", CASES)
def test_export_of_checkpoint_matches_weights_of_ranks(trained: Path, case: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    exported = export(trained / case / "checkpoint-1", out, Options())
    bf16 = CASES[case].get("bf16", False)
    assert exported.dtypes == ("bfloat16" if bf16 else "float32",)
    assert ("ZeRO-3" in exported.origin) == (case in ("tied", "experts"))
    held = load_file(trained / case / "held.safetensors")
    assert_same_bits(parameters(out), held)
    start_of_training = trained / "models" / CASES[case]["family"]
    assert names_on_disk(out) == names_on_disk(start_of_training)  # which `save_pretrained` wrote
    initial = parameters(start_of_training)
    moved = {name for name in held if not torch.equal(held[name], initial[name].to(held[name].dtype))}
    frozen = CASES[case].get("frozen")
    assert moved >= {name for name in held if not frozen or (frozen not in name and "norm" not in name)}
    assert AutoTokenizer.from_pretrained(out)("12+34=").input_ids == [3, 4, 12, 5, 6, 13]
    assert (out / "generation_config.json").exists()


def test_export_of_zero2_without_safetensors_matches_weights(trained: Path, tmp_path: Path) -> None:
    checkpoint = shutil.copytree(trained / "zero2" / "checkpoint-1", tmp_path / "checkpoint-1")
    (checkpoint / "model.safetensors").unlink()
    exported = export(checkpoint, tmp_path / "out", Options(allow_incomplete=True))
    assert exported.origin == "global_step1/mp_rank_00_model_states.pt"
    assert_same_bits(parameters(tmp_path / "out"), load_file(trained / "zero2" / "held.safetensors"))


@pytest.mark.parametrize("case", ["experts", "experts-gathered"])
def test_export_in_wider_dtype_uses_master_weights(trained: Path, case: str, tmp_path: Path) -> None:
    exported = export(trained / case / "checkpoint-1", tmp_path / "out", Options(dtype=torch.float32))
    assert "ZeRO-3" in exported.origin
    held = load_file(trained / case / "held.safetensors")
    masters = parameters(tmp_path / "out")
    assert_same_bits({name: tensor.bfloat16() for name, tensor in masters.items()}, held)
    assert not torch.equal(masters["lm_head.weight"], held["lm_head.weight"].float())


def test_export_with_broken_partition_fails_and_writes_nothing(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = shutil.copytree(trained / "tied" / "checkpoint-1", tmp_path / "checkpoint-1")
    partition = next(checkpoint.glob("global_step1/*rank_1*_optim_states.pt"))
    os.truncate(partition, partition.stat().st_size // 2)
    command = ["export", str(checkpoint), str(tmp_path / "out")]
    assert cli.main(command) == 1
    assert f"{partition} has " in capsys.readouterr().err
    assert cli.main([*command, "--allow-incomplete"]) == 1
    assert f"the weights in {checkpoint} cannot be read" in capsys.readouterr().err
    partition.unlink()
    assert cli.main([*command, "--allow-incomplete"]) == 1
    assert "Expected 2 of '*_optim_states.pt'" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-1"]


def universal(folder: Path, out: Path) -> dict[str, torch.Tensor]:
    """Master weights and moments of every parameter, whole, by DeepSpeed's own converter."""
    arguments = argparse.Namespace(
        input_folder=str(folder),
        output_folder=str(out),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    ds_to_universal.main(arguments)
    found = {}
    for path in (out / "zero").rglob("*.pt"):
        if path.name != "optimizer_state.pt":
            value = torch.load(path, weights_only=False)
            found[str(path.relative_to(out))] = value["param"] if isinstance(value, dict) else torch.as_tensor(value)
    return found


@pytest.mark.parametrize("case", ["tied", "experts", "zero2"])
def test_reshape_zero_keeps_master_weights_and_moments(trained: Path, case: str, tmp_path: Path) -> None:
    """In many sub-groups; for DeepSpeed's converter they are of that many ranks as any others."""
    before = trained / case / "checkpoint-1" / "global_step1"
    held = universal(before, tmp_path / "held" / "universal")
    assert {Path(name).name for name in held} >= {"fp32.pt", "exp_avg.pt", "exp_avg_sq.pt"}
    for ranks in (1, 3):
        reshape_zero(before, tmp_path / f"{ranks}", before=2, ranks=ranks)
        assert_same_bits(universal(tmp_path / f"{ranks}", tmp_path / f"of-{ranks}" / "universal"), held)
    reshape_zero(tmp_path / "3", tmp_path / "back", before=3, ranks=2)
    assert_same_bits(universal(tmp_path / "back", tmp_path / "of-back" / "universal"), held)
    assert {path.name for path in (tmp_path / "back").iterdir()} == {path.name for path in before.iterdir()}


def test_vllm_with_exported_experts_matches_model(trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(trained / "experts" / "checkpoint-1", out, Options(dtype=torch.float32))
    prompts = [[5, 6, 7, 8, 9, 10], [12, 3, 20]]
    spec = EngineSpec(
        engine_args={
            "model": str(out),
            "dtype": "float32",
            "max_model_len": 32,
            "enforce_eager": True,
            "kv_cache_memory_bytes": 2**28,
            **transfer_args("shm"),
        },
        sampling={},
    )
    environment = engine_environment(os.environ, devices=(), tensor_parallel_size=1, engines_per_node=1)
    engine = EngineClient(spec, name="the engine", environment=environment, log_path=tmp_path / "engine.log")
    try:
        engine.wait_ready(ENGINE_S)
        scored = engine.call("prompt_logprobs", 60, prompts=prompts)
    finally:
        engine.close()
    model = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    for prompt, logprobs in zip(prompts, scored, strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt])).logits[0, :-1]
        ours = logits.log_softmax(-1).gather(-1, torch.tensor(prompt[1:])[:, None]).squeeze(-1)
        torch.testing.assert_close(torch.tensor(logprobs), ours, rtol=0, atol=1e-4)
