"""Export of an adapter: unchanged, in PEFT's own layout, or merged into its base."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoConfig

from grpo.model.text_part import model_class, model_without_weights
from grpo.ops.export.writing import Options, WeightsSummary, check_space, summary_of, writing

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"


def has_adapter(checkpoint: Path) -> bool:
    return (checkpoint / ADAPTER_CONFIG).exists()


def export_adapter(checkpoint: Path, out: Path, options: Options) -> tuple[WeightsSummary, str]:
    """Write the files for `PeftModel.from_pretrained` and `vllm serve --lora-modules`; with `merge` a plain folder.

    Returns:
        A summary of the weights, and their origin.

    Raises:
        ValueError: the weights cannot be read, or as `merge_adapter`; or an option requires `merge`.
    """
    summary = _look_at(checkpoint / ADAPTER_WEIGHTS)
    if options.merge:
        return merge_adapter(checkpoint, out, options), "an adapter and its base"
    if options.dtype is not None or options.base:
        option = "--dtype" if options.dtype else "--base"
        raise ValueError(f"{option} is for a merged model: give --merge too, or remove it")
    with writing(checkpoint, out, options) as partial:
        for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
            shutil.copy(checkpoint / name, partial / name)
    return summary, "an adapter; --merge gives a whole model"


def merge_adapter(checkpoint: Path, out: Path, options: Options) -> WeightsSummary:
    """Write the base with the adapter merged, as a plain folder. PEFT merges, on the CPU.

    Raises:
        ValueError: there is no such base, the adapter does not fit it, or memory is too small.
        OSError: the disk is too small.
    """
    from peft import PeftModel

    config = json.loads((checkpoint / ADAPTER_CONFIG).read_text())
    base = options.base or config.get("base_model_name_or_path")
    if not base:
        raise ValueError(f"{checkpoint / ADAPTER_CONFIG} names no base: name it with --base")
    named = {
        "revision": config.get("revision") if options.base is None else None,
        "trust_remote_code": options.trust_remote_code,
    }
    try:
        settings = AutoConfig.from_pretrained(base, **named)
        dtype = options.dtype or settings.dtype  # None: the weights' own dtype, which a configuration need not name
        empty = model_without_weights(settings, trust_remote_code=options.trust_remote_code)
        num_bytes = empty.num_parameters() * (dtype or torch.bfloat16).itemsize
    except (OSError, ValueError) as error:
        raise _no_base(base, error) from None
    check_space(out, total_bytes=num_bytes, memory_bytes=num_bytes)
    try:
        model = model_class(settings).from_pretrained(base, dtype=dtype, **named)
    except (OSError, ValueError) as error:
        raise _no_base(base, error) from None
    try:
        merged: Any = PeftModel.from_pretrained(model, str(checkpoint)).merge_and_unload(safe_merge=True)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"the adapter in {checkpoint} is not for {base}: {error}") from None
    with writing(checkpoint, out, options) as partial:
        merged.save_pretrained(partial, max_shard_size=options.max_shard_size)
    return summary_of(merged.state_dict().values())


def _no_base(base: str, error: Exception) -> ValueError:
    return ValueError(f"the adapter's base, {base}, cannot be loaded; name another place with --base: {error}")


def _look_at(path: Path) -> WeightsSummary:
    try:
        tensors = load_file(path).values()
    except (OSError, SafetensorError) as error:
        raise ValueError(f"the adapter's weights in {path} cannot be read: {error}") from None
    if not tensors:
        raise ValueError(f"{path} holds no weights")
    return summary_of(tensors)
