"""What of a rank is no other rank's: its random numbers, and its part of a model."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist


def own_shards(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Each parameter's part on this rank, on the CPU: under ZeRO-3 its own, otherwise all of it."""
    return {name: _shard(parameter).to("cpu", copy=True) for name, parameter in model.named_parameters()}


def first_not_finite(model: torch.nn.Module) -> str:
    """The first trained parameter that has a NaN or an infinity in this rank's part of it; "" where none has."""
    trained = (named for named in model.named_parameters() if named[1].requires_grad)
    return next((name for name, parameter in trained if not _own_numbers(parameter).isfinite().all()), "")


def load_own_shards(model: torch.nn.Module, shards: Mapping[str, torch.Tensor]) -> None:
    """Bring back what `own_shards` has given."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # ZeRO-3 keeps small parameters whole beside their shards: let it gather them anew.
            if hasattr(parameter, "ds_tensor") and parameter.ds_status.name == "AVAILABLE":
                parameter.partition()
            _shard(parameter).copy_(shards[name])


def _shard(parameter: torch.nn.Parameter) -> torch.Tensor:
    return getattr(parameter, "ds_tensor", parameter.data)


def _own_numbers(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Its shard without what ZeRO-3 fills up the last ranks' with, for all have one size: memory as it was found."""
    shard = _shard(parameter).flatten()
    if not hasattr(parameter, "ds_tensor"):
        return shard
    before = dist.get_rank(parameter.ds_process_group) * len(shard)
    return shard[: max(0, parameter.ds_numel - before)]


def random_states() -> dict[str, Any]:
    """Of all generators of this process, as they are now."""
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.random.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def seeded_states(seed: int) -> dict[str, Any]:
    """What `random_states` gives once all generators have this seed; they are left as they are."""
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
