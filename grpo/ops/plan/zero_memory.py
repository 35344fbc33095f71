"""Estimates of ZeRO's states and buffers, after the tensors of DeepSpeed 0.19.8 (runtime/zero/stage3.py).

A test compares them with the storage of a real engine.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from grpo.config.refusals import ddp_bytes
from grpo.ops.plan.memory_budget import BudgetLine, Phase, short_count
from grpo.ops.plan.model_shape import ModelShape

MASTER_BYTES = 4  # per parameter: the optimizer's float32 copy
ADAM_BYTES = 8  # per parameter: two float32 moments
SIZES = {  # fields of `Sharding`, and their keys in DeepSpeed's configuration
    "reduce_bucket_size": "reduce_bucket_size",
    "param_persistence_threshold": "stage3_param_persistence_threshold",
    "max_live_parameters": "stage3_max_live_parameters",
    "sub_group_size": "sub_group_size",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """Sharding of states over ranks. Sizes are elements; the defaults are DeepSpeed's, checked by a test."""

    stage: Literal[0, 1, 2, 3]
    """ZeRO stage; 0: every rank holds all (DDP)."""
    world_size: int
    """Ranks of all nodes."""
    dtype_bytes: int
    """Bytes of an element in the compute dtype."""
    loaded_bytes: int = MASTER_BYTES
    """Bytes of an element in the dtype in which models are loaded; without DeepSpeed they stay in it."""
    offload_optimizer: str = "none"
    """'none', 'cpu' or 'nvme'."""
    offload_param: str = "none"
    reduce_bucket_size: int = 500_000_000
    param_persistence_threshold: int = 100_000
    max_live_parameters: int = 1_000_000_000
    sub_group_size: int = 1_000_000_000

    @property
    def gathers(self) -> bool:
        """True if weights have to be gathered before use."""
        return self.stage == 3 and self.world_size > 1


def read_sharding(
    zero_optimization: Mapping[str, Any],
    *,
    hidden_size: int,
    world_size: int,
    dtype_bytes: int,
    loaded_bytes: int = MASTER_BYTES,
) -> Sharding:
    """Read the `zero_optimization` section of a DeepSpeed configuration; "auto" as transformers and accelerate fill
    it."""
    filled = {"reduce_bucket_size": hidden_size**2, "param_persistence_threshold": 10 * hidden_size}
    given = {field: zero_optimization[key] for field, key in SIZES.items() if key in zero_optimization}
    sizes = {field: filled.get(field) if value == "auto" else int(float(value)) for field, value in given.items()}

    def device(key: str) -> str:
        value = (zero_optimization.get(key) or {}).get("device", "none")
        return "none" if value in (None, "auto") else value

    return Sharding(
        stage=zero_optimization.get("stage", 0),
        world_size=world_size,
        dtype_bytes=dtype_bytes,
        loaded_bytes=loaded_bytes,
        offload_optimizer=device("offload_optimizer"),
        offload_param=device("offload_param"),
        **{field: value for field, value in sizes.items() if value is not None},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """Bytes held by one rank throughout training: weights, and gradients and moments of trained parameters."""

    device_bytes: int
    host_bytes: int
    """Offloaded to host memory; offload to NVMe is not counted."""
    how: str


def states_of(shape: ModelShape, sharding: Sharding) -> States:
    """Compute ZeRO's states of trained parameters (Rajbhandari et al., https://arxiv.org/abs/1910.02054, section 3),
    laid out as in DeepSpeed.

    With e bytes per element of the training dtype, a parameter has e bytes of weight, e of gradient
    (`grad_partitions_flat_buffer`), 4 of master weight (`fp32_partitioned_groups_flat`) and 8 of Adam moments: 16 in
    bfloat16 and float16, 20 in float32. In float32 too the master weight is a copy: DeepSpeed would do without it on
    equal devices, but compares a `torch.device` with a string, which is never equal. Stage 1 divides the last two by
    the ranks, stage 2 the gradient as well, stage 3 all. Optimizer offload moves gradient, master weight and moments to
    the host, with a float32 gradient of 4 bytes beside them.
    """
    stage, element = sharding.stage, sharding.dtype_bytes
    whole, shard = shape.trained.elements, shape.trained.sharded(sharding.world_size)
    if stage == 0:
        each = ddp_bytes_of(shape, sharding)
        what = "weight, gradient, Adam" + (", buckets" if sharding.world_size > 1 else "")
        how = f"{each} B x {short_count(whole)} parameters on every rank (DDP: {what})"
        return States(device_bytes=each * whole, host_bytes=0, how=how)
    weight = element * (shard if stage == 3 else whole)
    gradient = element * (shard if stage >= 2 else whole)
    optimizer = (MASTER_BYTES + ADAM_BYTES) * shard
    how = f"({element} weight + {element} gradient + {MASTER_BYTES} master + {ADAM_BYTES} Adam) B x "
    how += f"{short_count(whole)} / {sharding.world_size}"
    if stage < 3:
        how += f"; under ZeRO-{stage} the weight{'' if stage == 2 else ' and gradient'} whole"
    device, host = weight + gradient + optimizer, 0
    if sharding.offload_optimizer != "none":
        device -= gradient + optimizer
        host += gradient + optimizer + MASTER_BYTES * shard if sharding.offload_optimizer == "cpu" else 0
        how += f"; all but the weight on {sharding.offload_optimizer}"
    if sharding.offload_param != "none" and stage == 3:
        device -= weight
        host += weight if sharding.offload_param == "cpu" else 0
        how += f"; the weight on {sharding.offload_param}"
    return States(device_bytes=device, host_bytes=host, how=how)


def ddp_bytes_of(shape: ModelShape, sharding: Sharding) -> int:
    """Bytes per parameter trained by DDP; adapters are in float32, with a base of any dtype (TRL 1.16, PEFT 0.21)."""
    loaded_bytes = MASTER_BYTES if shape.frozen.elements else sharding.loaded_bytes
    return ddp_bytes(loaded_bytes, world_size=sharding.world_size)


def base_of(shape: ModelShape, sharding: Sharding) -> States | None:
    """Compute the frozen base beside adapters: weights only. None if everything is trained.

    Sharded under ZeRO-3, else whole on every rank. DeepSpeed casts it to the training dtype.
    """
    if not shape.frozen.elements:
        return None
    element = sharding.dtype_bytes if sharding.stage else sharding.loaded_bytes
    held = shape.frozen.sharded(sharding.world_size) if sharding.stage == 3 else shape.frozen.elements
    if (four_bits := shape.four_bits) is not None:
        rest = shape.frozen.elements - four_bits.elements
        how = f"{four_bits.num_bytes / four_bits.elements:.3f} B x {short_count(four_bits.elements)} in four bits with "
        how += f"their scales, {element} B x {short_count(rest)}; on every rank"
        return States(device_bytes=four_bits.num_bytes + element * rest, host_bytes=0, how=how)
    how = f"{element} B x {short_count(shape.frozen.elements)}"
    how += f" / {sharding.world_size}" if sharding.stage == 3 else " on every rank"
    how += "" if sharding.stage else " (DDP keeps the dtype in which it is loaded: --dtype)"
    if sharding.stage < 3 or sharding.offload_param == "none":
        return States(device_bytes=element * held, host_bytes=0, how=how)
    host = element * held if sharding.offload_param == "cpu" else 0
    return States(device_bytes=0, host_bytes=host, how=f"{how}, on {sharding.offload_param}")


def buffer_lines(shape: ModelShape, sharding: Sharding) -> list[BudgetLine]:
    """Return DeepSpeed's buffers between steps, beside the states; they dominate for small models.

    The bucket has its full size however little is trained (`ipg_buckets`).
    """
    if sharding.stage == 0:
        return []
    bucket, element = sharding.reduce_bucket_size, sharding.dtype_bytes
    how = f"reduce_bucket_size {short_count(bucket)} x {element} B"
    lines = [BudgetLine("reduce_bucket", "gradient bucket", "always", bucket * element, how)]
    if sharding.gathers:  # one rank's shard is the whole
        threshold = sharding.param_persistence_threshold
        whole = shape.trained.up_to(threshold) + shape.frozen.up_to(threshold)
        how = f"{short_count(whole)} in tensors up to stage3_param_persistence_threshold {short_count(threshold)} x "
        how += f"{element} B"
        lines.append(BudgetLine("persistent", "small parameters, kept whole", "always", whole * element, how))
    return lines


def gather_lines(shape: ModelShape, sharding: Sharding) -> list[BudgetLine]:
    """Return the parameters gathered and the gradients being reduced during a micro-batch."""
    if sharding.stage == 0:
        return []
    phase: Phase = "forward and backward"
    element, layer = sharding.dtype_bytes, shape.largest_layer
    reduced = min(max(sharding.reduce_bucket_size, shape.trained.largest), shape.trained.elements)
    how = "a flat copy of the bucket, or of one gradient larger than it"
    lines = [BudgetLine("reduce_copy", "gradients being reduced", phase, reduced * element, how)]
    if sharding.gathers:
        how = f"{short_count(layer)} x {element} B, whatever the number of ranks"
        lines.append(BudgetLine("largest_layer", "largest gathered layer", phase, layer * element, how))
        others = max(0, min(shape.elements, sharding.max_live_parameters) - layer)
        live = short_count(sharding.max_live_parameters)
        how = f"prefetched or kept for reuse, up to stage3_max_live_parameters {live} in all"
        lines.append(BudgetLine("gather_buffers", "other gathered layers", phase, others * element, how))
    return lines


def step_lines(shape: ModelShape, sharding: Sharding) -> list[BudgetLine]:
    """Return the flattened float32 gradients of one sub-group while the optimizer works on it. Below ZeRO-3 all of a
    rank's, beside the gradients they are copied from (`ZeroOptimizer.step` in runtime/zero/stage_1_and_2.py)."""
    if not sharding.stage or sharding.offload_optimizer != "none":
        return []
    if sharding.stage < 3:
        element, shard = sharding.dtype_bytes, shape.trained.sharded(sharding.world_size)
        others = shape.trained.elements - shard if sharding.stage == 1 else 0  # freed before
        copied = element + (MASTER_BYTES if element != MASTER_BYTES else 0)
        how = f"{short_count(shard)} of this rank, flattened" + (" and in float32" if copied > element else "")
        how += "; the other ranks' are freed before" if others else ""
        return [
            BudgetLine("step_gradients", "gradients", "optimizer step", max(0, copied * shard - element * others), how)
        ]
    elements = min(sharding.sub_group_size, shape.trained.sharded(sharding.world_size))
    copy = sharding.dtype_bytes if sharding.dtype_bytes != MASTER_BYTES else 0
    how = f"of a sub-group of at most {short_count(sharding.sub_group_size)}, and the copy that they come from"
    num_bytes = elements * (MASTER_BYTES + copy)
    return [BudgetLine("step_gradients", "gradients in float32", "optimizer step", num_bytes, how)]


def frozen_line(key: str, what: str, parameters: int, sharding: Sharding) -> BudgetLine:
    """Return the memory of a reference or reward model, with forward only. Sharded under ZeRO-3, else whole on every
    rank.

    DeepSpeed casts it to the training dtype; otherwise it stays as loaded.
    """
    element = sharding.dtype_bytes if sharding.stage else sharding.loaded_bytes
    ranks = sharding.world_size if sharding.stage == 3 else 1
    how = f"{element} B x {short_count(parameters)}" + (f" / {ranks}" if ranks > 1 else " on every rank")
    return BudgetLine(key, what, "always", -(-parameters // ranks) * element, how)
