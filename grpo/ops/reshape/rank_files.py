"""What each rank keeps beside DeepSpeed's files: its place in the run, random numbers, its part of a reference model.

The place is counted in generation batches, which are the same for any number of ranks; micro-batches are not.
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

_WRAPPED = "module."  # before the names of a reference model's parameters, which DeepSpeed has wrapped


def generation_batches(checkpoint: Path, record: CompleteRecord) -> int:
    """How many generation batches have been trained on.

    Raises:
        ValueError: the checkpoint lies in the middle of one, which the ranks hold in parts.
    """
    sampling = record.sampling
    per_batch = sampling["steps_per_generation"] * sampling["num_iterations"]
    state = load_mapped(checkpoint / "rollout_state_0.pt")
    if "generation_batches" in state:  # was reshaped itself
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
    """What each of its ranks has saved of the reference model; None: there is none."""
    parts = [load_mapped(checkpoint / f"rollout_state_{rank}.pt")["reference"] for rank in range(ranks)]
    return None if parts[0] is None else parts


def ahead_parts(checkpoint: Path, before: int, ranks: int) -> list[dict[str, Any] | None]:
    """For each of `ranks`, what of batches that were sampled ahead it goes on with."""
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
    """`rollout_state_<rank>.pt` of a rank of `ranks`.

    Args:
        parts: as `reference_parts` gives them.
        shapes: of parameters that ZeRO-3 has cut into parts; None where the ranks hold them whole.
        ahead: of `ahead_parts`.
    """
    reference = parts[0] if parts else None
    if parts and shapes is not None:
        reference = {
            name: reparted([part[name] for part in parts], shapes[name.removeprefix(_WRAPPED)], rank, ranks)
            for name in parts[0]
        }
    return {"generation_batches": batches, "batch": None, "reference": reference, "ahead": ahead}


def random_name(rank: int, ranks: int) -> str:
    """Of transformers' file of random states."""
    return f"rng_state_{rank}.pth" if ranks > 1 else "rng_state.pth"


def random_states(checkpoint: Path, record: CompleteRecord, rank: int) -> dict[str, Any]:
    """The states of a rank: its old ones, or for a rank that is new ones of their own, from seed, step and rank."""
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
    """A CUDA generator's state with another seed: 8 bytes of seed, 8 of offset (torch 2.13)."""
    seeded = state.clone()
    seeded[:8] = torch.tensor([seed], dtype=torch.int64).view(torch.uint8)
    return seeded
