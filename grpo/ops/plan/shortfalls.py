"""What of a placed job does not fit, by estimate: what cannot work whatever the batch, and what to look at."""

from grpo.config.refusals import ddp_memory_message
from grpo.ops.plan.engine_memory import fitting_tensor_parallel
from grpo.ops.plan.estimates import Estimates
from grpo.ops.plan.memory_budget import readable
from grpo.ops.plan.placed_job import PlacedJob
from grpo.ops.plan.zero_memory import ddp_bytes_of
from grpo.place.launch import either

ENGINE_BUCKETS = 2  # on an engine's GPU: the one that arrives, and the one before it while a layer waits for its rest


def errors_of(job: PlacedJob, estimates: Estimates) -> list[str]:
    """What alone is larger than the memory that it has to go into."""
    return [*_training_errors(job, estimates), *_engine_errors(job, estimates)]


def warnings_of(job: PlacedJob, estimates: Estimates) -> list[str]:
    """What does not fit together."""
    return [*_training_warnings(job, estimates), *_engine_warnings(job, estimates)]


def _training_errors(job: PlacedJob, estimates: Estimates) -> list[str]:
    """States and buffers that are larger than a GPU cannot work, whatever the batch."""
    training, sharding, capacity = estimates.training, estimates.sharding, job.hardware.gpu_bytes
    states, buffers = training.bytes_of("states", "base"), training.bytes_of("reduce_bucket", "persistent")
    if capacity is None or states + buffers <= capacity:
        return []
    advice = []
    if sharding.stage < 3:
        advice.append("shard them with ZeRO-3 (configs/1node.yaml, configs/4node.yaml)")
    elif capacity > buffers:
        advice.append(f"use {-(-states * sharding.world_size // (capacity - buffers))} ranks at least")
    if sharding.stage and sharding.offload_optimizer == "none":
        advice.append("set offload_optimizer_device: cpu in the accelerate file's deepspeed_config")
    what = "states" if job.lora is None else "states and the base"
    return [
        f"by estimate the {what} alone take {readable(states)} and their buffers {readable(buffers)} of every training "
        f"GPU, which has {readable(capacity)}: {', or '.join(advice)}"
    ]


def _engine_errors(job: PlacedJob, estimates: Estimates) -> list[str]:
    """Weights that are larger than an engine's share of its GPUs cannot work."""
    engine, size = estimates.engine, job.args.vllm_tensor_parallel_size
    if engine.budget_bytes is None or engine.weights_bytes <= engine.budget_bytes:
        return []
    num_gpus = min(len(node.devices) for node in job.nodes)
    fitting = fitting_tensor_parallel(job.shape, job.model_bytes, budget_bytes=engine.budget_bytes, num_gpus=num_gpus)
    advice = (
        f"set vllm_tensor_parallel_size to {either(fitting[:2])} and leave as many GPUs of each node without a rank"
        if fitting
        else "no tensor parallel size of one node is enough"
    )
    return [
        f"by estimate an engine's weights alone take {readable(engine.weights_bytes)} of each of its {size} GPUs, and "
        f"vLLM may use {readable(engine.budget_bytes)} (vllm_gpu_memory_utilization of a GPU): {advice}"
    ]


def _training_warnings(job: PlacedJob, estimates: Estimates) -> list[str]:
    training = estimates.training
    if training.capacity_bytes is None:
        return []
    is_ddp = estimates.sharding.stage == 0
    each = ddp_bytes_of(job.shape, estimates.sharding)
    trained, base_bytes = job.shape.trained.elements, training.bytes_of("base")
    message = ddp_memory_message(trained, training.capacity_bytes, each=each, base_bytes=base_bytes) if is_ddp else None
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


def _engine_warnings(job: PlacedJob, estimates: Estimates) -> list[str]:
    engine, warnings = estimates.engine, []
    push_bytes = ENGINE_BUCKETS * job.push.buffer_bytes if job.backend == "nccl" else 0
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
