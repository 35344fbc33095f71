"""Estimates of what a training rank holds beside ZeRO's states: activations, logits, and all of it added up.

Activations follow Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models"
(https://arxiv.org/abs/2205.05198), counted again for what transformers' layers keep; a test compares
them with autograd.
"""

from collections.abc import Sequence
from dataclasses import replace

from grpo.plan.memory_budget import GIB, Budget, Line, make_budget, readable, short_count
from grpo.plan.model_shape import LayerShape, ModelShape
from grpo.plan.zero_memory import MASTER_BYTES, Sharding, buffer_lines, gather_lines, states_of, step_line

CUDA_CONTEXT_BYTES = 2 * GIB  # an allowance, not measured: CUDA's context, NCCL's buffers, fragmentation

# Tiles of TRL's fused language head (trl/kernels/chunked_logprob.py, 1.16): tokens, and columns of the vocabulary.
HEAD_TILE_TOKENS = 4096
HEAD_TILE_COLUMNS = 32768


def saved_bytes_per_token(
    shape: ModelShape, layer: LayerShape, *, dtype_bytes: int, sequence_tokens: int, flash_attention: bool
) -> int:
    """What one decoder layer keeps per token for its backward, without checkpointing.

    - a norm: its input in float32, the normalised value and the result: 4 + 2 e per element; the norms of queries and
      keys without the result, which rotary embedding does not keep;
    - attention: queries, keys, values and result, e each, and a float32 log-sum per head. With padding, transformers
      repeats keys and values for grouped heads, and every layer keeps a mask of the sequence's square; flash attention
      does neither;
    - the MLP or the experts (`LayerShape.mlp_elements`), e per element; a float32 router's copy of what it reads.
    """
    query = shape.attention_heads * shape.head_dim
    key = shape.key_value_heads * shape.head_dim if flash_attention else query
    mask = 0 if flash_attention else sequence_tokens
    norms = (4 + 2 * dtype_bytes) * layer.norm_elements + (4 + dtype_bytes) * layer.head_norm_elements
    attention = dtype_bytes * (2 * query + 2 * key + mask) + 4 * shape.attention_heads
    router = 0 if dtype_bytes == MASTER_BYTES else MASTER_BYTES * layer.float32_router_elements
    return norms + attention + dtype_bytes * layer.mlp_elements + router


def activation_lines(
    shape: ModelShape,
    *,
    dtype_bytes: int,
    sequences: int,
    sequence_tokens: int,
    checkpointing: bool,
    flash_attention: bool,
) -> list[Line]:
    """Activations of one micro-batch with and without gradient checkpointing; the one that is not used is not counted.

    With checkpointing each layer keeps its input, and one layer at a time is computed again (section 5 of the paper).
    """
    tokens = sequences * sequence_tokens
    per_token = [
        (
            layer.count,
            saved_bytes_per_token(
                shape,
                layer,
                dtype_bytes=dtype_bytes,
                sequence_tokens=sequence_tokens,
                flash_attention=flash_attention,
            ),
        )
        for layer in shape.layers
    ]
    whole = sum(count * saved for count, saved in per_token)
    inputs = shape.num_layers * shape.hidden_size * dtype_bytes
    largest = max(saved for _, saved in per_token)
    mlp = max(layer.mlp_elements for layer in shape.layers) // 2
    return [
        Line(
            key="activations_checkpointed",
            what="activations with gradient checkpointing",
            phase="forward and backward",
            num_bytes=tokens * inputs,
            how=f"{short_count(tokens)} tokens x {shape.num_layers} layers x {shape.hidden_size} x {dtype_bytes} B",
            counted=checkpointing,
        ),
        Line(
            key="recomputed_layer",
            what="one layer, computed again",
            phase="forward and backward",
            num_bytes=tokens * largest,
            how=f"{short_count(tokens)} tokens x {readable(largest)}",
            counted=checkpointing,
        ),
        Line(
            key="layer_gradients",
            what="gradients inside one layer",
            phase="forward and backward",
            num_bytes=tokens * mlp * dtype_bytes,
            how=f"{short_count(tokens)} tokens x {mlp} x {dtype_bytes} B: of three factors in its MLP, of which one is "
            "free by then",
        ),
        Line(
            key="activations",
            what="activations without gradient checkpointing",
            phase="forward and backward",
            num_bytes=tokens * whole,
            how=f"{short_count(tokens)} tokens x {readable(whole)} of {shape.num_layers} layers",
            counted=not checkpointing,
        ),
    ]


def head_lines(shape: ModelShape, *, dtype_bytes: int, sequences: int, completion_tokens: int) -> list[Line]:
    """TRL's fused language head: it never holds all logits, but gradients of the head in float32, and a copy of them.

    While it works: one tile of logits, hidden states of the scored tokens with their float32 gradient, and the head's.
    What it leaves to the layers' backward is the head's gradient in the dtype of training, which in float32 is no copy
    (`ChunkedLogProbFunction`, TRL 1.16).
    """
    tokens = sequences * completion_tokens
    copy_bytes = 0 if dtype_bytes == MASTER_BYTES else dtype_bytes
    tile = min(tokens, HEAD_TILE_TOKENS) * HEAD_TILE_COLUMNS * dtype_bytes
    hidden = tokens * shape.hidden_size * (MASTER_BYTES + dtype_bytes + copy_bytes)
    elements = shape.vocab_size * shape.hidden_size
    in_float32 = elements * MASTER_BYTES if copy_bytes else 0
    return [
        Line(
            key="head_gradient",
            what="the language head's gradient",
            phase="forward and backward",
            num_bytes=elements * dtype_bytes,
            how=f"{shape.vocab_size} x {shape.hidden_size} x {dtype_bytes} B",
        ),
        Line(
            key="logits",
            what="logits, and that gradient in float32",
            phase="forward and backward",
            num_bytes=tile + hidden + in_float32,
            how=f"a tile {readable(tile)}, {short_count(tokens)} scored tokens {readable(hidden)}"
            + (f", the gradient {readable(in_float32)}" if copy_bytes else ""),
        ),
    ]


# Of the forward and backward pass, held one after the other: while the head's gradient is computed, and the layers'.
AT_THE_HEAD = ("logits",)
AT_THE_LAYERS = ("recomputed_layer", "layer_gradients", "reduce_copy")


def at_the_worst_moment(lines: Sequence[Line]) -> list[Line]:
    """The lines of two moments of one phase, of which only those of the worse one are counted."""

    def together(keys: tuple[str, ...]) -> int:
        return sum(line.num_bytes for line in lines if line.counted and line.key in keys)

    passed = AT_THE_LAYERS if together(AT_THE_HEAD) > together(AT_THE_LAYERS) else AT_THE_HEAD
    return [replace(line, counted=False) if line.key in passed else line for line in lines]


def training_budget(
    shape: ModelShape,
    sharding: Sharding,
    *,
    world_size: int,
    dtype_bytes: int,
    sequences: int,
    sequence_tokens: int,
    completion_tokens: int,
    checkpointing: bool,
    flash_attention: bool,
    frozen: Sequence[Line],
    push: Sequence[Line],
    capacity_bytes: int | None,
    has_gpus: bool,
) -> Budget:
    """All of one rank, for a micro-batch of `sequences` sequences at their full length.

    Args:
        frozen: reference and reward models.
        push: weights on their way to the engines (`push_lines`).
    """
    states = states_of(shape, sharding, world_size=world_size, dtype_bytes=dtype_bytes)
    name = f"ZeRO-{sharding.stage} states" if sharding.stage else "states"
    lines = [
        Line(key="states", what=name, phase="always", num_bytes=states.device_bytes, how=states.how),
        *buffer_lines(shape, sharding, world_size=world_size, dtype_bytes=dtype_bytes),
        *frozen,
    ]
    if has_gpus:
        how = "an allowance: context, NCCL, fragmentation"
        lines.append(
            Line(key="context", what="CUDA context", phase="always", num_bytes=CUDA_CONTEXT_BYTES, how=how),
        )
    lines += [
        *gather_lines(shape, sharding, world_size=world_size, dtype_bytes=dtype_bytes),
        *activation_lines(
            shape,
            dtype_bytes=dtype_bytes,
            sequences=sequences,
            sequence_tokens=sequence_tokens,
            checkpointing=checkpointing,
            flash_attention=flash_attention,
        ),
        *head_lines(shape, dtype_bytes=dtype_bytes, sequences=sequences, completion_tokens=completion_tokens),
        *step_line(shape, sharding, world_size=world_size, dtype_bytes=dtype_bytes),
        *push,
    ]
    return make_budget(at_the_worst_moment(lines), capacity_bytes)
