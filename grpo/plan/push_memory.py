"""What a push holds beside the model, on the local main and on the other ranks.

From the very buckets that it will go through: the code that sends them cuts them here, on a model without memory.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from grpo.plan.memory_budget import Line, readable
from grpo.plan.model_shape import meta_model
from grpo.weights.buckets import NUM_BUFFERS, Bucket
from grpo.weights.gather import whole_shape
from grpo.weights.source import GatheredSource
from grpo.weights.wire_format import WireFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class PushShape:
    """Sizes of a push, in the engine's dtype."""

    buffer_bytes: int
    """One packed buffer: room for any bucket, and a tensor that is larger than the limit is a bucket of its own."""
    buckets: tuple[tuple[int, ...], ...]
    """For each bucket the elements of its parameters."""
    converted_bytes: int
    """The most that a bucket's parameters take which travel as other tensors (experts fused in memory): whole, and what
    is copied while they are taken apart."""
    dtype_bytes: int

    def shard_bytes(self, world_size: int) -> int:
        """One rank's shards of the largest bucket; each parameter is padded to a multiple of the ranks."""
        return self.dtype_bytes * max(sum(-(-size // world_size) for size in bucket) for bucket in self.buckets)


def push_shape(
    config: Any,
    *,
    dtype: torch.dtype,
    bucket_bytes: int,
    whole_experts: bool = True,
    trust_remote_code: bool = False,
) -> PushShape:
    """The push of the causal language model that `config` describes.

    Args:
        dtype: the engine's.
        bucket_bytes: upper size of a bucket.
        whole_experts: whether the engine loads a layer's experts at once; not so with expert parallelism, or quantised.
    """
    model = meta_model(config, trust_remote_code=trust_remote_code)
    source = GatheredSource(model, wire_dtype=dtype, bucket_bytes=bucket_bytes)
    if whole_experts:
        source.adopt(experts_at_once(source))
    buckets = source.plan().buckets
    return PushShape(
        buffer_bytes=source.buffer_bytes,
        buckets=tuple(
            tuple(whole_shape(parameter).numel() for _, parameter in bucket.parameters) for bucket in buckets
        ),
        converted_bytes=max(_converted_bytes(model, bucket, dtype) for bucket in buckets),
        dtype_bytes=dtype.itemsize,
    )


def experts_at_once(source: GatheredSource) -> WireFormat:
    """What an engine answers that is not quantised and has no expert parallelism, but for the few float32 tensors."""
    return WireFormat(whole_experts=tuple(stack.name for stack in source.experts))


def _converted_bytes(model: Any, bucket: Bucket, dtype: torch.dtype) -> int:
    from transformers.core_model_loading import revert_weight_conversion

    travelling = {meta.name for meta in bucket.metas}
    wholes = {
        name: torch.empty(parameter.shape, dtype=dtype, device="meta")
        for name, parameter in bucket.parameters
        if name not in travelling
    }
    if not wholes:
        return 0
    return _storage_bytes({**wholes, **revert_weight_conversion(model, dict(wholes))})


def _storage_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """Bytes behind `tensors`, views counted once; on the meta device, where storages have no address."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors.values()}.values())


def push_lines(
    push: PushShape,
    *,
    world_size: int,
    num_nodes: int,
    zero3: bool,
    backend: str,
    has_gpus: bool,
    gathers_on_device: bool,
) -> list[Line]:
    """What a rank's device holds during a push; without GPUs, what a rank holds, less the shared buffers.

    All of it is dropped at the push's end. CUDA's allocator keeps the memory for the training that follows.

    Args:
        backend: "nccl" or "shm", from the local main to the engines.
        gathers_on_device: whether shards travel on the device, by NCCL; by gloo they go through the host's memory, and
            only to the local mains.
    """
    lines: list[Line] = []
    shard = push.shard_bytes(world_size) if zero3 and world_size > 1 else 0
    if shard and gathers_on_device:
        lines.append(
            Line(
                key="push_gathered",
                what="a bucket, gathered",
                phase="push",
                num_bytes=world_size * shard + shard,
                how=f"every rank receives every bucket: the largest is {readable(world_size * shard)}, and its own "
                f"shards, cast, {readable(shard)}",
            )
        )
    elif shard and not has_gpus:
        sent = shard if num_nodes > 1 else 0
        lines += [
            Line(
                key="push_gathered",
                what="shards that arrive",
                phase="push",
                holder="local main",
                num_bytes=(world_size - 1) * shard + sent,
                how=f"of the largest bucket, from {world_size - 1} ranks"
                + (", and its own, cast for the other nodes" if sent else ""),
            ),
            Line(
                key="push_sent",
                what="shards that are sent",
                phase="push",
                holder="other ranks",
                num_bytes=shard,
                how="of the largest bucket, cast",
            ),
        ]
    if backend == "nccl":
        packed = min(NUM_BUFFERS, len(push.buckets))
        lines.append(
            Line(
                key="push_packed",
                what="packed buffers",
                phase="push",
                holder="local main",
                num_bytes=packed * push.buffer_bytes,
                how=f"{packed} x {readable(push.buffer_bytes)}, the limit of a bucket or the largest tensor",
            )
        )
    elif shard and gathers_on_device:
        strided = [max(bucket) for bucket in push.buckets if len(bucket) > 1 or bucket[0] % world_size]
        lines.append(
            Line(
                key="push_staged",
                what="a tensor on its way to the host",
                phase="push",
                holder="local main",
                num_bytes=push.dtype_bytes * max(strided, default=0),
                how="its shards lie apart, and are put side by side before they leave the GPU",
            )
        )
    if push.converted_bytes:
        lines.append(
            Line(
                key="push_converted",
                what="experts that are taken apart",
                phase="push",
                holder="local main",
                num_bytes=push.converted_bytes,
                how="of one bucket: as they are fused in memory, and what is copied to split them",
            )
        )
    return lines
