"""Estimates of an engine's GPU memory.

vLLM's KV cache: two vectors per token, layer and key-value head, in blocks of 16 tokens
(https://docs.vllm.ai/en/latest/design/hybrid_kv_cache_manager.html for sliding-window layers).
"""

from dataclasses import dataclass
from typing import Any

from grpo.config.models import CPU_KV_CACHE_BYTES
from grpo.ops.plan.images import encoder_cache_bytes
from grpo.ops.plan.memory_budget import GIB
from grpo.ops.plan.model_shape import ModelShape

KV_BLOCK_TOKENS = 16
ENGINE_OVERHEAD_BYTES = 3 * GIB  # an allowance, not measured: CUDA context and graphs, NCCL, activations of one batch


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """Memory of one GPU of an engine (on a CPU: of one worker), and the capacity of its KV cache."""

    capacity_bytes: int | None
    """Memory of the GPU; None without GPUs."""
    budget_bytes: int | None
    """Share of it for vLLM: `vllm_gpu_memory_utilization`."""
    weights_bytes: int
    adapters_bytes: int
    """Slots for LoRA adapters, and the adapter last received; 0 if adapters are merged."""
    encoder_cache_bytes: int
    """Encoder cache for images; 0 for text only."""
    overhead_bytes: int
    kv_cache_bytes: int
    """Remainder of the budget, or the size set by the user; negative if nothing is left."""
    kv_bytes_per_token: int
    """Bytes of one token while a sequence is shorter than every sliding window."""
    kv_bytes_per_sequence: int
    """Bytes of a sequence of `sequence_tokens`, in whole blocks."""
    sequence_tokens: int
    sequences_at_once: int
    """Full-length sequences that fit into the KV cache together."""
    max_num_seqs: int
    """vLLM's own limit of running sequences."""


def engine_memory(
    shape: ModelShape,
    *,
    tensor_parallel_size: int,
    dtype_bytes: int,
    sequence_tokens: int,
    utilization: float,
    capacity_bytes: int | None,
    engine_kwargs: dict[str, Any],
    adapters_bytes: int = 0,
    is_a100: bool = False,
) -> EngineMemory:
    """Estimate the KV cache of an engine: its share of the GPU, less weights, adapters and overhead.

    Args:
        capacity_bytes: of one GPU; None without GPUs.
        engine_kwargs: `vllm_engine_kwargs`.
        adapters_bytes: on each GPU, for all adapters together.
        is_a100: True if the GPU is known to be an A100.
    """
    fp8 = str(engine_kwargs.get("kv_cache_dtype", "auto")).startswith("fp8")
    per_layer = _kv_elements(shape, tensor_parallel_size) * (1 if fp8 else dtype_bytes)
    per_sequence = sum(
        layers * _blocks(sequence_tokens if window is None else min(window, sequence_tokens)) * per_layer
        for window, layers in shape.kv_windows
    )
    weights = -(-shape.engine_parameters * dtype_bytes // tensor_parallel_size)
    overhead = 0 if capacity_bytes is None else ENGINE_OVERHEAD_BYTES
    most_sequences = default_max_num_seqs(capacity_bytes, tensor_parallel_size, is_a100=is_a100)
    images = 0
    if shape.takes_images:
        images = encoder_cache_bytes(
            engine_kwargs.get("max_num_batched_tokens"),
            many_sequences=most_sequences >= 1024,
            hidden_size=shape.hidden_size,
            element=dtype_bytes,
        )
    budget = None if capacity_bytes is None else int(capacity_bytes * utilization)
    kv_cache = engine_kwargs.get("kv_cache_memory_bytes")
    if kv_cache is None:
        kv_cache = CPU_KV_CACHE_BYTES if budget is None else budget - weights - adapters_bytes - images - overhead
    return EngineMemory(
        capacity_bytes=capacity_bytes,
        budget_bytes=budget,
        weights_bytes=weights,
        adapters_bytes=adapters_bytes,
        encoder_cache_bytes=images,
        overhead_bytes=overhead,
        kv_cache_bytes=kv_cache,
        kv_bytes_per_token=per_layer * sum(layers for _, layers in shape.kv_windows),
        kv_bytes_per_sequence=per_sequence,
        sequence_tokens=sequence_tokens,
        sequences_at_once=max(0, kv_cache) // per_sequence if per_sequence else 0,
        max_num_seqs=engine_kwargs.get("max_num_seqs") or most_sequences,
    )


def default_max_num_seqs(capacity_bytes: int | None, tensor_parallel_size: int, *, is_a100: bool = False) -> int:
    """Return vLLM's default `max_num_seqs` for offline use (0.31), as our engines are started."""
    if capacity_bytes is None:
        return 256 * tensor_parallel_size
    return 1024 if capacity_bytes >= 70 * GIB and not is_a100 else 256


def fitting_tensor_parallel(shape: ModelShape, model_bytes: int, *, budget_bytes: int, num_gpus: int) -> list[int]:
    """Return fitting tensor parallel sizes: powers of two that divide the heads, leave each GPU memory beside its share
    of the weights, and leave a GPU of the node to a rank."""
    sizes = [2**power for power in range(7) if shape.attention_heads % 2**power == 0 and 2**power < num_gpus]
    space = budget_bytes - ENGINE_OVERHEAD_BYTES
    return [size for size in sizes if model_bytes / size < space]


def _kv_elements(shape: ModelShape, tensor_parallel_size: int) -> int:
    """Elements per layer and token on one GPU. Keys and values are split by head; heads are copied if there are more
    GPUs than heads."""
    if shape.latent_kv_elements is not None:
        return shape.latent_kv_elements
    return 2 * max(1, shape.key_value_heads // tensor_parallel_size) * shape.head_dim


def _blocks(tokens: int) -> int:
    """Round tokens up to whole blocks."""
    return -(-tokens // KV_BLOCK_TOKENS) * KV_BLOCK_TOKENS
