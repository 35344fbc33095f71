"""Changes with which a job would fit its training GPUs; each is tried with the same estimate before it is advised."""

from collections.abc import Iterator
from dataclasses import replace

from grpo.ops.plan.estimates import Setup, training_memory
from grpo.ops.plan.memory_budget import Budget
from grpo.ops.plan.placed_job import PlacedJob

MOST_NODES = 8  # times the present number: beyond it there is no advice
MOST_SHOWN = 3


def advice_on(job: PlacedJob, setup: Setup, budget: Budget) -> str:
    """Return the sufficient single changes, else the smallest sufficient combination."""
    alone = [text for text, changed in _changes(job, setup) if training_memory(job, changed).fits]
    if nodes := _nodes_that_fit(job, setup):
        alone.append(_use_nodes(job, nodes))
    if budget.peak_phase == "sync":
        alone.insert(0, "lower vllm_sync_bucket_mb, as far as the model's largest tensor allows")
    if alone:
        return ", or ".join(alone[:MOST_SHOWN])
    together: list[str] = []
    while not budget.fits:
        tried = [(training_memory(job, changed), text, changed) for text, changed in _changes(job, setup)]
        lowest = min(tried, key=lambda each: each[0].peak_bytes, default=None)
        if lowest is None or lowest[0].peak_bytes >= budget.peak_bytes:
            return "no setting is enough: take GPUs with more memory" + (", or LoRA" if job.lora is None else "")
        budget, text, setup = lowest
        together.append(text)
        if not budget.fits and (nodes := _nodes_that_fit(job, setup)):
            together.append(_use_nodes(job, nodes))
            break
    return f"no one change is enough: {', and '.join(together)}"


def with_sequences(setup: Setup, sequences: int) -> Setup:
    """Return the setup with this number of completions in a micro-batch."""
    return replace(setup, micro_batch=replace(setup.micro_batch, sequences=sequences))


def _changes(job: PlacedJob, setup: Setup) -> Iterator[tuple[str, Setup]]:
    """(advice, changed setup); changes without a cost come first."""
    sharding, batch = setup.sharding, setup.micro_batch
    if sharding.stage < 3:
        yield (
            "shard with ZeRO-3 (configs/1node.yaml, configs/4node.yaml)",
            replace(setup, sharding=replace(sharding, stage=3)),
        )
    if batch.sequences > 1:
        fewer = [with_sequences(setup, count) for count in range(batch.sequences - 1, 0, -1)]
        smaller = next((each for each in fewer if training_memory(job, each).fits), fewer[-1])
        count = smaller.micro_batch.sequences
        more = "" if job.batch.is_pinned else " (and raise gradient_accumulation_steps)"
        yield f"lower per_device_train_batch_size to {count}{more}", smaller
    if not batch.checkpointing:
        yield (
            "set gradient_checkpointing: true",
            replace(setup, micro_batch=replace(batch, checkpointing=True)),
        )
    if not batch.flash_attention:
        yield (
            "set attn_implementation: flash_attention_2",
            replace(setup, micro_batch=replace(batch, flash_attention=True)),
        )
    if setup.has_reference:
        yield "set beta to 0, which needs no reference model", replace(setup, has_reference=False)
    if sharding.stage and sharding.offload_optimizer == "none":
        yield (
            "set offload_optimizer_device: cpu in the accelerate file's deepspeed_config",
            replace(setup, sharding=replace(sharding, offload_optimizer="cpu")),
        )


def _nodes_that_fit(job: PlacedJob, setup: Setup) -> int | None:
    """Return the fewest nodes (of the same number of ranks) on which the job fits; only ZeRO-3 splits all states."""
    if setup.sharding.stage < 3:
        return None
    for nodes in range(len(job.nodes) + 1, MOST_NODES * len(job.nodes) + 1):
        sharding = replace(setup.sharding, world_size=_ranks_on(job, nodes))
        if training_memory(job, replace(setup, sharding=sharding)).fits:
            return nodes
    return None


def _use_nodes(job: PlacedJob, nodes: int) -> str:
    return f"use {nodes} nodes (num_machines: {nodes}, num_processes: {_ranks_on(job, nodes)})"


def _ranks_on(job: PlacedJob, nodes: int) -> int:
    """Number of ranks on `nodes` nodes; each added one has as many as the largest one now."""
    return job.launcher.num_processes + (nodes - len(job.nodes)) * max(job.launcher.counts)
