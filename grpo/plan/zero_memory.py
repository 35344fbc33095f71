"""Estimates of ZeRO's states and buffers, after the tensors of DeepSpeed 0.19.8 (runtime/zero/stage3.py).

A test compares them with the storage that a real engine holds.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from grpo.plan.memory_budget import Line, short_count
from grpo.plan.model_shape import ModelShape
from grpo.refusals import DDP_BYTES_PER_PARAMETER

MASTER_BYTES = 4  # of a parameter: the float32 copy that the optimizer updates
ADAM_BYTES = 8  # of a parameter: two float32 moments


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """How states are spread over ranks. Sizes are elements; the defaults are DeepSpeed's, which a test compares."""

    stage: Literal[0, 1, 2, 3]
    """ZeRO stage; 0: every rank holds all (DDP)."""
    offload_optimizer: str = "none"
    """'none', 'cpu' or 'nvme'."""
    offload_param: str = "none"
    reduce_bucket_size: int = 500_000_000
    param_persistence_threshold: int = 100_000
    max_live_parameters: int = 1_000_000_000
    sub_group_size: int = 1_000_000_000


def read_sharding(zero_optimization: Mapping[str, Any], *, hidden_size: int) -> Sharding:
    """The `zero_optimization` section of a DeepSpeed configuration; "auto" as transformers and accelerate fill it."""
    auto = {"reduce_bucket_size": hidden_size**2, "stage3_param_persistence_threshold": 10 * hidden_size}

    def size(key: str, default: int) -> int:
        value = zero_optimization.get(key, default)
        return int(float(auto.get(key, default) if value == "auto" else value))

    def device(key: str) -> str:
        value = (zero_optimization.get(key) or {}).get("device", "none")
        return "none" if value in (None, "auto") else value

    default = Sharding(stage=0)
    return Sharding(
        stage=zero_optimization.get("stage", 0),
        offload_optimizer=device("offload_optimizer"),
        offload_param=device("offload_param"),
        reduce_bucket_size=size("reduce_bucket_size", default.reduce_bucket_size),
        param_persistence_threshold=size("stage3_param_persistence_threshold", default.param_persistence_threshold),
        max_live_parameters=size("stage3_max_live_parameters", default.max_live_parameters),
        sub_group_size=size("sub_group_size", default.sub_group_size),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """Bytes of weights, gradients and optimizer states that one rank holds for as long as it trains."""

    device_bytes: int
    host_bytes: int
    """Offloaded to the host's memory; what goes to NVMe is not counted."""
    how: str


def states_of(shape: ModelShape, sharding: Sharding, *, world_size: int, dtype_bytes: int) -> States:
    """ZeRO's states (Rajbhandari et al., https://arxiv.org/abs/1910.02054, section 3) as DeepSpeed lays them out.

    With e bytes per element of the training dtype, a parameter has e bytes of weight, e of gradient
    (`grad_partitions_flat_buffer`), 4 of master weight (`fp32_partitioned_groups_flat`) and 8 of Adam moments: 16 in
    bfloat16 and float16, 20 in float32. In float32 too the master weight is a copy: DeepSpeed would do without it on
    equal devices, but compares a `torch.device` with a string, which is never equal. Stage 1 divides the last two by
    the ranks, stage 2 the gradient as well, stage 3 all. Optimizer offload moves gradient, master weight and moments to
    the host, with a float32 gradient of 4 bytes beside them.
    """
    whole, shard = shape.num_parameters, shape.sharded_elements(world_size)
    if sharding.stage == 0:
        how = f"{DDP_BYTES_PER_PARAMETER} B x {short_count(whole)} parameters on every rank (DDP: float32, Adam)"
        return States(device_bytes=DDP_BYTES_PER_PARAMETER * whole, host_bytes=0, how=how)
    weight = dtype_bytes * (shard if sharding.stage == 3 else whole)
    gradient = dtype_bytes * (shard if sharding.stage >= 2 else whole)
    optimizer = (MASTER_BYTES + ADAM_BYTES) * shard
    how = f"({dtype_bytes} weight + {dtype_bytes} gradient + {MASTER_BYTES} master + {ADAM_BYTES} Adam) B x "
    how += f"{short_count(whole)} / {world_size}"
    if sharding.stage < 3:
        how += f"; under ZeRO-{sharding.stage} the weight{'' if sharding.stage == 2 else ' and gradient'} whole"
    device, host = weight + gradient + optimizer, 0
    if sharding.offload_optimizer != "none":
        device -= gradient + optimizer
        host += gradient + optimizer + MASTER_BYTES * shard if sharding.offload_optimizer == "cpu" else 0
        how += f"; all but the weight on {sharding.offload_optimizer}"
    if sharding.offload_param != "none" and sharding.stage == 3:
        device -= weight
        host += weight if sharding.offload_param == "cpu" else 0
        how += f"; the weight on {sharding.offload_param}"
    return States(device_bytes=device, host_bytes=host, how=how)


def buffer_lines(shape: ModelShape, sharding: Sharding, *, world_size: int, dtype_bytes: int) -> list[Line]:
    """What DeepSpeed keeps between steps beside the states: it dominates small models."""
    if sharding.stage == 0:
        return []
    lines = [
        Line(
            key="reduce_bucket",
            what="gradient bucket",
            phase="always",
            num_bytes=sharding.reduce_bucket_size * dtype_bytes,
            how=f"reduce_bucket_size {short_count(sharding.reduce_bucket_size)} x {dtype_bytes} B",
        )
    ]
    if sharding.stage == 3 and world_size > 1:  # one rank's shard is the whole
        whole = shape.elements_up_to(sharding.param_persistence_threshold)
        lines.append(
            Line(
                key="persistent",
                what="small parameters, kept whole",
                phase="always",
                num_bytes=whole * dtype_bytes,
                how=f"{short_count(whole)} in tensors up to stage3_param_persistence_threshold "
                f"{short_count(sharding.param_persistence_threshold)} x {dtype_bytes} B",
            )
        )
    return lines


def gather_lines(shape: ModelShape, sharding: Sharding, *, world_size: int, dtype_bytes: int) -> list[Line]:
    """What is gathered, or about to be reduced, while a micro-batch runs."""
    if sharding.stage == 0:
        return []
    reduced = max(sharding.reduce_bucket_size, shape.largest_tensor)
    lines = [
        Line(
            key="reduce_copy",
            what="gradients being reduced",
            phase="forward and backward",
            num_bytes=min(reduced, shape.num_parameters) * dtype_bytes,
            how="a flat copy of the bucket, or of one gradient larger than it",
        )
    ]
    if sharding.stage == 3 and world_size > 1:
        live = min(shape.num_parameters, sharding.max_live_parameters)
        lines += [
            Line(
                key="largest_layer",
                what="largest gathered layer",
                phase="forward and backward",
                num_bytes=shape.largest_layer * dtype_bytes,
                how=f"{short_count(shape.largest_layer)} x {dtype_bytes} B, whatever the number of ranks",
            ),
            Line(
                key="gather_buffers",
                what="other gathered layers",
                phase="forward and backward",
                num_bytes=max(0, live - shape.largest_layer) * dtype_bytes,
                how=f"prefetched or kept for reuse, up to stage3_max_live_parameters "
                f"{short_count(sharding.max_live_parameters)} in all",
            ),
        ]
    return lines


def step_line(shape: ModelShape, sharding: Sharding, *, world_size: int, dtype_bytes: int) -> list[Line]:
    """The gradients of one sub-group, flattened and in float32, while the optimizer works on it."""
    if sharding.stage != 3 or sharding.offload_optimizer != "none":
        return []
    elements = min(sharding.sub_group_size, shape.sharded_elements(world_size))
    return [
        Line(
            key="step_gradients",
            what="gradients in float32",
            phase="optimizer step",
            num_bytes=elements * (MASTER_BYTES + (dtype_bytes if dtype_bytes != MASTER_BYTES else 0)),
            how=f"of a sub-group of at most {short_count(sharding.sub_group_size)}, and the copy that they come from",
        )
    ]


def frozen_line(key: str, what: str, parameters: int, sharding: Sharding, *, world_size: int, dtype_bytes: int) -> Line:
    """A model that only runs forward: a reference or a reward model. Sharded under ZeRO-3, else whole on every rank."""
    ranks = world_size if sharding.stage == 3 else 1
    return Line(
        key=key,
        what=what,
        phase="always",
        num_bytes=-(-parameters // ranks) * dtype_bytes,
        how=f"{dtype_bytes} B x {short_count(parameters)}" + (f" / {ranks}" if ranks > 1 else " on every rank"),
    )
