"""What autograd keeps of a model's forward, and a micro-batch to estimate it for."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from grpo.ops.plan.training_memory import (
    MicroBatch,
)


def saved_by_autograd(
    config: PretrainedConfig,
    dtype: torch.dtype,
    sequences: int,
    tokens: int,
    *,
    adapt: Callable[[Any], None] = lambda model: None,
) -> int:
    """Bytes that the decoder keeps for the backward, each storage once; parameters are not counted.

    Args:
        adapt: puts adapters into the model.
    """
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    adapt(model)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    mask = torch.ones(sequences, tokens, dtype=torch.long)
    mask[0, :5] = 0  # padding, as in a real batch: without it transformers leaves the mask out
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.model(input_ids=mask, attention_mask=mask, use_cache=False)
    return sum(storage.nbytes() for storage in kept.values())


def micro_batch(sequences: int, tokens: int, dtype_bytes: int = 2, flash_attention: bool = True) -> MicroBatch:
    return MicroBatch(
        sequences=sequences,
        sequence_tokens=tokens,
        completion_tokens=tokens,
        dtype_bytes=dtype_bytes,
        checkpointing=True,
        flash_attention=flash_attention,
    )
