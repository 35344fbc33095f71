"""Which parameters end up in one layer of the engine, distinguished from the trainer's model alone.

vLLM fuses projections that read the same input (`qkv_proj`, `gate_up_proj`) and all experts of a block. A fused layer
that receives only some of its elements in a weight sync would be completed with uninitialised memory, so a layer
travels whole or not at all. The groups here may be larger than the engine's layers, never smaller; the engine counts
what arrives and refuses a weight sync that splits one.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator

import torch
from torch import nn

# What writes back into the residual stream. vLLM cuts these along their input, so it never fuses them with a neighbour.
OUTPUT_PROJECTIONS = ("o_proj", "out_proj", "wo", "down_proj", "dense_4h_to_h", "fc2", "lm_head")

# vLLM leaves this one out of its count of a layer's elements and loads it where it stands (`SKIP_LOAD_TENSORS`, 0.31).
UNCOUNTED_BUFFERS = ("e_score_correction_bias",)


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Those that a checkpoint holds, each once. Not rotary frequencies and the like, which are computed."""
    computed = {name for name, _ in model.named_non_persistent_buffers()}
    left_out = computed | {*(getattr(model, "_keys_to_ignore_on_save", None) or ())}
    return {name: buffer for name, buffer in model.named_buffers() if name not in left_out}


def has_experts(model: nn.Module) -> bool:
    """Whether its tokens are routed to experts."""
    return any("Experts" in type(each).__name__ or name.endswith("experts") for name, each in model.named_modules())


def layer_groups(model: nn.Module) -> dict[str, str]:
    """For each name in `model.named_parameters()` the group that it travels with."""
    names = [name for name, _ in model.named_parameters()]
    blocks = {name.partition(".experts.")[0] for name in names if ".experts." in name}
    return {name: _group(model, name, blocks) for name in names}


def _group(model: nn.Module, name: str, blocks: set[str]) -> str:
    for block in blocks:
        if name.startswith(f"{block}."):
            return block  # router, shared experts and all: what of them the engine puts together differs by model
    path = name.rpartition(".")[0]
    parent, _, leaf = path.rpartition(".")
    module = model.get_submodule(path)
    shapes = [getattr(parameter, "ds_shape", parameter.shape) for parameter in module.parameters(recurse=False)]
    is_norm = all(len(shape) < 2 for shape in shapes)
    if is_norm or leaf in OUTPUT_PROJECTIONS or isinstance(module, nn.Embedding):
        return path
    return f"{parent}.*"  # may be fused with the other projections beside it


def frozen_names(model: nn.Module, *, changing: Collection[str] = ()) -> frozenset[str]:
    """Parameters of the groups in which nothing is trained: `requires_grad` is False on all of them.

    Args:
        changing: parameters that change all the same, by the adapters that are merged into them.

    Buffers are not among them: code that balances experts changes them while nothing is trained, and they are small, so
    they travel in every weight sync. The parameters beside one, in a module that the engine counts together, go with
    it.
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
    """`model` with another layer in the place of each one for which there is one; as it was afterwards."""
    layers = dict(model.named_modules())
    found = [(path.rpartition("."), layer, other_for(layer)) for path, layer in layers.items()]
    replaced = [(layers[parent], leaf, layer, other) for (parent, _, leaf), layer, other in found if other is not None]
    try:
        for parent, leaf, _, other in reversed(replaced):  # those inside of others first
            setattr(parent, leaf, other)
        yield
    finally:
        for parent, leaf, layer, _ in replaced:
            setattr(parent, leaf, layer)
