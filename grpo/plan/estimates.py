"""Memory and push of a placed job, put together, and what does not fit. All of it is estimated."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from grpo.engine_settings import choose_backend
from grpo.job.launch import either
from grpo.job.topology import NodeTopology
from grpo.plan.batch import Batch
from grpo.plan.engine_memory import EngineMemory, engine_memory, fitting_tensor_parallel, host_lines
from grpo.plan.job import Launcher, PlannedConfig, read_deepspeed
from grpo.plan.memory_budget import Budget, make_budget, readable
from grpo.plan.model_shape import ModelShape
from grpo.plan.push_cost import PushCost, push_costs
from grpo.plan.push_memory import PushShape, push_lines
from grpo.plan.training_memory import training_budget
from grpo.plan.zero_memory import Sharding, frozen_line, read_sharding, states_of
from grpo.refusals import ddp_memory_message
from grpo.weights.buckets import NUM_BUFFERS

ENGINE_BUCKETS = 2  # on an engine's GPU: the one that arrives, and the one before it while a layer waits for its rest


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What the cluster has, as told or assumed."""

    gpu_bytes: int | None
    """Memory of one GPU; None when the job runs without."""
    host_bytes: int | None
    """Memory of one node; None when it is not known."""
    network_gbps: float
    """Gigabits per second into one node."""
    nvlink_gbps: float
    """Gigabits per second into one GPU from its node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    """What a job needs."""

    training: Budget
    """One training GPU; without GPUs, one rank. A node's local main, which sends, may hold more than the others."""
    engine: EngineMemory
    host: Budget
    """The node with the most engines."""
    push: tuple[PushCost, ...]
    errors: tuple[str, ...]
    """What alone is larger than the memory that it has to go into."""
    warnings: tuple[str, ...]
    """What does not fit together."""


def estimate(
    shape: ModelShape,
    push: PushShape,
    args: PlannedConfig,
    launcher: Launcher,
    nodes: Sequence[NodeTopology],
    batch: Batch,
    hardware: Hardware,
    *,
    dtype: torch.dtype,
    flash_attention: bool,
    reward_parameters: int,
) -> Estimates:
    """Memory of a training GPU, an engine's GPU and a node's host, and the push.

    Args:
        dtype: in which trainer and engines compute (`engine_model.compute_dtype`).
        reward_parameters: of the reward model; 0 without one.
    """
    zero = launcher.zero_optimization
    if zero is None and args.deepspeed_file is not None:
        zero = read_deepspeed(args.deepspeed_file)
    sharding = Sharding(stage=0) if zero is None else read_sharding(zero, hidden_size=shape.hidden_size)
    world_size, has_gpus = launcher.num_processes, hardware.gpu_bytes is not None
    frozen_bytes = dtype.itemsize if sharding.stage else 4
    frozen = [
        frozen_line(key, what, parameters, sharding, world_size=world_size, dtype_bytes=frozen_bytes)
        for key, what, parameters in (
            ("reference", "reference model (beta is not 0)", shape.num_parameters if args.beta else 0),
            ("reward", "reward model", reward_parameters),
        )
        if parameters
    ]
    backend = choose_backend(args.vllm_sync_backend, has_gpus=has_gpus)
    model_bytes = shape.num_parameters * dtype.itemsize
    gathers_on_device = has_gpus and args.ddp_backend != "gloo"
    training = training_budget(
        shape,
        sharding,
        world_size=world_size,
        dtype_bytes=dtype.itemsize,
        sequences=batch.micro_batch_completions,
        sequence_tokens=batch.sequence_tokens,
        completion_tokens=min(args.max_completion_length, batch.sequence_tokens),
        checkpointing=args.gradient_checkpointing,
        flash_attention=flash_attention,
        frozen=frozen,
        push=push_lines(
            push,
            world_size=world_size,
            num_nodes=len(nodes),
            zero3=sharding.stage == 3,
            backend=backend,
            has_gpus=has_gpus,
            gathers_on_device=gathers_on_device,
        ),
        capacity_bytes=hardware.gpu_bytes,
        has_gpus=has_gpus,
    )
    assert not isinstance(args.vllm_engine_kwargs, str)
    assert args.vllm_gpu_memory_utilization is not None
    size = args.vllm_tensor_parallel_size
    engine = engine_memory(
        shape,
        tensor_parallel_size=size,
        dtype_bytes=dtype.itemsize,
        sequence_tokens=batch.sequence_tokens,
        utilization=args.vllm_gpu_memory_utilization,
        capacity_bytes=hardware.gpu_bytes,
        engine_kwargs=args.vllm_engine_kwargs or {},
    )
    states = states_of(shape, sharding, world_size=world_size, dtype_bytes=dtype.itemsize)
    untouched_bytes = max(0, training.bytes_of("reduce_bucket") - model_bytes)
    host = make_budget(
        host_lines(
            ranks=launcher.ranks_per_node,
            engines=max(node.num_engines for node in nodes),
            tensor_parallel_size=size,
            has_gpus=has_gpus,
            offloaded_bytes=states.host_bytes,
            model_bytes=model_bytes if sharding.stage == 3 else shape.num_parameters * 4,
            loaded_by_every_rank=sharding.stage != 3,
            shared_buffer_bytes=NUM_BUFFERS * push.buffer_bytes if backend == "shm" else 0,
            cpu_rank_bytes=0 if has_gpus else training.peak_bytes - untouched_bytes,
            cpu_engine_bytes=0 if has_gpus else size * (engine.weights_bytes + engine.kv_cache_bytes),
        ),
        hardware.host_bytes,
    )
    return Estimates(
        training=training,
        engine=engine,
        host=host,
        push=push_costs(
            shape.num_parameters,
            ranks_per_node=launcher.ranks_per_node,
            zero3=sharding.stage == 3,
            all_gathers=gathers_on_device,
            engine_dtype_bytes=dtype.itemsize,
            network_gbps=hardware.network_gbps,
            nvlink_gbps=hardware.nvlink_gbps if has_gpus else None,
        ),
        errors=(
            *_training_errors(training, sharding, world_size),
            *_engine_errors(engine, shape, size=size, dtype_bytes=dtype.itemsize),
        ),
        warnings=(
            *_training_warnings(training, shape, sharding),
            *_engine_warnings(engine, push_bytes=ENGINE_BUCKETS * push.buffer_bytes if backend == "nccl" else 0),
            *_host_warnings(host),
        ),
    )


def _training_errors(training: Budget, sharding: Sharding, world_size: int) -> list[str]:
    """States and buffers that are larger than a GPU cannot work, whatever the batch."""
    capacity = training.capacity_bytes
    states, buffers = training.bytes_of("states"), training.bytes_of("reduce_bucket", "persistent")
    if capacity is None or states + buffers <= capacity:
        return []
    advice = []
    if sharding.stage < 3:
        advice.append("shard them with ZeRO-3 (configs/1node.yaml, configs/4node.yaml)")
    elif capacity > buffers:
        advice.append(f"use {-(-states * world_size // (capacity - buffers))} ranks at least")
    if sharding.stage and sharding.offload_optimizer == "none":
        advice.append("set offload_optimizer_device: cpu in the accelerate file's deepspeed_config")
    return [
        f"by estimate the states alone take {readable(states)} and their buffers {readable(buffers)} of every training "
        f"GPU, which has {readable(capacity)}: {', or '.join(advice)}"
    ]


def _engine_errors(engine: EngineMemory, shape: ModelShape, *, size: int, dtype_bytes: int) -> list[str]:
    """Weights that are larger than an engine's share of its GPUs cannot work."""
    if engine.budget_bytes is None or engine.weights_bytes <= engine.budget_bytes:
        return []
    fitting = fitting_tensor_parallel(shape, dtype_bytes=dtype_bytes, budget_bytes=engine.budget_bytes)
    advice = (
        f"set vllm_tensor_parallel_size to {either(fitting[:2])} and leave as many GPUs of each node without a rank"
        if fitting
        else "no tensor parallel size of one node is enough"
    )
    return [
        f"by estimate an engine's weights alone take {readable(engine.weights_bytes)} of each of its {size} GPUs, and "
        f"vLLM may use {readable(engine.budget_bytes)} (vllm_gpu_memory_utilization of a GPU): {advice}"
    ]


def _training_warnings(training: Budget, shape: ModelShape, sharding: Sharding) -> list[str]:
    if training.capacity_bytes is None:
        return []
    message = ddp_memory_message(shape.num_parameters, training.capacity_bytes) if sharding.stage == 0 else None
    if message is not None:
        return [message]
    if training.peak_bytes <= training.capacity_bytes:
        return []
    hints = "lower per_device_train_batch_size (and raise gradient_accumulation_steps), or use more ranks"
    if training.peak_phase == "push":
        hints = "lower vllm_sync_bucket_mb, as far as the model's largest tensor allows, or use more ranks"
    elif any(line.key == "activations" and line.counted for line in training.lines):
        hints = f"set gradient_checkpointing: true, or {hints}"
    return [
        f"a training GPU has {readable(training.capacity_bytes)}, and the estimate is {readable(training.peak_bytes)} "
        f"({training.peak_phase}): {hints}"
    ]


def _engine_warnings(engine: EngineMemory, *, push_bytes: int) -> list[str]:
    warnings = []
    if engine.capacity_bytes is not None and engine.budget_bytes is not None:
        spare_bytes = engine.capacity_bytes - engine.budget_bytes
        if spare_bytes < push_bytes:
            warnings.append(
                f"a push needs {readable(push_bytes)} on an engine's GPU beside what vLLM takes, and "
                f"{readable(spare_bytes)} is left: lower vllm_gpu_memory_utilization"
            )
    if engine.sequences_at_once >= 1 or not engine.kv_bytes_per_sequence:
        return warnings
    left = readable(max(0, engine.kv_cache_bytes))
    return [
        *warnings,
        f"by estimate an engine has {left} per GPU left for its KV cache, and one sequence of {engine.sequence_tokens} "
        f"tokens takes {readable(engine.kv_bytes_per_sequence)}: lower vllm_max_model_length, or raise "
        "vllm_tensor_parallel_size or vllm_gpu_memory_utilization",
    ]


def _host_warnings(host: Budget) -> list[str]:
    if host.capacity_bytes is None or host.peak_bytes <= host.capacity_bytes:
        return []
    return [
        f"a node has {readable(host.capacity_bytes)} of host memory, and the estimate is {readable(host.peak_bytes)}: "
        "use fewer engines per node (a larger vllm_tensor_parallel_size), or less offload"
    ]
