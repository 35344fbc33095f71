"""Buckets of parameters, gathered, packed and sent together, and the layout of their packed buffers."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, islice

import torch

# One packed buffer is filled, one is loaded, and one waits in between if their times differ.
NUM_BUFFERS = 3
# Least number of buckets, even if the limit allows larger ones: gathering the first bucket and loading the last one
# overlap with nothing.
MIN_BUCKETS = 16
MIN_BUCKET_BYTES = 2**20
# of a parameter in a packed buffer: a view needs its dtype's alignment, kernels prefer a cache line
ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True)
class ParamMeta:
    """Metadata of one tensor as it is sent.

    Example:
        ParamMeta("model.norm.weight", torch.bfloat16, (1024,))
    """

    name: str
    """Name in the checkpoint."""
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Parameters gathered together and sent in one packed buffer."""

    parameters: tuple[tuple[str, torch.Tensor], ...]
    """Parameters and buffers, by the model's names."""
    metas: tuple[ParamMeta, ...]
    """Sent tensors: by checkpoint names, unsharded, in the engine's dtypes."""


def aligned(metas: Sequence[ParamMeta]) -> tuple[ParamMeta, ...]:
    """Sort by dtype size, widest first, so that tensors packed without gaps are aligned to their dtypes.

    Each slice of a packed buffer is viewed in its dtype, which torch refuses at a misaligned offset ("offset must be
    divisible by"); vLLM's own `unpack_tensor` does the same (weight_transfer/packed_tensor.py, 0.31).
    """
    return tuple(sorted(metas, key=lambda meta: -meta.dtype.itemsize))


def bucket_limit(bucket_bytes: int, model_bytes: int) -> int:
    """Upper size of a bucket, except for a single larger parameter.

    Args:
        bucket_bytes: requested size, in the engine's dtype like `model_bytes`.
    """
    return min(bucket_bytes, max(model_bytes // MIN_BUCKETS, MIN_BUCKET_BYTES))


def make_buckets(sizes_bytes: Sequence[int], bucket_bytes: int) -> list[list[int]]:
    """Cut parameters, in order, into runs of at most `bucket_bytes`; a larger parameter is a bucket of its own.

    Args:
        sizes_bytes: unsharded size of each parameter.

    Returns:
        Indices into `sizes_bytes`, each exactly once, in order.
    """
    buckets: list[list[int]] = []
    filled = 0
    for index, size in enumerate(sizes_bytes):
        if not buckets or filled + size > bucket_bytes:
            buckets.append([])
            filled = 0
        buckets[-1].append(index)
        filled += size
    return buckets


def meta_bytes(meta: ParamMeta) -> int:
    return meta.dtype.itemsize * torch.Size(meta.shape).numel()


def described(metas: Sequence[ParamMeta]) -> dict[str, list]:
    """Describe the tensors of a weight sync for workers; a scalar becomes a tensor of one element, as in vLLM
    (0.31)."""
    return {
        "names": [meta.name for meta in metas],
        "dtype_names": [str(meta.dtype).removeprefix("torch.") for meta in metas],
        "shapes": [list(meta.shape) or [1] for meta in metas],
    }


def parted(
    names: Sequence[str], dtype_names: Sequence[str], shapes: Sequence[Sequence[int]], sizes: Sequence[int]
) -> list[list[ParamMeta]]:
    """Rebuild the metas from the values of `described`, cut into buckets of the given sizes."""
    metas = (
        ParamMeta(name, getattr(torch, dtype_name), tuple(shape))
        for name, dtype_name, shape in zip(names, dtype_names, shapes, strict=True)
    )
    return [list(islice(metas, size)) for size in sizes]


def packed_bytes(metas: Sequence[ParamMeta], alignment_bytes: int = ALIGNMENT_BYTES) -> int:
    """Size of `metas` in a packed buffer."""
    return sum(-(-meta_bytes(meta) // alignment_bytes) * alignment_bytes for meta in metas)


def packed_offsets(metas: Sequence[ParamMeta], alignment_bytes: int = ALIGNMENT_BYTES) -> list[int]:
    """Offsets of `metas` in a packed buffer, in bytes."""
    return [0, *accumulate(packed_bytes([meta], alignment_bytes) for meta in metas)][: len(metas)]


def packed_places(
    buffer: torch.Tensor, metas: Sequence[ParamMeta], alignment_bytes: int = ALIGNMENT_BYTES
) -> list[torch.Tensor]:
    """Views of a packed buffer, [bytes] uint8: one per meta, in its dtype and shape."""
    return [
        buffer[offset : offset + meta_bytes(meta)].view(meta.dtype).view(meta.shape)
        for meta, offset in zip(metas, packed_offsets(metas, alignment_bytes), strict=True)
    ]
