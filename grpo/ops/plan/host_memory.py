"""Estimates of a node's host memory, at its worst: all its processes up, and one copy of the model in flight."""

from grpo.ops.plan.engine_memory import EngineMemory
from grpo.ops.plan.memory_budget import GIB, Budget, Line, make_budget, readable
from grpo.ops.plan.placed_job import PlacedJob
from grpo.ops.plan.zero_memory import Sharding, base_of, states_of
from grpo.weights.buckets import NUM_BUFFERS

HOST_PROCESS_BYTES = 3 * GIB  # an allowance, not measured: CUDA's libraries and context on top of the next
CPU_PROCESS_BYTES = GIB  # a rank or an engine's process without CUDA; 0.8 GiB was seen


def host_budget(job: PlacedJob, sharding: Sharding, training: Budget, engine: EngineMemory) -> Budget:
    """Of the node with the most engines.

    Args:
        training: of one rank; without GPUs it is host memory.
        engine: of one worker; the same.
    """
    ranks = job.launcher.ranks_per_node
    engines = max(node.num_engines for node in job.nodes)
    workers = job.args.vllm_tensor_parallel_size
    # An engine is its host process and vLLM's core, in which a single worker lives; several workers have their own.
    processes = 2 + (workers if workers > 1 else 0)
    process_bytes = HOST_PROCESS_BYTES if job.has_gpus else CPU_PROCESS_BYTES
    each = f"{readable(process_bytes)} for each"
    what = f"{engines} engines, started together" if engines > 1 else "1 engine"
    how = f"{each} of {engines} x {processes} processes; they load no checkpoint"
    lines = [
        Line("ranks", f"{ranks} ranks", "always", ranks * process_bytes, f"an allowance of {each} process"),
        Line("engines", what, "always", engines * processes * process_bytes, how),
        _model_copies(job, sharding),
    ]
    base = base_of(job.shape, sharding)
    if offloaded := states_of(job.shape, sharding).host_bytes + (0 if base is None else base.host_bytes):
        lines.append(Line("offload", "ZeRO offload", "always", ranks * offloaded, f"{ranks} ranks"))
    if job.backend == "shm":
        what, how = "shared buffers of a push", "three buckets, for all engines"
        lines.append(Line("shared_buffer", what, "always", NUM_BUFFERS * job.push.buffer_bytes, how))
    if not job.has_gpus:
        untouched = max(0, training.bytes_of("reduce_bucket") - job.shape.trained.elements * job.dtype.itemsize)
        how = f"{ranks} ranks, as above, without the pages of the gradient bucket that nothing touches"
        of_ranks = ranks * (training.peak_bytes - untouched)
        lines.append(Line("cpu_ranks", "training without GPUs", "always", of_ranks, how))
        of_engines = engines * workers * (engine.weights_bytes + engine.adapters_bytes + engine.kv_cache_bytes)
        lines.append(Line("cpu_engines", "engines without GPUs", "always", of_engines, "weights and KV cache"))
    return make_budget(lines, job.hardware.host_bytes)


def _model_copies(job: PlacedJob, sharding: Sharding) -> Line:
    """While a checkpoint is loaded."""
    if sharding.stage == 3:
        how = "the checkpoint's pages, shared by the ranks"
        how += "; on node 0 again when it is saved" if job.lora is None else "; a save takes its adapters alone"
        return Line("model_copy", "one copy of the model", "always", job.model_bytes, how)
    ranks = job.launcher.ranks_per_node
    what = f"{ranks} copies of the model" if ranks > 1 else "one copy of the model"
    num_bytes = ranks * job.shape.num_parameters * job.loaded_dtype.itemsize
    return Line("model_copy", what, "always", num_bytes, "every rank loads the checkpoint for itself")
