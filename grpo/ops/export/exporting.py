"""Export of a checkpoint as a plain Hugging Face folder: the checks, and the weights under their names.

DeepSpeed's own converter merges partitions, and the model class's own `save_pretrained` writes the folder.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from transformers import AutoConfig, GenerationConfig, PreTrainedModel
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from grpo.checkpoints.checkpoints import CompleteRecord, read_complete, verify
from grpo.model.text_part import model_without_weights
from grpo.ops.export.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS, export_adapter, has_adapter
from grpo.ops.export.stored_weights import StoredWeights, open_weights
from grpo.ops.export.writing import Options, WeightsSummary, check_space, summary_of, writing
from grpo.ops.space import check_free
from grpo.weights.names import some


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """Summary of an export."""

    num_files: int
    """Number of weight files."""
    num_bytes: int
    """Size of the weights."""
    dtypes: tuple[str, ...]
    """Dtypes of the weights, without `torch.`."""
    origin: str
    """Source of the weights."""
    notes: tuple[str, ...]
    """Notes for the user."""


def export(checkpoint: Path, out: Path, options: Options) -> Exported:
    """Write `checkpoint` to `out`, atomically.

    Needs no accelerator. Host memory: the whole model in the written dtype, plus one parameter in float32 while
    ZeRO-3's partitions are merged, and a second copy of fused gate and up projections while transformers splits them;
    almost none for safetensors in an unchanged dtype. A hidden folder beside `out` is written first; only SIGKILL
    leaves it behind.

    Args:
        checkpoint: written by transformers' Trainer with ZeRO-3, ZeRO-2, DDP or one process. DeepSpeed's files are
            pickles: one that could run code is refused.

    Raises:
        ValueError: `checkpoint` is not a complete checkpoint, `out` is not free, or memory is too small.
        OSError: the disk is too small, or a file cannot be read or written.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed is imported to read its files, and computes nothing
    out = out.resolve()
    record, notes = check_checkpoint(checkpoint, allow_incomplete=options.allow_incomplete)
    trusted = None if options.allow_incomplete else record
    check_free(out, "a folder")
    check_shard_size(options.max_shard_size)
    if has_adapter(checkpoint):
        if trusted is not None:
            verify(checkpoint, trusted, [ADAPTER_CONFIG, ADAPTER_WEIGHTS])
        summary, origin = export_adapter(checkpoint, out, options)
    else:
        if options.merge or options.base:
            option = "--merge" if options.merge else "--base"
            raise ValueError(f"{option} is for LoRA, and {checkpoint} holds a whole model: remove it")
        stored = open_weights(checkpoint, masters=options.dtype is not None)
        if trusted is not None:
            verify(checkpoint, trusted, [str(file.relative_to(checkpoint)) for file in stored.files])
        summary, origin = export_model(checkpoint, stored, out, options), stored.origin
    return Exported(
        num_files=len(list(out.glob("*.safetensors"))),
        num_bytes=summary.num_bytes,
        dtypes=summary.dtypes,
        origin=origin,
        notes=tuple(notes),
    )


def export_model(checkpoint: Path, stored: StoredWeights, out: Path, options: Options) -> WeightsSummary:
    """Write the model of `stored`."""
    model = described_model(checkpoint, options.dtype, trust_remote_code=options.trust_remote_code)
    # Weights written by `save_pretrained` keep their dtypes, which may differ between tensors.
    weights = read_weights(model, stored, None if stored.as_saved and options.dtype is None else model.dtype, out)
    summary = summary_of(weights.values())  # before they are written: writing releases each of them
    with writing(checkpoint, out, options) as partial:
        model.save_pretrained(
            partial,
            state_dict=weights,
            max_shard_size=options.max_shard_size,
            save_original_format=not stored.as_saved,
        )
    return summary


def described_model(checkpoint: Path, dtype: torch.dtype | None, *, trust_remote_code: bool) -> PreTrainedModel:
    """Make the model on the meta device, from the configurations in `checkpoint`.

    Raises:
        ValueError: config.json names no dtype, and none is given.
    """
    config = AutoConfig.from_pretrained(checkpoint, trust_remote_code=trust_remote_code)
    dtype = dtype or config.dtype
    if dtype is None:
        raise ValueError(f"{checkpoint}/config.json does not say in which dtype the model was trained: give --dtype")
    model = model_without_weights(config, trust_remote_code=trust_remote_code).to(dtype)
    if (checkpoint / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(checkpoint)
    return model


def read_weights(
    model: PreTrainedModel, stored: StoredWeights, dtype: torch.dtype | None, out: Path
) -> dict[str, torch.Tensor]:
    """Return the `state_dict` for `model.save_pretrained`, under the names of `stored`; a tied weight appears once.

    Args:
        model: on the meta device.
        dtype: of floating-point tensors; None: unchanged.
        out: on the output disk.

    Raises:
        ValueError: `stored` is not this model, or memory is too small.
        OSError: the disk is too small.
    """
    expected = remove_tied_weights_from_state_dict(dict(model.state_dict()), model)
    aliases = model.state_dict().keys() - expected.keys()  # DeepSpeed's full copies turn a tied weight into two tensors
    weights = {name: tensor for name, tensor in stored.tensors.items() if name not in aliases}
    check_weights(model, expected, weights, as_saved=stored.as_saved)
    dtypes, total_bytes, memory_bytes = {}, 0, 0
    for name, tensor in weights.items():
        dtypes[name] = dtype if dtype is not None and tensor.dtype.is_floating_point else tensor.dtype
        num_bytes = tensor.shape.numel() * dtypes[name].itemsize
        total_bytes += num_bytes
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != dtypes[name]:
            memory_bytes += num_bytes
    check_space(out, total_bytes=total_bytes, memory_bytes=memory_bytes)
    return {name: tensor.contiguous().to(dtypes[name]) for name, tensor in weights.items()}


# -- checks -----------------------------------------------------------------------------------------------------------


def check_checkpoint(checkpoint: Path, *, allow_incomplete: bool) -> tuple[CompleteRecord | None, list[str]]:
    """Refuse anything but a complete checkpoint of a whole model.

    Returns:
        Its record, if it is complete, and notes for the user.

    Raises:
        ValueError: describes the folder, and names a valid input.
    """
    if not has_adapter(checkpoint) and not (checkpoint / "config.json").exists():
        raise ValueError(
            f"{checkpoint} has no config.json: give a checkpoint-<step> folder that the trainer has written"
        )
    notes = []
    record = None
    try:
        record = read_complete(checkpoint)
    except ValueError as problem:
        if not allow_incomplete:
            raise ValueError(
                f"{problem}. This checkpoint was not finished, or grpo did not write it: export another one, or give "
                "--allow-incomplete to export what is there"
            ) from None
        notes.append(f"{problem}; exported all the same")
    if not (checkpoint / "tokenizer_config.json").exists():
        notes.append(f"{checkpoint} holds no tokenizer: the export has none either")
    return record, notes


def check_weights(model: PreTrainedModel, expected: dict[str, Any], found: dict[str, Any], *, as_saved: bool) -> None:
    """Raise ValueError unless `found` are the weights of `model`, described by `expected`."""
    if as_saved:
        # Stored names may be older than this transformers, and are kept: only the total can be compared.
        wanted_elements, elements = (sum(t.shape.numel() for t in part.values()) for part in (expected, found))
        problem = f"has {elements} elements of weights, not {wanted_elements}" if elements != wanted_elements else ""
    else:
        both = expected.keys() & found.keys()
        wrong = {
            "lacks": expected.keys() - both,
            "has besides": found.keys() - both,
            "has in another shape": {name for name in both if found[name].shape != expected[name].shape},
        }
        problem = " and ".join(f"{what} {some(sorted(names))}" for what, names in wrong.items() if names)
    if problem:
        raise ValueError(f"config.json describes a {type(model).__name__}, but the checkpoint {problem}")


def check_shard_size(max_shard_size: int | str) -> None:
    """Raise ValueError if it is not a size."""
    try:
        split_torch_state_dict_into_shards({}, max_shard_size=max_shard_size)
    except ValueError as error:
        raise ValueError(f"max_shard_size is {max_shard_size!r}, write it like 500MB or 5GB: {error}") from None
