"""Estimates of memory and weight sync for a placed job."""

from dataclasses import dataclass

from grpo.ops.plan.engine_memory import EngineMemory, engine_memory
from grpo.ops.plan.images import image_lines
from grpo.ops.plan.memory_budget import Budget
from grpo.ops.plan.placed_job import PlacedJob
from grpo.ops.plan.sync_memory import sync_lines
from grpo.ops.plan.training_memory import MicroBatch, training_budget
from grpo.ops.plan.zero_memory import Sharding, frozen_line


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSyncBytes:
    """Bytes of one weight sync, in the engine's dtype; shards are cast before the gather."""

    gathered_bytes_per_node: int
    network_bytes_per_node: int
    """Part of it over the network: each of N nodes holds 1/N and receives the rest, with any algorithm."""
    engine_bytes: int
    """Bytes from the local main to each engine of its node; never leave the node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    """Memory and traffic of a job."""

    sharding: Sharding
    training: Budget
    """One training GPU, or one rank without GPUs. A node's local main, as the sender, may hold more than the others."""
    engine: EngineMemory
    sync: WeightSyncBytes
    """Every weight sync; with LoRA, every one after an engine's first."""
    first_sync: WeightSyncBytes | None
    """First weight sync of an engine, with LoRA; None if it is like the others."""


def estimate(job: PlacedJob) -> Estimates:
    """Estimate the memory of a training GPU and an engine's GPU, and the weight sync.

    Raises:
        ValueError: the DeepSpeed configuration cannot be read.
    """
    sharding = job.sharding()
    return Estimates(
        sharding=sharding,
        training=training_memory(job, setup_of(job, sharding)),
        engine=_engine(job),
        sync=_sync(job, sharding, job.sync.later_bytes),
        first_sync=None if job.lora is None else _sync(job, sharding, job.sync.first_bytes),
    )


def _sync(job: PlacedJob, sharding: Sharding, num_bytes: int) -> WeightSyncBytes:
    gathered = num_bytes if sharding.stage == 3 else 0  # below stage 3 every rank holds all weights
    num_nodes = len(job.nodes)
    return WeightSyncBytes(
        gathered_bytes_per_node=gathered,
        network_bytes_per_node=gathered * (num_nodes - 1) // num_nodes,
        engine_bytes=num_bytes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """User settings with an effect on a training GPU's memory."""

    sharding: Sharding
    micro_batch: MicroBatch
    has_reference: bool
    """True with a copy of the model for the KL term; with LoRA the base serves as the reference."""


def setup_of(job: PlacedJob, sharding: Sharding) -> Setup:
    """Return the job's own setup."""
    args, batch = job.args, job.batch
    micro_batch = MicroBatch(
        sequences=batch.micro_batch_completions,
        sequence_tokens=batch.sequence_tokens,
        completion_tokens=min(args.max_completion_length, batch.sequence_tokens),
        dtype_bytes=job.dtype.itemsize,
        checkpointing=args.gradient_checkpointing,
        flash_attention=job.flash_attention,
    )
    return Setup(sharding=sharding, micro_batch=micro_batch, has_reference=bool(args.beta) and job.lora is None)


def training_memory(job: PlacedJob, setup: Setup) -> Budget:
    """Estimate the memory of one training GPU of the job under `setup`."""
    frozen = []
    if setup.has_reference:
        what = "reference model (beta is not 0)"
        frozen.append(frozen_line("reference", what, job.shape.num_parameters, setup.sharding))
    if job.reward_parameters:
        frozen.append(frozen_line("reward", "reward model", job.reward_parameters, setup.sharding))
    images = []
    if job.images is not None:
        images = image_lines(
            job.images,
            rows=setup.micro_batch.sequences * job.batch.steps_per_generation,
            micro_batch=setup.micro_batch.sequences,
            element=setup.micro_batch.dtype_bytes,
            checkpointing=setup.micro_batch.checkpointing,
        )
    return training_budget(
        job.shape,
        setup.sharding,
        setup.micro_batch,
        frozen=frozen,
        images=images,
        sync=sync_lines(
            job.sync,
            setup.sharding,
            backend=job.backend,
            has_gpus=job.has_gpus,
            gathers_on_device=job.gathers_on_device,
        ),
        gpu_bytes=job.hardware.gpu_bytes,
    )


def _engine(job: PlacedJob) -> EngineMemory:
    assert job.args.vllm_gpu_memory_utilization is not None
    return engine_memory(
        job.shape,
        tensor_parallel_size=job.args.vllm_tensor_parallel_size,
        dtype_bytes=job.dtype.itemsize,
        sequence_tokens=job.batch.sequence_tokens,
        utilization=job.args.vllm_gpu_memory_utilization,
        capacity_bytes=job.hardware.gpu_bytes,
        engine_kwargs=job.args.engine_kwargs,
        adapters_bytes=job.adapter_elements * job.dtype.itemsize,
        is_a100=job.hardware.is_a100,
    )
