"""Which tensor is in which bucket, and where it lies in a packed buffer."""

from collections.abc import Sequence

import pytest
import torch
from vllm.distributed.weight_transfer.packed_tensor import unpack_tensor

from grpo.weights.buckets import (
    ParamMeta,
    aligned,
    described,
    make_buckets,
    meta_bytes,
    packed_bytes,
    packed_offsets,
    packed_places,
)
from grpo.weights.nccl import UNALIGNED


@pytest.mark.parametrize(
    ("sizes", "limit", "buckets"),
    [
        ([], 10, []),
        ([3, 3, 3], 10, [[0, 1, 2]]),
        ([3, 3, 5, 1], 6, [[0, 1], [2, 3]]),
        ([20, 3, 3], 6, [[0], [1, 2]]),  # larger than a bucket: alone
        ([3, 20, 3], 6, [[0], [1], [2]]),
        ([6, 6], 6, [[0], [1]]),
        ([0, 6, 0], 6, [[0, 1, 2]]),
    ],
)
def test_make_buckets_splits_sizes_by_limit(sizes: list[int], limit: int, buckets: list[list[int]]) -> None:
    assert make_buckets(sizes, limit) == buckets


def test_packed_offsets_are_aligned_and_in_order() -> None:
    metas = [ParamMeta(f"p{i}", torch.bfloat16, (size,)) for i, size in enumerate([3, 40, 64])]
    assert packed_offsets(metas) == [0, 64, 192]  # 6 bytes, then 80, which take two lines
    assert packed_bytes(metas) == 320
    assert (packed_offsets(metas, 1), packed_bytes(metas, 1)) == ([0, 6, 86], 214)
    buffer = torch.zeros(packed_bytes(metas), dtype=torch.uint8)
    for index, place in enumerate(packed_places(buffer, metas)):
        assert (place.dtype, place.shape) == (metas[index].dtype, metas[index].shape)
        place.fill_(1.0)
    assert buffer.view(torch.bfloat16).sum() == 3 + 40 + 64
    assert (packed_offsets([]), packed_bytes([])) == ([], 0)


def test_aligned_bucket_of_mixed_dtypes_unpacks_in_vllm() -> None:
    """Without gaps, in any order that the model has: an odd number of bfloat16 before a float32 cannot be viewed."""
    metas = [
        ParamMeta("odd", torch.bfloat16, (3,)),
        ParamMeta("bias", torch.float32, (5,)),
        ParamMeta("none", torch.float32, (0, 2)),
        ParamMeta("table", torch.int64, (1,)),
        ParamMeta("byte", torch.uint8, (3,)),
        ParamMeta("last", torch.float32, (1,)),
    ]

    def travel(metas: Sequence[ParamMeta]) -> dict[str, torch.Tensor]:
        buffer = torch.zeros(packed_bytes(metas, UNALIGNED), dtype=torch.uint8)
        for index, place in enumerate(packed_places(buffer, metas, UNALIGNED)):
            place.fill_(index + 1)
        dtypes = [meta.dtype for meta in metas]
        shapes = [list(meta.shape) for meta in metas]
        return dict(unpack_tensor(buffer, [m.name for m in metas], shapes, dtypes, [meta_bytes(m) for m in metas]))

    with pytest.raises(RuntimeError, match="divisible"):
        travel(metas)
    arrived = travel(aligned(metas))
    assert arrived.keys() == {meta.name for meta in metas}
    for index, meta in enumerate(aligned(metas)):
        tensor = arrived[meta.name]
        assert (tensor.dtype, tuple(tensor.shape)) == (meta.dtype, meta.shape)
        assert (tensor == index + 1).all()


def test_described_scalar_has_shape_of_one() -> None:
    """vLLM's worker makes views of what is packed, and none of no sizes (0.31)."""
    metas = [ParamMeta("scale", torch.float32, torch.Size([])), ParamMeta("w", torch.float32, torch.Size([2, 3]))]
    assert described(metas)["shapes"] == [[1], [2, 3]]
