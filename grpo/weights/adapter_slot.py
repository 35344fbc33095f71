"""The engine's side of adapters: vLLM's LoRA manager, given tensors that a weight sync has brought instead of a folder.

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
    """Whether a tensor that comes is an adapter's, and no weight of the model."""
    return name.startswith(ADAPTER_PREFIX)


def without_adapters(model: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
    """The model as its weights know it: vLLM loads none through the layers that it has put around others (0.31)."""
    return layers_replaced(model, lambda layer: layer.base_layer if isinstance(layer, BaseLayerWithLoRA) else None)


def take_adapter(
    lora_manager: Any,
    number: int,
    tensors: Mapping[str, torch.Tensor],
    device: torch.device,
    keep: Collection[int] = (),
) -> None:
    """Hold an adapter, in the form in which requests of its number find it, and of the others those to keep alone.

    Args:
        lora_manager: the model runner's (`LRUCacheWorkerLoRAManager`).
        number: of the adapter, new with every weight sync.
        tensors: by PEFT's names, B with its scale.
        keep: numbers of adapters that requests still ask for.

    Raises:
        ValueError: a layer that vLLM does not adapt; it would leave that part out without a word (0.31).
        RuntimeError: all slots are kept; vLLM would give away the one that was used least recently (0.31).
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
    # As `_load_adapter` does after it has read a folder. The scale is in B, so rank and alpha are said to be the same.
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
