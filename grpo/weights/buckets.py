"""What is gathered, packed and sent at a time: buckets, and the places of their parameters in a packed buffer."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, islice

import torch

# One packed buffer is being filled, one loaded, and one waits between the two where their times differ.
NUM_BUFFERS = 3
# A model is cut into this many buckets at least, where the limit would allow larger ones: what is gathered before the
# engine has its first bucket, and loaded after the last gather, overlaps with nothing.
MIN_BUCKETS = 16
MIN_BUCKET_BYTES = 2**20
ALIGNMENT_BYTES = 64  # of a parameter in a packed buffer: a view needs its dtype's alignment, kernels like a cache line


@dataclass(frozen=True, slots=True)
class ParamMeta:
    """One tensor as it travels."""

    name: str
    """In the checkpoint."""
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """A run of parameters that is gathered together and travels in one packed buffer."""

    parameters: tuple[tuple[str, torch.Tensor], ...]
    """And buffers; under the model's names."""
    metas: tuple[ParamMeta, ...]
    """What they come out as: under the checkpoint's names, whole, in the dtypes that the engine holds."""


def aligned(metas: Sequence[ParamMeta]) -> tuple[ParamMeta, ...]:
    """In an order in which each stands at a multiple of its dtype's size, even packed without gaps: the widest first.

    Each slice of a packed buffer is viewed in its dtype, which torch refuses at any other place: "offset must be
    divisible by"; so it is in vLLM's own `unpack_tensor` (weight_transfer/packed_tensor.py, 0.31).
    """
    return tuple(sorted(metas, key=lambda meta: -meta.dtype.itemsize))


def bucket_limit(bucket_bytes: int, model_bytes: int) -> int:
    """Upper size of a bucket, but for a single larger parameter.

    Args:
        bucket_bytes: what is asked for, in the engine's dtype, as `model_bytes`.
    """
    return min(bucket_bytes, max(model_bytes // MIN_BUCKETS, MIN_BUCKET_BYTES))


def make_buckets(sizes_bytes: Sequence[int], bucket_bytes: int) -> list[list[int]]:
    """Cut parameters, in order, into runs of at most `bucket_bytes`; a larger parameter is a bucket of its own.

    Args:
        sizes_bytes: size of each parameter, whole.

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
    """What a worker is told of the tensors of a weight sync; a scalar is a tensor of one, as in vLLM's transfers
    (0.31)."""
    return {
        "names": [meta.name for meta in metas],
        "dtype_names": [str(meta.dtype).removeprefix("torch.") for meta in metas],
        "shapes": [list(meta.shape) or [1] for meta in metas],
    }


def parted(
    names: Sequence[str], dtype_names: Sequence[str], shapes: Sequence[Sequence[int]], sizes: Sequence[int]
) -> list[list[ParamMeta]]:
    """What `described` was given, cut into buckets of so many tensors each."""
    metas = (
        ParamMeta(name, getattr(torch, dtype_name), tuple(shape))
        for name, dtype_name, shape in zip(names, dtype_names, shapes, strict=True)
    )
    return [list(islice(metas, size)) for size in sizes]


def packed_bytes(metas: Sequence[ParamMeta], alignment_bytes: int = ALIGNMENT_BYTES) -> int:
    """Space that `metas` take in a packed buffer."""
    return sum(-(-meta_bytes(meta) // alignment_bytes) * alignment_bytes for meta in metas)


def packed_offsets(metas: Sequence[ParamMeta], alignment_bytes: int = ALIGNMENT_BYTES) -> list[int]:
    """Where each of `metas` begins in a packed buffer, in bytes."""
    return [0, *accumulate(packed_bytes([meta], alignment_bytes) for meta in metas)][: len(metas)]


def packed_places(
    buffer: torch.Tensor, metas: Sequence[ParamMeta], alignment_bytes: int = ALIGNMENT_BYTES
) -> list[torch.Tensor]:
    """Views of a packed buffer, [bytes] uint8: the place of each of `metas`, in its dtype and shape."""
    return [
        buffer[offset : offset + meta_bytes(meta)].view(meta.dtype).view(meta.shape)
        for meta, offset in zip(metas, packed_offsets(metas, alignment_bytes), strict=True)
    ]
