"""What of a rank is no other rank's: its random numbers, and its part of a model."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


def shards(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Each parameter's part on this rank: under ZeRO-3 its own, otherwise all of it."""
    for name, parameter in model.named_parameters():
        yield name, getattr(parameter, "ds_tensor", parameter.data)


def random_states() -> dict[str, Any]:
    """Of all generators of this process, as they are now."""
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.random.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_random_states(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.random.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
