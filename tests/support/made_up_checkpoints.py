"""Folders that look like checkpoints of two ranks."""

import random
from pathlib import Path

import numpy as np
import torch

from grpo.checkpoints.checkpoints import (
    PARTIAL_FILE,
    read_rank_records,
    write_complete,
    write_rank_record,
)

SAMPLING = {
    "generation_batch_size": 24,
    "num_generations": 4,
    "steps_per_generation": 3,
    "num_iterations": 1,
    "gradient_accumulation_steps": 3,
    "seed": 42,
    "spare_groups": 0,
}
"""The settings of a run with three micro-batches a step."""

FILES = [
    "model.safetensors",
    "trainer_state.json",
    "global_step3/mp_rank_00_model_states.bin",
    "rng_state_0.bin",
    "rollout_state_1.bin",
    "latest",
    "global_step3/zero_pp_rank_0_mp_rank_00_model_states.bin",
    "global_step3/bf16_zero_pp_rank_1_mp_rank_00_optim_states.bin",
]


def fill(folder: Path) -> Path:
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"0123456789")
    return folder


def make(output_dir: Path, step: int, *, complete: bool = True, resumable: bool = True) -> Path:
    """`checkpoint-<step>` as two ranks write it; one that is not complete was begun by us."""
    folder = fill(output_dir / f"checkpoint-{step}")
    (folder / PARTIAL_FILE).touch()
    if complete:
        for rank in (0, 1):
            write_rank_record(folder, rank, 2)
        sums, missing = read_rank_records(folder, range(2))
        assert not missing
        write_complete(folder, step=step, world_size=2, sampling={"seed": 42}, resumable=resumable, sums=sums)
    return folder


def names(output_dir: Path) -> set[str]:
    return {path.name for path in output_dir.iterdir()}


def make_reshapable(folder: Path, *, step: int, batch: list | None = None, ranks: int = 2) -> Path:
    """A checkpoint without DeepSpeed, after 2 steps: `grpo reshape` takes its random numbers and its batches.

    Args:
        step: micro-batches that have been trained on.
    """
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights")
    for rank in range(ranks):
        torch.save({"step": step, "batch": batch, "reference": None}, folder / f"rollout_state_{rank}.pt")
        states = {
            "python": random.Random(rank).getstate(),
            "numpy": np.random.RandomState(rank).get_state(),
            "cpu": torch.Generator().manual_seed(rank).get_state(),
            "cuda": [torch.full((16,), rank, dtype=torch.uint8)],
        }
        torch.save(states, folder / f"rng_state_{rank}.pth")
    write_complete(folder, step=2, world_size=ranks, sampling=SAMPLING)
    return folder
