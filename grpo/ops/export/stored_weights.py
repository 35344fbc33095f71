"""Weights in a checkpoint, left on disk until they are read: safetensors, or DeepSpeed's files.

DeepSpeed's own `get_fp32_state_dict_from_zero_checkpoint` merges ZeRO-3's partitions. Its ZeRO-2 counterpart
concatenates the whole model (0.19); for ZeRO-2 the model's own full copy, saved by DeepSpeed, is read instead.
"""

import contextlib
import io
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file

from grpo.checkpoints.pickles import check_pickle, load_mapped, weights_only


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWeights:
    """All weights of one checkpoint."""

    tensors: dict[str, Any]
    """Tensors by name, with `shape` and `dtype` as stored (float32 for ZeRO-3's master weights): mapped from their
    files, or DeepSpeed's lazy tensors, read by `contiguous()`. A tied weight may appear under each of its names."""
    as_saved: bool
    """True for names as written by `save_pretrained`; False for the module's parameter names, where transformers 5 has
    fused experts."""
    origin: str
    """Text for messages."""
    files: tuple[Path, ...]
    """Files they are read from."""


def open_weights(checkpoint: Path, *, masters: bool) -> StoredWeights:
    """Find the weights in `checkpoint`. Values are not read yet, except parameters frozen under ZeRO-3.

    Args:
        masters: prefer ZeRO-3's float32 master weights to safetensors in the model's dtype.

    Raises:
        ValueError: there are none, they cannot be read, or they could run code.
    """
    files = sorted(checkpoint.glob("model*.safetensors"))
    tag = _deepspeed_folder(checkpoint)
    is_zero3 = tag is not None and any(tag.glob("zero_pp_rank_*_model_states.pt"))
    try:
        if files and not (masters and is_zero3):
            tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
            origin = f"{len(files)} safetensors file(s)"
            return StoredWeights(tensors=tensors, as_saved=True, origin=origin, files=tuple(files))
        pickles = sorted(tag.glob("*_states.pt")) if tag is not None else []
        for file in pickles:
            check_pickle(file)
        if is_zero3:
            origin = "ZeRO-3's float32 master weights"
            tensors = _partitioned(checkpoint)
            return StoredWeights(tensors=tensors, as_saved=False, origin=origin, files=tuple(pickles))
        if tag is not None:
            file = tag / "mp_rank_00_model_states.pt"
            origin = f"{tag.name}/{file.name}"
            tensors = load_mapped(file)["module"]
            return StoredWeights(tensors=tensors, as_saved=False, origin=origin, files=(file,))
    except (OSError, ValueError, RuntimeError, EOFError, KeyError, pickle.UnpicklingError, SafetensorError) as error:
        raise ValueError(f"the weights in {checkpoint} cannot be read: {type(error).__name__}: {error}") from error
    raise ValueError(
        f"{checkpoint} holds no weights: neither model*.safetensors, nor a folder that DeepSpeed's file `latest` names"
    )


def _deepspeed_folder(checkpoint: Path) -> Path | None:
    try:
        tag = (checkpoint / "latest").read_text().strip()
    except FileNotFoundError:
        return None
    return checkpoint / tag if (checkpoint / tag).is_dir() else None


def _partitioned(checkpoint: Path) -> dict[str, Any]:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    # It prints, and draws progress bars, while it reads other files than the partitions.
    with weights_only(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return get_fp32_state_dict_from_zero_checkpoint(str(checkpoint), lazy_mode=True)
