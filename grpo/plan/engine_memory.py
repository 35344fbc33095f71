"""Estimates of an engine's GPU memory and of a node's host memory.

KV cache as vLLM lays it out: two vectors per token, layer and key-value head, in blocks of 16 tokens
(https://docs.vllm.ai/en/latest/design/hybrid_kv_cache_manager.html for layers that slide).
"""

from dataclasses import dataclass
from typing import Any

from grpo.plan.memory_budget import GIB, Line, readable
from grpo.plan.model_shape import ModelShape

KV_BLOCK_TOKENS = 16
CPU_KV_CACHE_BYTES = GIB  # what `engine_args` gives an engine without GPUs
ENGINE_OVERHEAD_BYTES = 3 * GIB  # an allowance, not measured: CUDA's context and graphs, NCCL, one batch's activations
HOST_PROCESS_BYTES = 3 * GIB  # an allowance, not measured: CUDA's libraries and context on top of the next
CPU_PROCESS_BYTES = GIB  # a rank or an engine's process without CUDA; 0.8 GiB was seen


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """One GPU of an engine (on a machine without GPUs: one worker), and what fits into its KV cache."""

    capacity_bytes: int | None
    """Of the GPU; None without GPUs."""
    budget_bytes: int | None
    """`vllm_gpu_memory_utilization` of it."""
    weights_bytes: int
    overhead_bytes: int
    kv_cache_bytes: int
    """What is left, or what was asked for; negative when nothing is left."""
    kv_bytes_per_token: int
    """While a sequence is shorter than every window."""
    kv_bytes_per_sequence: int
    """At `sequence_tokens`, in whole blocks."""
    sequence_tokens: int
    sequences_at_once: int
    """Full-length sequences whose keys and values fit at once."""
    max_num_seqs: int
    """vLLM's own limit of sequences at once."""


def engine_memory(
    shape: ModelShape,
    *,
    tensor_parallel_size: int,
    dtype_bytes: int,
    sequence_tokens: int,
    utilization: float,
    capacity_bytes: int | None,
    engine_kwargs: dict[str, Any],
) -> EngineMemory:
    """What vLLM would give to its KV cache: its share of the GPU, less weights and overhead.

    Args:
        capacity_bytes: of one GPU; None without GPUs.
        engine_kwargs: `vllm_engine_kwargs`.
    """
    kv_dtype_bytes = 1 if str(engine_kwargs.get("kv_cache_dtype", "auto")).startswith("fp8") else dtype_bytes
    elements = shape.latent_kv_elements
    if elements is None:  # keys and values are split by head; heads are copied when GPUs outnumber them
        elements = 2 * max(1, shape.key_value_heads // tensor_parallel_size) * shape.head_dim
    per_layer = elements * kv_dtype_bytes
    per_sequence = sum(
        layers * _blocks(sequence_tokens if window is None else min(window, sequence_tokens)) * per_layer
        for window, layers in shape.kv_windows
    )
    weights = -(-shape.num_parameters * dtype_bytes // tensor_parallel_size)
    overhead = 0 if capacity_bytes is None else ENGINE_OVERHEAD_BYTES
    budget = None if capacity_bytes is None else int(capacity_bytes * utilization)
    kv_cache = engine_kwargs.get("kv_cache_memory_bytes")
    if kv_cache is None:
        kv_cache = CPU_KV_CACHE_BYTES if budget is None else budget - weights - overhead
    return EngineMemory(
        capacity_bytes=capacity_bytes,
        budget_bytes=budget,
        weights_bytes=weights,
        overhead_bytes=overhead,
        kv_cache_bytes=kv_cache,
        kv_bytes_per_token=per_layer * sum(layers for _, layers in shape.kv_windows),
        kv_bytes_per_sequence=per_sequence,
        sequence_tokens=sequence_tokens,
        sequences_at_once=max(0, kv_cache) // per_sequence if per_sequence else 0,
        max_num_seqs=engine_kwargs.get("max_num_seqs") or default_max_num_seqs(capacity_bytes, tensor_parallel_size),
    )


def default_max_num_seqs(capacity_bytes: int | None, tensor_parallel_size: int) -> int:
    """vLLM's own limit of sequences at once, for the offline use that our engines say they are for (0.31).

    Of GPUs with 70 GiB and more it makes an exception for the A100, whose name a plan does not know: 256.
    """
    if capacity_bytes is None:
        return 256 * tensor_parallel_size
    return 1024 if capacity_bytes >= 70 * GIB else 256


def fitting_tensor_parallel(shape: ModelShape, *, dtype_bytes: int, budget_bytes: int) -> list[int]:
    """Powers of two that split the model's heads and leave a GPU room for its share of the weights."""
    sizes = [2**power for power in range(7) if shape.attention_heads % 2**power == 0]
    room = budget_bytes - ENGINE_OVERHEAD_BYTES
    return [size for size in sizes if shape.num_parameters * dtype_bytes / size < room]


def host_lines(
    *,
    ranks: int,
    engines: int,
    tensor_parallel_size: int,
    has_gpus: bool,
    offloaded_bytes: int,
    model_bytes: int,
    loaded_by_every_rank: bool,
    shared_buffer_bytes: int,
    cpu_rank_bytes: int,
    cpu_engine_bytes: int,
) -> list[Line]:
    """Host memory of one node, at its worst: all its processes up, and one copy of the model in flight.

    Args:
        offloaded_bytes: of one rank (ZeRO offload to the CPU).
        model_bytes: of one copy of the weights.
        loaded_by_every_rank: whether each rank holds a copy of its own while loading (all but ZeRO-3).
        shared_buffer_bytes: of a push through shared memory; 0 with NCCL.
        cpu_rank_bytes: what a rank holds that trains without a GPU; 0 with GPUs.
        cpu_engine_bytes: the same for an engine.
    """
    # An engine is its host process and vLLM's core, in which a single worker lives; several workers have their own.
    processes = 2 + (tensor_parallel_size if tensor_parallel_size > 1 else 0)
    copies = ranks if loaded_by_every_rank else 1
    process_bytes = HOST_PROCESS_BYTES if has_gpus else CPU_PROCESS_BYTES
    each = f"{readable(process_bytes)} for each"

    def line(key: str, what: str, num_bytes: int, how: str) -> Line:
        return Line(key=key, what=what, phase="always", num_bytes=num_bytes, how=how)

    lines = [
        line("ranks", f"{ranks} ranks", ranks * process_bytes, f"an allowance of {each} process"),
        line(
            "engines",
            f"{engines} engines, started together" if engines > 1 else "1 engine",
            engines * processes * process_bytes,
            f"{each} of {engines} x {processes} processes; they load no checkpoint",
        ),
        line(
            "model_copy",
            f"{copies} copies of the model" if copies > 1 else "one copy of the model",
            copies * model_bytes,
            "every rank loads the checkpoint for itself"
            if loaded_by_every_rank
            else "the checkpoint's pages, shared by the ranks; on node 0 again when it is saved",
        ),
        line("offload", "ZeRO offload", ranks * offloaded_bytes, f"{ranks} ranks"),
        line("shared_buffer", "shared buffers of a push", shared_buffer_bytes, "three buckets, for all engines"),
        line(
            "cpu_ranks",
            "training without GPUs",
            ranks * cpu_rank_bytes,
            f"{ranks} ranks, as above, without the pages of the gradient bucket that nothing touches",
        ),
        line("cpu_engines", "engines without GPUs", engines * cpu_engine_bytes, "weights and KV cache"),
    ]
    return [item for item in lines if item.num_bytes]


def _blocks(tokens: int) -> int:
    """Tokens, rounded up to whole blocks."""
    return -(-tokens // KV_BLOCK_TOKENS) * KV_BLOCK_TOKENS
