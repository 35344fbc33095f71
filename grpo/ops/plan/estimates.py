"""Memory and push of a placed job, put together. All of it is estimated."""

from dataclasses import dataclass

from grpo.ops.plan.engine_memory import EngineMemory, engine_memory
from grpo.ops.plan.host_memory import host_budget
from grpo.ops.plan.memory_budget import Budget
from grpo.ops.plan.placed_job import PlacedJob
from grpo.ops.plan.push_cost import PushCost, push_cost
from grpo.ops.plan.push_memory import push_lines
from grpo.ops.plan.training_memory import MicroBatch, training_budget
from grpo.ops.plan.zero_memory import Sharding, frozen_line


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    """What a job needs."""

    sharding: Sharding
    training: Budget
    """One training GPU; without GPUs, one rank. A node's local main, which sends, may hold more than the others."""
    engine: EngineMemory
    host: Budget
    """The node with the most engines."""
    push: PushCost
    """Every push; with LoRA, every one but an engine's first."""
    first_push: PushCost | None
    """An engine's first one, with LoRA; None where it is like the others."""


def estimate(job: PlacedJob) -> Estimates:
    """Memory of a training GPU, an engine's GPU and a node's host, and the push.

    Raises:
        ValueError: a DeepSpeed configuration cannot be read.
    """
    sharding = job.sharding()
    training, engine = _training(job, sharding), _engine(job)

    def cost(num_bytes: int) -> PushCost:
        return push_cost(
            num_bytes,
            job.hardware.links,
            num_nodes=len(job.nodes),
            ranks_per_node=job.launcher.ranks_per_node,
            zero3=sharding.stage == 3,
        )

    return Estimates(
        sharding=sharding,
        training=training,
        engine=engine,
        host=host_budget(job, sharding, training, engine),
        push=cost(job.push.later_bytes),
        first_push=None if job.lora is None else cost(job.push.first_bytes),
    )


def _training(job: PlacedJob, sharding: Sharding) -> Budget:
    args, batch = job.args, job.batch
    frozen = []
    if args.beta and job.lora is None:  # with LoRA the reference is the base, which is there
        what = "reference model (beta is not 0)"
        frozen.append(frozen_line("reference", what, job.shape.num_parameters, sharding))
    if job.reward_parameters:
        frozen.append(frozen_line("reward", "reward model", job.reward_parameters, sharding))
    return training_budget(
        job.shape,
        sharding,
        MicroBatch(
            sequences=batch.micro_batch_completions,
            sequence_tokens=batch.sequence_tokens,
            completion_tokens=min(args.max_completion_length, batch.sequence_tokens),
            dtype_bytes=job.dtype.itemsize,
            checkpointing=args.gradient_checkpointing,
            flash_attention=job.flash_attention,
        ),
        frozen=frozen,
        push=push_lines(
            job.push,
            sharding,
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
    )
