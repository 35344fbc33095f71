"""Texts over a gloo group: torch's own way for objects is pickle, which a stranger at gloo's sockets could make run."""

from typing import Any

import numpy as np
import torch
import torch.distributed as dist


def all_gather_texts(text: str, group: Any) -> list[str]:
    """The text of every rank of `group`, in its order. Collective over the group."""
    mine = _to_tensor(text)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, torch.tensor([len(mine)]), group=group)
    padded = torch.zeros(int(max(lengths)), dtype=torch.uint8)
    padded[: len(mine)] = mine
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded, group=group)
    return [_to_text(part[: int(length)]) for part, length in zip(parts, lengths, strict=True)]


def broadcast_text(text: str | None, source: int, group: Any) -> str:
    """Global rank `source`'s text, on every rank of `group`. Collective over the group.

    Args:
        text: None on the other ranks.
    """
    mine = None if text is None else _to_tensor(text)
    length = torch.tensor([0 if mine is None else len(mine)])
    dist.broadcast(length, src=source, group=group)
    message = torch.empty(int(length), dtype=torch.uint8) if mine is None else mine
    dist.broadcast(message, src=source, group=group)
    return _to_text(message)


def _to_tensor(text: str) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(text.encode()), dtype=np.uint8))


def _to_text(data: torch.Tensor) -> str:
    return data.numpy().tobytes().decode()
