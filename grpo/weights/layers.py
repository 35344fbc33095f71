"""Grouping of parameters by the engine's layers, from the trainer's model alone.

vLLM fuses projections that read the same input (`qkv_proj`, `gate_up_proj`) and all experts of a block. A fused layer
that receives only a part of its elements would be completed with uninitialised memory, so a layer is sent completely or
not at all. Groups may be larger than the engine's layers, never smaller; the engine counts received elements and
refuses a weight sync that splits a layer.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator

import torch
from torch import nn

# Projections back to the residual stream. vLLM splits them along their input, so it never fuses them with a neighbour.
OUTPUT_PROJECTIONS = ("o_proj", "out_proj", "wo", "down_proj", "dense_4h_to_h", "fc2", "lm_head")

# vLLM excludes it from a layer's element count and loads it in place (`SKIP_LOAD_TENSORS`, 0.31).
UNCOUNTED_BUFFERS = ("e_score_correction_bias",)


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers saved in checkpoints, each once; without computed ones such as rotary frequencies."""
    computed = {name for name, _ in model.named_non_persistent_buffers()}
    left_out = computed | {*(getattr(model, "_keys_to_ignore_on_save", None) or ())}
    return {name: buffer for name, buffer in model.named_buffers() if name not in left_out}


def has_experts(model: nn.Module) -> bool:
    """True if the model routes tokens to experts."""
    return any("Experts" in type(each).__name__ or name.endswith("experts") for name, each in model.named_modules())


def layer_groups(model: nn.Module) -> dict[str, str]:
    """Group of each name in `model.named_parameters()`; a group is sent together."""
    names = [name for name, _ in model.named_parameters()]
    blocks = {name.partition(".experts.")[0] for name in names if ".experts." in name}
    return {name: _group(model, name, blocks) for name in names}


def _group(model: nn.Module, name: str, blocks: set[str]) -> str:
    for block in blocks:
        if name.startswith(f"{block}."):
            return block  # including router and shared experts: the engine combines them differently by model
    path = name.rpartition(".")[0]
    parent, _, leaf = path.rpartition(".")
    module = model.get_submodule(path)
    shapes = [getattr(parameter, "ds_shape", parameter.shape) for parameter in module.parameters(recurse=False)]
    is_norm = all(len(shape) < 2 for shape in shapes)
    if is_norm or leaf in OUTPUT_PROJECTIONS or isinstance(module, nn.Embedding):
        return path
    return f"{parent}.*"  # may be fused with its sibling projections


def frozen_names(model: nn.Module, *, changing: Collection[str] = ()) -> frozenset[str]:
    """Return the parameters of groups without any trained parameter (`requires_grad` is False on all of them).

    Args:
        changing: parameters that change all the same, because adapters are merged into them.

    Buffers are excluded: code that balances experts changes them without training, and they are small, so every weight
    sync sends them. Parameters in the same module, which the engine counts together with a buffer, are sent with it.
    """
    groups = layer_groups(model)
    travelling = {groups[name] for name, parameter in model.named_parameters() if parameter.requires_grad}
    travelling |= {groups[name] for name in changing}
    for buffer in persistent_buffers(model):
        path, _, leaf = buffer.rpartition(".")
        if leaf not in UNCOUNTED_BUFFERS:
            own = [f"{path}.{each}" if path else each for each in model.get_submodule(path)._parameters]
            travelling |= {groups[name] for name in own if name in groups}
    return frozenset(name for name, group in groups.items() if group not in travelling)


@contextlib.contextmanager
def layers_replaced(model: nn.Module, other_for: Callable[[nn.Module], nn.Module | None]) -> Iterator[None]:
    """Replace layers of `model` in a `with` block by the results of `other_for`; None keeps a layer."""
    layers = dict(model.named_modules())
    found = [(path.rpartition("."), layer, other_for(layer)) for path, layer in layers.items()]
    replaced = [(layers[parent], leaf, layer, other) for (parent, _, leaf), layer, other in found if other is not None]
    try:
        for parent, leaf, _, other in reversed(replaced):  # inner ones first
            setattr(parent, leaf, other)
        yield
    finally:
        for parent, leaf, layer, _ in replaced:
            setattr(parent, leaf, layer)
