"""State specific to a rank: its random states, and its shards of a model."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist


def own_shards(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return this rank's part of each parameter, on the CPU: its shard under ZeRO-3, otherwise all of it."""
    return {name: _shard(parameter).to("cpu", copy=True) for name, parameter in model.named_parameters()}


def first_not_finite(model: torch.nn.Module) -> str:
    """Name of the first trained parameter with NaN or infinity in this rank's part; "" if there is none."""
    trained = (named for named in model.named_parameters() if named[1].requires_grad)
    return next((name for name, parameter in trained if not _own_numbers(parameter).isfinite().all()), "")


def load_own_shards(model: torch.nn.Module, shards: Mapping[str, torch.Tensor]) -> None:
    """Restore the result of `own_shards`."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # ZeRO-3 keeps small parameters gathered beside their shards: make it gather them again.
            if hasattr(parameter, "ds_tensor") and parameter.ds_status.name == "AVAILABLE":
                parameter.partition()
            _shard(parameter).copy_(shards[name])


def _shard(parameter: torch.nn.Parameter) -> torch.Tensor:
    return getattr(parameter, "ds_tensor", parameter.data)


def _own_numbers(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return the shard without padding: ZeRO-3 pads the last ranks' shards to equal sizes, with uninitialised
    memory."""
    shard = _shard(parameter).flatten()
    if not hasattr(parameter, "ds_tensor"):
        return shard
    before = dist.get_rank(parameter.ds_process_group) * len(shard)
    return shard[: max(0, parameter.ds_numel - before)]


def random_states() -> dict[str, Any]:
    """Return the states of all generators of this process."""
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.random.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def seeded_states(seed: int) -> dict[str, Any]:
    """Return the result of `random_states` after seeding all generators; leaves them unchanged."""
    before = random_states()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    seeded = random_states()
    restore_random_states(before)
    return seeded


def restore_random_states(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.random.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
