"""What `grpo plan` says that a rank holds, phase by phase, against the tensors of a real engine and a real weight
sync."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import AutoConfig

from grpo.config.models import AdapterSlot
from grpo.ops.plan import training_memory
from grpo.ops.plan.lora import PlannedLora
from grpo.ops.plan.memory_budget import Budget
from grpo.ops.plan.model_shape import ModelShape, meta_model, shape_of
from grpo.ops.plan.sync_memory import sync_lines, sync_shape
from grpo.ops.plan.training_memory import MicroBatch, training_budget
from grpo.ops.plan.zero_memory import Sharding, read_sharding, states_of
from grpo.preflight.lora import LoraChoice, wrapped_without_weights
from tests.support.launching import ROOT, start, torchrun_command
from tests.support.tiny_models import tiny_config

JOB = ROOT / "tests" / "jobs" / "zero_memory_job.py"
DEFAULTS = ("reduce_bucket_size", "param_persistence_threshold", "max_live_parameters", "sub_group_size")
TILE_COLUMNS = 4096  # of TRL's 32768, which would hide the rest of so small a model
BUCKET_BYTES = 2**20
HIDDEN, LAYERS, SEQUENCES = 256, 4, 2


@dataclass(frozen=True, kw_only=True)
class Case:
    family: str = "qwen2-tied"
    ranks: int = 2
    dtype: str = "bfloat16"
    offload: str = "none"
    checkpointing: bool = True
    tokens: int = 128
    sizes: dict[str, int] = field(default_factory=lambda: {"intermediate_size": 1024, "vocab_size": 9001})
    lora: dict[str, Any] | None = None

    @property
    def zero(self) -> dict[str, Any]:
        return {
            "stage": 3,
            "reduce_bucket_size": 3_000_000,  # about as large as the states, so that neither hides the other
            "stage3_param_persistence_threshold": 40_000,  # keeps norms, biases and key-value projections whole
            "offload_optimizer": {"device": self.offload},
        }

    @property
    def sharding(self) -> Sharding:
        dtype_bytes = getattr(torch, self.dtype).itemsize
        return read_sharding(self.zero, hidden_size=HIDDEN, world_size=self.ranks, dtype_bytes=dtype_bytes)


CASES = {
    "float32": Case(dtype="float32", checkpointing=False),
    "bfloat16, its head untied": Case(family="llama-untied"),
    "offload": Case(offload="cpu"),
    "wide layers": Case(tokens=1024, sizes={"intermediate_size": 4096, "vocab_size": 600}),
    "one rank": Case(ranks=1, checkpointing=False),
    "adapters, one rank": Case(
        ranks=1, checkpointing=False, lora={"r": 16, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    ),
    "experts, one rank": Case(family="qwen3-moe", ranks=1, sizes={"moe_intermediate_size": 512, "vocab_size": 2001}),
}

IN_TESTS = ("bfloat16, its head untied",)


def save_config(case: Case, folder: Path) -> Path:
    config = tiny_config(case.family)
    config.update({"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, **case.sizes})
    if getattr(config, "layer_types", None):
        config.layer_types = ["full_attention"] * LAYERS
    config.save_pretrained(folder)
    return folder


def settings_of(case: Case, folder: Path) -> dict[str, Any]:
    return {
        "ranks": case.ranks,
        "model": str(folder),
        "lora": case.lora,
        "deepspeed": {
            "train_micro_batch_size_per_gpu": SEQUENCES,
            "zero_optimization": case.zero,
            "bf16": {"enabled": case.dtype == "bfloat16"},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,  # its own Adam has to be compiled; the states are the same
        },
        "sequences": SEQUENCES,
        "tokens": case.tokens,
        "checkpointing": case.checkpointing,
        "tile_columns": TILE_COLUMNS,
        "bucket_bytes": BUCKET_BYTES,
        "wire": case.dtype,
        "defaults": DEFAULTS,
        "out": str(folder),
    }


@pytest.mark.parametrize(
    "names", [IN_TESTS, pytest.param(tuple(CASES.keys() - {*IN_TESTS}), marks=pytest.mark.long)], ids=["some", "others"]
)
def test_plan_memory_budget_matches_measured_rank_memory(
    names: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_memory, "HEAD_TILE_COLUMNS", TILE_COLUMNS)
    cases = {name: CASES[name] for name in sorted(names)}
    folders = {name: save_config(case, tmp_path / name.replace(" ", "-")) for name, case in cases.items()}
    settings = tmp_path / "settings.json"
    settings.write_text(json.dumps([settings_of(case, folders[name]) for name, case in cases.items()]))
    job = start(
        lambda _: torchrun_command([str(JOB), str(settings)], ranks=2),
        tmp_path / "out",
        env={"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )
    try:
        assert job.wait(550) == [0], job.fail("an engine did not finish its step")
    finally:
        job.end()
    for name, case in cases.items():
        measured = [json.loads((folders[name] / f"{rank}.json").read_text()) for rank in range(case.ranks)]
        print(f"--- {name}")
        states_and_buffers_agree(case, folders[name], measured)
        every_phase_agrees(case, folders[name], measured)
        what_a_sync_adds_agrees(case, folders[name], measured)


def lora_of(case: Case, folder: Path) -> PlannedLora | None:
    if case.lora is None:
        return None
    model = meta_model(AutoConfig.from_pretrained(folder))
    choice = LoraChoice(way="adapter", why="", slot=AdapterSlot(rank=case.lora["r"], layers=()))
    return PlannedLora(choice=choice, wrapped=wrapped_without_weights(model, LoraConfig(**case.lora)))


def shape_in(case: Case, folder: Path) -> ModelShape:
    lora = lora_of(case, folder)
    return shape_of(AutoConfig.from_pretrained(folder), "tiny", wrapped=None if lora is None else lora.wrapped)


def planned(case: Case, folder: Path, transport: str) -> Budget:
    """The budget of a rank: with the buffers of the weight sync on the device, or as a job without GPUs has them."""
    config, dtype = AutoConfig.from_pretrained(folder), getattr(torch, case.dtype)
    on_device = transport == "nccl"
    sync = sync_lines(
        sync_shape(config, dtype=dtype, bucket_bytes=BUCKET_BYTES, lora=lora_of(case, folder)),
        case.sharding,
        backend=transport,
        has_gpus=on_device,
        gathers_on_device=on_device,
    )
    batch = MicroBatch(
        sequences=SEQUENCES,
        sequence_tokens=case.tokens,
        completion_tokens=case.tokens,
        dtype_bytes=dtype.itemsize,
        checkpointing=case.checkpointing,
        flash_attention=False,
    )
    return training_budget(shape_in(case, folder), case.sharding, batch, sync=sync, gpu_bytes=None)


def states_and_buffers_agree(case: Case, folder: Path, measured: list[dict[str, Any]]) -> None:
    shape = shape_in(case, folder)
    assert shape.num_parameters > 4_000_000
    states = states_of(shape, case.sharding)
    budget = planned(case, folder, "nccl")
    estimated = {key: budget.bytes_of(key) for key in ("reduce_bucket", "persistent", "base")}
    estimated["states"] = states.device_bytes + states.host_bytes
    for held in measured:
        for name, value in estimated.items():
            print(f"{name} {value} B, held {held[name]} B")
            assert value == pytest.approx(held[name], rel=0.02), name

    defaults = Sharding(stage=3, world_size=1, dtype_bytes=2)
    assert measured[0]["defaults"] == {name: getattr(defaults, name) for name in DEFAULTS}


def every_phase_agrees(case: Case, folder: Path, measured: list[dict[str, Any]]) -> None:
    """To within a tenth."""
    host_bytes = states_of(shape_in(case, folder), case.sharding).host_bytes  # the same memory here
    for transport in ("nccl", "shm"):
        for held in planned(case, folder, transport).held:
            for rank, result in enumerate(measured):
                seen = result["phases"][held.phase]
                seen = seen[transport] if held.phase == "sync" else seen
                value = host_bytes + (held.other_ranks_bytes if rank else held.local_main_bytes)
                print(f"{transport}, rank {rank}, {held.phase}: {value} B, held {seen} B, {value / seen - 1:+.1%}")
                assert value == pytest.approx(seen, rel=0.1), f"{transport}, rank {rank}, {held.phase}"


def what_a_sync_adds_agrees(case: Case, folder: Path, measured: list[dict[str, Any]]) -> None:
    """And is dropped again."""
    for transport in ("nccl", "shm"):
        always, *_, sync = planned(case, folder, transport).held
        for rank, result in enumerate(measured):
            phases = result["phases"]
            value = (
                sync.other_ranks_bytes - always.other_ranks_bytes
                if rank
                else sync.local_main_bytes - always.local_main_bytes
            )
            seen = phases["sync"][transport] - phases["always"]
            print(f"{transport}, rank {rank}: {value} B, held {seen} B")
            assert value == pytest.approx(seen, rel=0.1, abs=1000), f"{transport}, rank {rank}"
            assert phases["afterwards"] == pytest.approx(phases["always"], abs=1000)
