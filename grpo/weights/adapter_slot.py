"""The engine's side of LoRA adapters: feeds vLLM's LoRA manager with tensors from a weight sync instead of a folder.

Runs in vLLM's worker processes; imports neither TRL nor DeepSpeed nor PEFT.
"""

import contextlib
from collections.abc import Collection, Mapping
from typing import Any

import torch
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper

from grpo.weights.layers import layers_replaced
from grpo.weights.names import ADAPTER_PREFIX


def is_adapters(name: str) -> bool:
    """True if a received tensor belongs to an adapter, not to the model."""
    return name.startswith(ADAPTER_PREFIX)


def without_adapters(model: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
    """Unwrap vLLM's LoRA layers in a `with` block: vLLM cannot load weights through them (0.31)."""
    return layers_replaced(model, lambda layer: layer.base_layer if isinstance(layer, BaseLayerWithLoRA) else None)


def take_adapter(
    lora_manager: Any,
    number: int,
    tensors: Mapping[str, torch.Tensor],
    device: torch.device,
    keep: Collection[int] = (),
) -> None:
    """Load an adapter under its number, and drop all others except those in `keep`.

    Args:
        lora_manager: the model runner's (`LRUCacheWorkerLoRAManager`).
        number: of the adapter, new with every weight sync.
        tensors: by PEFT's names, B multiplied by its scale.
        keep: numbers of adapters still in use.

    Raises:
        ValueError: a layer that vLLM does not adapt; vLLM would skip it silently (0.31).
        RuntimeError: all slots are kept; vLLM would evict the least recently used one (0.31).
    """
    manager = lora_manager._adapter_manager
    kept = lora_manager.list_adapters() & {*keep}
    if len(kept) >= manager.lora_slots:
        raise RuntimeError(
            f"adapter {number} has no slot: requests still use {sorted(kept)}, and the engine has space for "
            f"{manager.lora_slots} adapters (max_loras)"
        )
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    rank = lora_manager.lora_config.max_lora_rank
    # As `_load_adapter` after reading a folder. B contains the scale, so alpha is set equal to the rank.
    lora = LoRAModel.from_lora_tensors(
        number,
        dict(tensors),
        PEFTHelper(r=rank, lora_alpha=rank, target_modules=[]),
        device=str(device),
        dtype=lora_manager.lora_config.lora_dtype,
        model_vocab_size=lora_manager.vocab_size,
        weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
    )
    lora.is_3d_lora_weight = False
    for other in lora_manager.list_adapters() - kept:
        lora_manager.remove_adapter(other)
    manager.add_adapter(lora)
    if unknown := sorted(lora.loras.keys() - manager.modules.keys()):
        raise ValueError(
            f"this engine adapts no layer {', '.join(unknown[:3])}{' …' if len(unknown) > 3 else ''}: set vllm_lora to "
            "'merge', or leave it out of target_modules"
        )
    manager.activate_adapter(number)
