"""Estimates of a training rank's memory beside ZeRO's states: activations, logits, and the sum of all.

Activations follow Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models"
(https://arxiv.org/abs/2205.05198), recounted for the tensors saved by transformers' layers; a test compares them with
autograd.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from grpo.ops.plan.memory_budget import GIB, Budget, BudgetLine, Phase, make_budget, readable, short_count
from grpo.ops.plan.model_shape import LayerShape, ModelShape
from grpo.ops.plan.zero_memory import MASTER_BYTES, Sharding, base_of, buffer_lines, gather_lines, states_of, step_lines

CUDA_CONTEXT_BYTES = 2 * GIB  # an allowance, not measured: CUDA context, NCCL buffers, fragmentation

# Tiles of TRL's fused language head (trl/kernels/chunked_logprob.py, 1.16): tokens, and columns of the vocabulary.
HEAD_TILE_TOKENS = 4096
HEAD_TILE_COLUMNS = 32768

PASS: Phase = "forward and backward"
# Two moments of this phase, one after the other: the gradient of the head, then those of the layers.
AT_THE_HEAD = ("logits",)
AT_THE_LAYERS = ("recomputed_layer", "layer_gradients", "reduce_copy")


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Input of one forward and backward of a rank."""

    sequences: int
    sequence_tokens: int
    """Tokens of each sequence: prompt and completion at their full length."""
    completion_tokens: int
    """Tokens of each sequence with a log-probability."""
    dtype_bytes: int
    checkpointing: bool
    """True with gradient checkpointing."""
    flash_attention: bool

    @property
    def tokens(self) -> int:
        return self.sequences * self.sequence_tokens


def saved_bytes_per_token(shape: ModelShape, layer: LayerShape, batch: MicroBatch) -> int:
    """Return the bytes per token saved by one decoder layer for backward, without checkpointing.

    - Norm: its input in float32, the normalised value if its weight is trained, and the result: 4 + 2 e per element.
    - Attention: queries, keys, values and result, e each, and a float32 log-sum per head. With padding, transformers
      repeats keys and values for grouped heads, and every layer saves a mask of the sequence's square. Flash attention
      does neither.
    - MLP or experts (`LayerShape.mlp_elements`): e per element.
    - LoRA: the activation between its two matrices, e per rank. Adapters also save their input, which frozen weights
      would not. With adapters on some layers only, this overestimates.
    """
    is_trained = layer.adapter_ranks is None
    query = shape.attention_heads * shape.head_dim
    key = shape.key_value_heads * shape.head_dim if batch.flash_attention else query
    mask = 0 if batch.flash_attention else batch.sequence_tokens
    norms = (4 + (2 if is_trained else 1) * batch.dtype_bytes) * layer.norm_elements
    attention = batch.dtype_bytes * (2 * query + 2 * key + mask) + 4 * shape.attention_heads
    return norms + attention + batch.dtype_bytes * (layer.mlp_elements + (layer.adapter_ranks or 0))


def activation_lines(shape: ModelShape, batch: MicroBatch) -> list[BudgetLine]:
    """Return the activations of one micro-batch with and without gradient checkpointing; the unused variant is not
    counted.

    With checkpointing each layer saves its input, and one layer at a time is recomputed (section 5 of the paper).
    """
    element, tokens, layers = batch.dtype_bytes, batch.tokens, shape.num_layers
    per_token = [saved_bytes_per_token(shape, layer, batch) for layer in shape.layers]
    inputs = layers * shape.hidden_size * element
    largest = max(per_token)
    gradients = max(layer.mlp_elements for layer in shape.layers) // 2 * element
    whole = sum(layer.count * saved for layer, saved in zip(shape.layers, per_token, strict=True))
    lines = [
        ("activations_checkpointed", "activations with gradient checkpointing", inputs, f"of {layers} layers' inputs"),
        ("recomputed_layer", "one layer, computed again", largest, ""),
        ("layer_gradients", "gradients inside one layer", gradients, "of two factors in its MLP"),
        ("activations", "activations without gradient checkpointing", whole, f"of {layers} layers"),
    ]
    not_held = ("activations",) if batch.checkpointing else ("activations_checkpointed", "recomputed_layer")
    return [
        BudgetLine(
            key,
            what,
            PASS,
            tokens * each,
            f"{short_count(tokens)} tokens x {readable(each)} {how}".rstrip(),
            counted=key not in not_held,
        )
        for key, what, each, how in lines
    ]


def head_lines(shape: ModelShape, batch: MicroBatch) -> list[BudgetLine]:
    """Return the memory of TRL's fused language head. It never holds all logits, only the float32 gradient of the head
    and a copy of it.

    At the head: one tile of logits, hidden states of the scored tokens with their float32 gradient, and the head's
    gradient. The head's gradient in the training dtype stays for the layers' backward; in float32 there is no copy. A
    frozen head has no gradient (`needs_input_grad` in `ChunkedLogProbFunction`, TRL 1.16).
    """
    tokens, element = batch.sequences * batch.completion_tokens, batch.dtype_bytes
    copy_bytes = 0 if element == MASTER_BYTES else element
    tile = min(tokens, HEAD_TILE_TOKENS) * HEAD_TILE_COLUMNS * element
    hidden = tokens * shape.hidden_size * (MASTER_BYTES + element + copy_bytes)
    elements = shape.vocab_size * shape.hidden_size if shape.trains_head else 0
    in_float32 = elements * MASTER_BYTES if copy_bytes else 0
    weight = f"{shape.vocab_size} x {shape.hidden_size} x {element} B"
    how = f"a tile {readable(tile)}, {short_count(tokens)} scored tokens {readable(hidden)}"
    how += f", the gradient {readable(in_float32)}" if in_float32 else ""
    if not elements:
        return [BudgetLine("logits", "logits", PASS, tile + hidden, how)]
    return [
        BudgetLine("head_gradient", "the language head's gradient", PASS, elements * element, weight),
        BudgetLine("logits", "logits, and that gradient in float32", PASS, tile + hidden + in_float32, how),
    ]


def dequantised_lines(shape: ModelShape, batch: MicroBatch) -> list[BudgetLine]:
    """Return the memory of dequantised weights: a 4-bit layer dequantises its matrix for each use, as a weight sync
    does."""
    if shape.four_bits is None:
        return []
    num_bytes = shape.four_bits.largest * batch.dtype_bytes
    what, how = (
        "one matrix, dequantised",
        f"{short_count(shape.four_bits.largest)} x {batch.dtype_bytes} B, the largest",
    )
    return [
        BudgetLine("dequantised", what, PASS, num_bytes, how),
        BudgetLine("sync_dequantised", what, "sync", num_bytes, how, holder="local main"),
    ]


def at_the_worst_moment(lines: Sequence[BudgetLine]) -> list[BudgetLine]:
    """Count only the worse of two moments within one phase."""

    def together(keys: tuple[str, ...]) -> int:
        return sum(line.num_bytes for line in lines if line.counted and line.key in keys)

    passed = AT_THE_LAYERS if together(AT_THE_HEAD) > together(AT_THE_LAYERS) else AT_THE_HEAD
    return [replace(line, counted=False) if line.key in passed else line for line in lines]


def training_budget(
    shape: ModelShape,
    sharding: Sharding,
    batch: MicroBatch,
    *,
    frozen: Sequence[BudgetLine] = (),
    images: Sequence[BudgetLine] = (),
    sync: Sequence[BudgetLine] = (),
    gpu_bytes: int | None,
) -> Budget:
    """Sum up the memory of one rank.

    Args:
        frozen: reference and reward models.
        images: of prompts (`image_lines`).
        weight sync: buffers of the weight sync (`sync_lines`).
        gpu_bytes: memory of its GPU; None without one.
    """
    states, base = states_of(shape, sharding), base_of(shape, sharding)
    name = f"ZeRO-{sharding.stage} states" if sharding.stage else "states"
    lines = [
        BudgetLine("states", name, "always", states.device_bytes, states.how),
        *([BudgetLine("base", "the frozen base", "always", base.device_bytes, base.how)] if base is not None else []),
        *buffer_lines(shape, sharding),
        *frozen,
        *images,
    ]
    if offloaded := states.host_bytes + (0 if base is None else base.host_bytes):
        how = "of the host's memory, for each rank of the node"
        lines.append(BudgetLine("offload", "ZeRO offload", "always", offloaded, how, counted=False))
    if gpu_bytes is not None:
        how = "an allowance: context, NCCL, fragmentation"
        lines.append(BudgetLine("context", "CUDA context", "always", CUDA_CONTEXT_BYTES, how))
    lines += [
        *gather_lines(shape, sharding),
        *activation_lines(shape, batch),
        *head_lines(shape, batch),
        *dequantised_lines(shape, batch),
        *step_lines(shape, sharding),
        *sync,
    ]
    return make_budget(at_the_worst_moment(lines), gpu_bytes)
