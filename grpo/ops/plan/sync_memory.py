"""Memory of a weight sync beside the model, on the local main and on the other ranks.

The buckets are those of the real weight sync: its own code plans them here, on a meta model.
"""

from dataclasses import dataclass
from typing import Any

import torch

from grpo.ops.plan.lora import PlannedLora
from grpo.ops.plan.memory_budget import BudgetLine, readable
from grpo.ops.plan.model_shape import meta_model
from grpo.ops.plan.zero_memory import Sharding
from grpo.weights.buckets import NUM_BUFFERS
from grpo.weights.gather import whole_shape
from grpo.weights.source import GatheredSource
from grpo.weights.wire_format import WireFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSyncShape:
    """Sizes of a weight sync, in the engine's dtype."""

    buffer_bytes: int
    """One packed buffer, as large as the largest bucket; a tensor above the limit is a bucket of its own."""
    buckets: tuple[tuple[int, ...], ...]
    """Elements of each parameter, for each bucket of a first weight sync."""
    converted_bytes: int
    """Largest sum in a bucket of parameters converted before they are sent (experts fused in memory, weights with their
    adapters): the full tensors and the results."""
    dtype_bytes: int
    first_bytes: int
    """Bytes of a weight sync to an engine without weights."""
    later_bytes: int
    """Bytes of every later weight sync: frozen layers are left out."""
    merge_bytes: int = 0
    """Temporary memory to merge the largest adapter into its weight."""

    def shard_bytes(self, world_size: int) -> int:
        """One rank's shards of the largest bucket; each parameter is padded to a multiple of the ranks."""
        return self.dtype_bytes * max(sum(-(-size // world_size) for size in bucket) for bucket in self.buckets)


def sync_shape(
    config: Any,
    *,
    dtype: torch.dtype,
    bucket_bytes: int,
    whole_experts: bool = True,
    lora: PlannedLora | None = None,
    takes_images: bool = False,
    trains_towers: bool = False,
    trust_remote_code: bool = False,
) -> WeightSyncShape:
    """Compute the weight sync of the causal language model of `config`.

    Args:
        dtype: the engine's.
        bucket_bytes: upper size of a bucket.
        whole_experts: True if the engine loads a layer's experts at once; False with expert parallelism or
            quantisation.
        takes_images: True if towers are sent too.
    """
    adapters = None if lora is None else lora.adapters
    if adapters is None:
        model = meta_model(config, trains_towers=trains_towers, trust_remote_code=trust_remote_code)
    else:
        model = adapters.base
    source = GatheredSource(
        model, wire_dtype=dtype, bucket_bytes=bucket_bytes, lora=adapters, takes_images=takes_images
    )
    if whole_experts:
        source.adopt(experts_at_once(source))
    first = source.plan()
    source.mark_sent()
    return WeightSyncShape(
        buffer_bytes=source.buffer_bytes,
        buckets=tuple(
            tuple(whole_shape(parameter).numel() for _, parameter in bucket.parameters) for bucket in first.buckets
        ),
        converted_bytes=2 * dtype.itemsize * max(map(source.elements_converted, first.buckets)),
        dtype_bytes=dtype.itemsize,
        first_bytes=first.num_bytes,
        later_bytes=source.plan().num_bytes,
        merge_bytes=0 if lora is None else lora.merge_bytes,
    )


def experts_at_once(source: GatheredSource) -> WireFormat:
    """Return the wire format of an engine without quantisation and expert parallelism, except for the few float32
    tensors."""
    return WireFormat(whole_experts=tuple(stack.name for stack in source.experts))


def sync_lines(
    sync: WeightSyncShape, sharding: Sharding, *, backend: str, has_gpus: bool, gathers_on_device: bool
) -> list[BudgetLine]:
    """Return the memory of a weight sync on a rank's device; without GPUs, on the rank, less the shared buffers.

    All of it is freed at the end. CUDA's allocator keeps the memory for the training afterwards.

    Args:
        backend: "nccl" or "shm", from the local main to the engines.
        gathers_on_device: True if shards are gathered on the device, by NCCL; by gloo they go through host memory, and
            only to the local mains.
    """
    lines: list[BudgetLine] = []
    ranks = sharding.world_size
    shard = sync.shard_bytes(ranks) if sharding.gathers else 0
    if shard and gathers_on_device:
        how = f"every rank receives every bucket: the largest is {readable(ranks * shard)}, and its own shards, cast, "
        how += readable(shard)
        lines.append(BudgetLine("sync_gathered", "a bucket, gathered", "sync", ranks * shard + shard, how))
    elif shard and not has_gpus:
        arrived, how = (ranks - 1) * shard, f"of the largest bucket, from {ranks - 1} ranks"
        lines.append(BudgetLine("sync_gathered", "shards that arrive", "sync", arrived, how, holder="local main"))
        how = "of the largest bucket, cast"
        lines.append(BudgetLine("sync_sent", "shards that are sent", "sync", shard, how, holder="other ranks"))
    if backend == "nccl":
        packed = min(NUM_BUFFERS, len(sync.buckets))
        how = f"{packed} x {readable(sync.buffer_bytes)}, the limit of a bucket or the largest tensor"
        num_bytes = packed * sync.buffer_bytes
        lines.append(BudgetLine("sync_packed", "packed buffers", "sync", num_bytes, how, holder="local main"))
    if sync.converted_bytes:
        what = "experts taken apart, or adapters merged" if sync.merge_bytes else "experts that are taken apart"
        how = "of one bucket: as they are in memory, and what becomes of them"
        lines.append(BudgetLine("sync_converted", what, "sync", sync.converted_bytes, how, holder="local main"))
    if sync.merge_bytes:
        what, how = "one adapter, being merged", "the largest weight, four times in float32"
        lines.append(BudgetLine("sync_merge", what, "sync", sync.merge_bytes, how, holder="local main"))
    return lines
