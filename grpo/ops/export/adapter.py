"""An adapter in a checkpoint: as it stands, in PEFT's own layout, or merged into the base that it was trained on."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from grpo.ops.export.room import check_room, let_others_read
from grpo.record.durable import appearing_whole

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"


def has_adapter(checkpoint: Path) -> bool:
    return (checkpoint / ADAPTER_CONFIG).exists()


def copy_adapter(checkpoint: Path, out: Path, *, trust_remote_code: bool) -> tuple[int, set[str]]:
    """What `PeftModel.from_pretrained` and `vllm serve --lora-modules` read, and the tokenizer.

    Returns:
        Bytes of the weights, and their dtypes.

    Raises:
        ValueError: the weights cannot be read.
    """
    num_bytes, dtypes = _look_at(checkpoint / ADAPTER_WEIGHTS)
    with appearing_whole(out) as partial:
        for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
            shutil.copy(checkpoint / name, partial / name)
        _copy_tokenizer(checkpoint, partial, trust_remote_code=trust_remote_code)
        let_others_read(partial)
    return num_bytes, dtypes


def merge_adapter(
    checkpoint: Path,
    out: Path,
    *,
    base: str | None,
    dtype: torch.dtype | None,
    max_shard_size: int | str,
    trust_remote_code: bool,
) -> tuple[int, set[str]]:
    """The base with the adapter in its weights, as a plain folder. PEFT merges, on the CPU.

    Args:
        base: a folder or a hub id; None: the one that the adapter names.
        dtype: None: the base's own.

    Returns:
        As `copy_adapter`.

    Raises:
        ValueError: there is no such base, the adapter is not for it, or memory does not suffice.
        OSError: the disk does not suffice.
    """
    from peft import PeftModel

    _look_at(checkpoint / ADAPTER_WEIGHTS)
    config = json.loads((checkpoint / ADAPTER_CONFIG).read_text())
    revision = config.get("revision") if base is None else None
    base = base or config.get("base_model_name_or_path")
    if not base:
        raise ValueError(f"{checkpoint / ADAPTER_CONFIG} names no base: name it with --base")
    try:
        settings = AutoConfig.from_pretrained(base, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise _no_base(base, error) from None
    dtype = dtype or settings.dtype  # None: that of the weights, which a configuration need not name
    num_bytes = _bytes_of(settings, dtype or torch.bfloat16, trust_remote_code=trust_remote_code)
    check_room(out, total_bytes=num_bytes, memory_bytes=num_bytes)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            base, revision=revision, dtype=dtype, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise _no_base(base, error) from None
    try:
        merged: Any = PeftModel.from_pretrained(model, str(checkpoint)).merge_and_unload(safe_merge=True)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"the adapter in {checkpoint} is not for {base}: {error}") from None
    with appearing_whole(out) as partial:
        merged.save_pretrained(partial, max_shard_size=max_shard_size)
        _copy_tokenizer(checkpoint, partial, trust_remote_code=trust_remote_code)
        let_others_read(partial)
    weights = merged.state_dict().values()
    return sum(tensor.nbytes for tensor in weights), {str(tensor.dtype).removeprefix("torch.") for tensor in weights}


def _copy_tokenizer(checkpoint: Path, out: Path, *, trust_remote_code: bool) -> None:
    if (checkpoint / "tokenizer_config.json").exists():
        AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=trust_remote_code).save_pretrained(out)


def _bytes_of(config: Any, dtype: torch.dtype, *, trust_remote_code: bool) -> int:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    return sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize


def _no_base(base: str, error: Exception) -> ValueError:
    return ValueError(f"the adapter's base, {base}, cannot be loaded; name another place with --base: {error}")


def _look_at(path: Path) -> tuple[int, set[str]]:
    try:
        tensors = load_file(path).values()
    except (OSError, SafetensorError) as error:
        raise ValueError(f"the adapter's weights in {path} cannot be read: {error}") from None
    if not tensors:
        raise ValueError(f"{path} holds no weights")
    return sum(tensor.nbytes for tensor in tensors), {str(tensor.dtype).removeprefix("torch.") for tensor in tensors}
