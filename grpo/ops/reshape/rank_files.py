"""Each rank's own files beside DeepSpeed's: its position in the run, random states, its part of a reference model.

The position is counted in generation batches: unlike micro-batches, they are the same for any number of ranks.
"""

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from grpo.checkpoints.checkpoints import CompleteRecord
from grpo.checkpoints.pickles import load_mapped
from grpo.ops.reshape.zero import reparted
from grpo.rollout.ahead import dealt

_WRAPPED = "module."  # prefix of a reference model's parameter names, wrapped by DeepSpeed


def generation_batches(checkpoint: Path, record: CompleteRecord) -> int:
    """Return the number of finished generation batches.

    Raises:
        ValueError: the checkpoint is in the middle of a batch; each rank holds its own part of the rest.
    """
    sampling = record.sampling
    per_batch = sampling["steps_per_generation"] * sampling["num_iterations"]
    state = load_mapped(checkpoint / "rollout_state_0.pt")
    if "generation_batches" in state:  # reshaped before
        return state["generation_batches"]
    batches, rest = divmod(state["step"], per_batch)
    if rest or state["batch"] is not None:
        accumulation = sampling["gradient_accumulation_steps"]
        raise ValueError(
            f"{checkpoint} lies in the middle of a generation batch [GRPO-707]: {rest} of its {per_batch} "
            "micro-batches are trained on, and each rank holds its own part of the rest. Take a checkpoint at the end "
            f"of one: save_steps a multiple of {per_batch}/{accumulation} optimizer steps, or `touch "
            "<output_dir>/stop`, which goes on to the end of the batch"
        )
    return batches


def reference_parts(checkpoint: Path, ranks: int) -> list[dict[str, torch.Tensor]] | None:
    """Load each rank's part of the reference model; None without one."""
    parts = [load_mapped(checkpoint / f"rollout_state_{rank}.pt")["reference"] for rank in range(ranks)]
    return None if parts[0] is None else parts


def ahead_parts(checkpoint: Path, before: int, ranks: int) -> list[dict[str, Any] | None]:
    """Deal the batches of asynchronous generation out to `ranks` new ranks."""
    kept = [load_mapped(checkpoint / f"rollout_state_{rank}.pt").get("ahead") for rank in range(before)]
    if not all(kept):
        return [None] * ranks
    return [{**kept[0], "batches": batches} for batches in dealt([part["batches"] for part in kept], ranks)]


def rollout_state(
    parts: list[dict[str, torch.Tensor]] | None,
    *,
    batches: int,
    rank: int,
    ranks: int,
    shapes: dict[str, torch.Size] | None,
    ahead: dict[str, Any] | None,
) -> dict[str, Any]:
    """Build `rollout_state_<rank>.pt` for a rank of `ranks`.

    Args:
        parts: from `reference_parts`.
        shapes: of parameters partitioned by ZeRO-3; None if the ranks hold them whole.
        ahead: from `ahead_parts`.
    """
    reference = parts[0] if parts else None
    if parts and shapes is not None:
        reference = {
            name: reparted([part[name] for part in parts], shapes[name.removeprefix(_WRAPPED)], rank, ranks)
            for name in parts[0]
        }
    return {"generation_batches": batches, "batch": None, "reference": reference, "ahead": ahead}


def random_name(rank: int, ranks: int) -> str:
    """Name of transformers' file of random states."""
    return f"rng_state_{rank}.pth" if ranks > 1 else "rng_state.pth"


def random_states(checkpoint: Path, record: CompleteRecord, rank: int) -> dict[str, Any]:
    """Return the random states of a rank: its old ones, or for an added rank new ones derived from seed, step and
    rank."""
    before = record.world_size
    states = load_mapped(checkpoint / random_name(min(rank, before - 1), before))
    if rank < before:
        return states
    seed = int(np.random.SeedSequence([record.sampling["seed"], record.step, rank]).generate_state(1)[0])
    fresh = {
        "python": random.Random(seed).getstate(),
        "numpy": np.random.RandomState(seed).get_state(),
        "cpu": torch.Generator().manual_seed(seed).get_state(),
    }
    if "cuda" in states:
        cuda = states["cuda"]
        fresh["cuda"] = [_seeded(each, seed) for each in cuda] if isinstance(cuda, list) else _seeded(cuda, seed)
    return {**states, **fresh}


def _seeded(state: torch.Tensor, seed: int) -> torch.Tensor:
    """Return a CUDA generator's state with another seed: 8 bytes of seed, 8 of offset (torch 2.13)."""
    seeded = state.clone()
    seeded[:8] = torch.tensor([seed], dtype=torch.int64).view(torch.uint8)
    return seeded
