"""Memory of prompts with images: vision towers and their activations, pixels, and engines' caches."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from grpo.model.text_part import tower_paths
from grpo.ops.plan.memory_budget import BudgetLine, readable, short_count

ASSUMED_SIDE = 1024
"""Edge of an image in pixels, for towers that accept any size."""
PIXEL_BYTES = 3 * 4
"""Processors return colours in float32."""
CACHE_GIB = 4
"""vLLM's `mm_processor_cache_gb` (0.31): host memory, in each of an engine's two processes."""
BATCHED_TOKENS = (16384, 8192)
"""vLLM's default `max_num_batched_tokens` (0.31): with memory for 1,024 sequences, and otherwise. The encoder cache
holds as many image tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """Images of a prompt, and the vision tower for them."""

    per_prompt: int
    pixels: int
    """Pixels of one image after preprocessing."""
    frames: int
    """Copies of each pixel in the tower's input: Qwen's towers take two frames of a video."""
    patches: int
    """Patches of one image: tokens of the tower."""
    layers: int
    """Layers of the tower."""
    hidden_size: int
    mlp_size: int
    is_trained: bool

    @property
    def bytes_each(self) -> int:
        return self.pixels * self.frames * PIXEL_BYTES

    def saved_bytes_per_patch(self, element: int) -> int:
        """Activations saved by one layer of the tower for backward, counted as for a decoder layer: two norms,
        attention without a mask, an MLP of two matrices."""
        norms = 2 * (4 + 2 * element) * self.hidden_size
        return norms + element * (4 * self.hidden_size + 2 * self.mlp_size)


def images_of(
    config: Any, model: nn.Module, *, per_prompt: int, size: tuple[int, int] | None, is_trained: bool
) -> Images:
    """Describe the images as the model's tower receives them.

    Args:
        model: without its weights.
        size: (width, height) in pixels; None: the tower's fixed size, or `ASSUMED_SIDE` squared if it accepts any.

    Raises:
        AttributeError: the configuration has other names for its sizes.
    """
    vision = config.vision_config
    side = getattr(vision, "image_size", None)
    side = side[0] if isinstance(side, list | tuple) else side
    width, height = (side, side) if side else size or (ASSUMED_SIDE, ASSUMED_SIDE)
    patch = vision.patch_size[0] if isinstance(vision.patch_size, list | tuple) else vision.patch_size
    towers = [model.get_submodule(path) for path in tower_paths(model)]
    stacks = [module for tower in towers for module in tower.modules() if isinstance(module, nn.ModuleList)]
    layers = max(stacks, key=lambda stack: sum(parameter.numel() for parameter in stack.parameters()))
    hidden_size = getattr(vision, "embed_dim", None) or vision.hidden_size
    return Images(
        per_prompt=per_prompt,
        pixels=width * height,
        frames=getattr(vision, "temporal_patch_size", 1),
        patches=-(-width // patch) * -(-height // patch),
        layers=len(layers),
        hidden_size=hidden_size,
        mlp_size=getattr(vision, "intermediate_size", 4 * hidden_size),
        is_trained=is_trained,
    )


def image_lines(images: Images, *, rows: int, micro_batch: int, element: int, checkpointing: bool) -> list[BudgetLine]:
    """Return the memory of images on a rank.

    Args:
        rows: of a generation batch. Each has its own images on the rank's device; so has each copy within a group.
        micro_batch: rows of one forward and backward.
        element: bytes of an activation.
    """
    count = rows * images.per_prompt
    how = f"{short_count(count)} images of a generation x {readable(images.bytes_each)}, in float32"
    lines = [BudgetLine("pixels", "pixels", "always", count * images.bytes_each, how)]
    if images.is_trained:
        patches = micro_batch * images.per_prompt * images.patches
        whole = images.layers * images.saved_bytes_per_patch(element)
        inputs = images.layers * images.hidden_size * element + images.saved_bytes_per_patch(element)
        each = inputs if checkpointing else whole
        how = f"{short_count(patches)} patches x {readable(each)} of {images.layers} layers"
        lines.append(
            BudgetLine("tower_activations", "activations of the tower", "forward and backward", patches * each, how)
        )
    return lines


def encoder_cache_bytes(batched_tokens: int | None, *, many_sequences: bool, hidden_size: int, element: int) -> int:
    """Return the size of an engine's encoder cache on its GPU: image embeddings from the tower.

    Args:
        batched_tokens: the engine's `max_num_batched_tokens`; None: vLLM's default.
        many_sequences: True if vLLM counts the GPU among those with memory for 1,024 sequences.
    """
    return (batched_tokens or BATCHED_TOKENS[not many_sequences]) * hidden_size * element


def caches_in_host_memory(engine_kwargs: dict[str, Any]) -> str:
    """Describe the image caches of one engine in host memory, as a sentence."""
    each = engine_kwargs.get("mm_processor_cache_gb", CACHE_GIB)
    return f"each engine keeps up to {2 * each:g} GiB of images in the host's memory (mm_processor_cache_gb, twice)"
