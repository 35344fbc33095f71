"""Parts of a placed job that do not fit, by estimate: with any batch, or with this micro-batch only."""

from dataclasses import replace

from grpo.config.refusals import ddp_memory_message
from grpo.ops.plan.engine_memory import fitting_tensor_parallel
from grpo.ops.plan.estimates import Estimates, Setup, setup_of, training_memory
from grpo.ops.plan.memory_budget import Budget, readable
from grpo.ops.plan.placed_job import PlacedJob
from grpo.ops.plan.remedies import advice_on, with_sequences
from grpo.ops.plan.zero_memory import ddp_bytes_of
from grpo.place.launch import either

# on an engine's GPU: the arriving one, and the previous one while a layer waits for its remaining tensors
ENGINE_BUCKETS = 2


def shortfalls_of(job: PlacedJob, estimates: Estimates) -> tuple[list[str], list[str]]:
    """Return (errors, warnings): shortfalls with any batch, and those mended by a smaller micro-batch or share for
    vLLM."""
    budget, errors, warnings = estimates.training, _engine_errors(job, estimates), _engine_warnings(job, estimates)
    if not budget.fits:
        setup = setup_of(job, estimates.sharding)
        mends = training_memory(job, with_sequences(setup, 1)).fits
        (warnings if mends else errors).insert(0, _training_shortfall(job, setup, budget, is_of_batch=mends))
    return errors, warnings


def fits_with(job: PlacedJob, *, ranks_per_node: int) -> bool:
    """True if the training GPUs hold the job with `ranks_per_node`, at one completion in a micro-batch."""
    setup = setup_of(job, job.sharding())
    sharding = replace(setup.sharding, world_size=ranks_per_node * len(job.nodes))
    return training_memory(job, with_sequences(replace(setup, sharding=sharding), 1)).fits


def _training_shortfall(job: PlacedJob, setup: Setup, budget: Budget, *, is_of_batch: bool) -> str:
    assert budget.capacity_bytes is not None
    sharding, trained, base_bytes = setup.sharding, job.shape.trained.elements, budget.bytes_of("base")
    if sharding.stage == 0:
        each = ddp_bytes_of(job.shape, sharding)
        message = ddp_memory_message(trained, budget.capacity_bytes, each=each, base_bytes=base_bytes)
        if message is not None:
            return message
    always, capacity = budget.held[0], readable(budget.capacity_bytes)
    held = max(always.local_main_bytes, always.other_ranks_bytes)
    if held > budget.capacity_bytes:
        items = [line for line in budget.lines if line.phase == "always" and line.counted]
        items.sort(key=lambda line: -line.num_bytes)
        parts = ", ".join(f"{line.what} {readable(line.num_bytes)}" for line in items)
        what = f"by estimate a training GPU always holds {readable(held)}, and has {capacity} ({parts})"
    else:
        when = budget.peak_phase + ("" if is_of_batch else ", whatever the batch size")
        what = f"a training GPU has {capacity}, and the estimate is {readable(budget.peak_bytes)} ({when})"
    return f"{what}: {advice_on(job, setup, budget)}"


def _engine_errors(job: PlacedJob, estimates: Estimates) -> list[str]:
    """An engine needs memory for its weights and for one sequence to start."""
    engine, size = estimates.engine, job.args.vllm_tensor_parallel_size
    if engine.budget_bytes is None or engine.weights_bytes <= engine.budget_bytes:
        if engine.sequences_at_once >= 1 or not engine.kv_bytes_per_sequence:
            return []
        left = readable(max(0, engine.kv_cache_bytes))
        return [
            f"by estimate an engine has {left} per GPU left for its KV cache, and one sequence of "
            f"{engine.sequence_tokens} tokens takes {readable(engine.kv_bytes_per_sequence)}: lower "
            "vllm_max_model_length, or raise vllm_tensor_parallel_size or vllm_gpu_memory_utilization"
        ]
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


def _engine_warnings(job: PlacedJob, estimates: Estimates) -> list[str]:
    engine = estimates.engine
    sync_bytes = ENGINE_BUCKETS * job.sync.buffer_bytes if job.backend == "nccl" else 0
    if engine.capacity_bytes is None or engine.budget_bytes is None:
        return []
    spare_bytes = engine.capacity_bytes - engine.budget_bytes
    if spare_bytes >= sync_bytes:
        return []
    return [
        f"a weight sync needs {readable(sync_bytes)} on an engine's GPU beside what vLLM takes, and "
        f"{readable(spare_bytes)} is left: lower vllm_gpu_memory_utilization"
    ]
