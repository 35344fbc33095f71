"""`grpo export CHECKPOINT OUT`: a checkpoint as a plain Hugging Face folder, or its adapter as a PEFT folder.

DeepSpeed's own converter puts partitions together, and the model class's own `save_pretrained` writes the folder.
"""

import argparse
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from grpo.checkpoints.checkpoints import CompleteRecord, checkpoints, read_complete, verify
from grpo.faults.signals import exiting_on_sigterm
from grpo.ops.export.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS, copy_adapter, has_adapter, merge_adapter
from grpo.ops.export.room import check_room, let_others_read
from grpo.ops.export.stored_weights import StoredWeights, open_weights
from grpo.record.durable import appearing_whole
from grpo.weights.names import some

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEFAULT_SHARD_SIZE = "50GB"  # save_pretrained's own


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written."""

    num_files: int
    """Files of weights."""
    num_bytes: int
    """Of the weights."""
    dtypes: tuple[str, ...]
    """Of the weights, without `torch.`."""
    origin: str
    """What they were read from."""
    notes: tuple[str, ...]
    """What the user should know."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help="<output_dir>/checkpoint-<step>")
    parser.add_argument("out", metavar="OUT", type=Path, help="the folder to write; new, or empty")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="cast to it; default: the dtype that the model was trained in. From the float32 master weights where "
        "ZeRO-3 saved them",
    )
    parser.add_argument(
        "--max-shard-size",
        default=DEFAULT_SHARD_SIZE,
        metavar="SIZE",
        help="largest file of weights (default: transformers' %(default)s)",
    )
    parser.add_argument(
        "--merge", action="store_true", help="of a LoRA run: the base with the adapter merged into it; else the adapter"
    )
    parser.add_argument(
        "--base", metavar="MODEL", help="with --merge: the base, where it is not where the adapter says that it was"
    )
    parser.add_argument(
        "--allow-incomplete",
        action="store_true",
        help="export also when complete.json is missing, or files are not as it says",
    )
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run the code that the model or its tokenizer brings along"
    )


def run(args: argparse.Namespace) -> int:
    """The command: 0, or 1 with the reason on stderr."""
    try:
        with exiting_on_sigterm():
            exported = export(
                args.checkpoint,
                args.out,
                dtype=DTYPES.get(args.dtype),
                max_shard_size=args.max_shard_size,
                allow_incomplete=args.allow_incomplete,
                trust_remote_code=args.trust_remote_code,
                merge=args.merge,
                base=args.base,
            )
    except (OSError, ValueError) as error:
        print(f"grpo export: {error}", file=sys.stderr)
        return 1
    for note in exported.notes:
        print(f"grpo export: {note}", file=sys.stderr)
    print(
        f"{args.out}: {exported.num_bytes / 1e9:.3f} GB of {' and '.join(exported.dtypes)} in {exported.num_files} "
        f"file(s), from {exported.origin}"
    )
    return 0


def export(
    checkpoint: Path,
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = DEFAULT_SHARD_SIZE,
    allow_incomplete: bool = False,
    trust_remote_code: bool = False,
    merge: bool = False,
    base: str | None = None,
) -> Exported:
    """Write `checkpoint` as `out`, which appears whole or not at all.

    Needs no accelerator. Host memory: the whole model in the dtype that is written, and beside it one parameter in
    float32 while ZeRO-3's partitions are put together, and fused gate and up projections a second time while
    transformers takes them apart; next to nothing for safetensors whose dtype stays. It is written into a hidden folder
    beside `out` first; only SIGKILL leaves that behind.

    Args:
        checkpoint: as transformers' Trainer writes it with ZeRO-3, ZeRO-2, DDP or one process. DeepSpeed's files are
            pickles: one that could run code is refused.
        dtype: None: the one that the model was trained in, which config.json in the checkpoint names.
        merge: of a LoRA run the base with the adapter in it, in place of the adapter.
        base: where that base is, if not where the adapter says.

    Raises:
        ValueError: `checkpoint` is not a whole checkpoint, `out` is not free, or memory does not suffice.
        OSError: the disk does not suffice, or a file cannot be read or written.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed is imported to read its files, and computes nothing
    out = out.resolve()
    record, notes = check_checkpoint(checkpoint, allow_incomplete=allow_incomplete)
    check_out(out)
    check_shard_size(max_shard_size)
    if has_adapter(checkpoint):
        if record is not None and not allow_incomplete:
            verify(checkpoint, record, [ADAPTER_CONFIG, ADAPTER_WEIGHTS])
        return _export_adapter(
            checkpoint,
            out,
            dtype=dtype,
            max_shard_size=max_shard_size,
            trust_remote_code=trust_remote_code,
            merge=merge,
            base=base,
            notes=tuple(notes),
        )
    if merge or base:
        raise ValueError(
            f"--{'merge' if merge else 'base'} is for LoRA, and {checkpoint} holds a whole model: remove it"
        )
    stored = open_weights(checkpoint, masters=dtype is not None)
    if record is not None and not allow_incomplete:
        verify(checkpoint, record, [str(file.relative_to(checkpoint)) for file in stored.files])
    model = model_without_weights(checkpoint, dtype, trust_remote_code=trust_remote_code)
    # What `save_pretrained` has written keeps its dtypes, which need not be the same for all tensors.
    weights = read_weights(model, stored, None if stored.as_saved and dtype is None else model.dtype, out)
    num_bytes = sum(tensor.nbytes for tensor in weights.values())
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in weights.values()}

    with appearing_whole(out) as partial:
        model.save_pretrained(
            partial, state_dict=weights, max_shard_size=max_shard_size, save_original_format=not stored.as_saved
        )
        if (checkpoint / "tokenizer_config.json").exists():
            AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=trust_remote_code).save_pretrained(partial)
        let_others_read(partial)
        num_files = len(list(partial.glob("*.safetensors")))
    return Exported(
        num_files=num_files,
        num_bytes=num_bytes,
        dtypes=tuple(sorted(dtypes)),
        origin=stored.origin,
        notes=tuple(notes),
    )


def _export_adapter(
    checkpoint: Path,
    out: Path,
    *,
    dtype: torch.dtype | None,
    max_shard_size: int | str,
    trust_remote_code: bool,
    merge: bool,
    base: str | None,
    notes: tuple[str, ...],
) -> Exported:
    if merge:
        num_bytes, dtypes = merge_adapter(
            checkpoint, out, base=base, dtype=dtype, max_shard_size=max_shard_size, trust_remote_code=trust_remote_code
        )
        origin = "an adapter and its base"
    else:
        if dtype is not None or base:
            raise ValueError(
                f"{'--dtype' if dtype else '--base'} is for a merged model: give --merge too, or remove it"
            )
        num_bytes, dtypes = copy_adapter(checkpoint, out, trust_remote_code=trust_remote_code)
        origin = "an adapter; --merge gives a whole model"
    num_files = len(list(out.glob("*.safetensors")))
    return Exported(num_files=num_files, num_bytes=num_bytes, dtypes=tuple(sorted(dtypes)), origin=origin, notes=notes)


def model_without_weights(checkpoint: Path, dtype: torch.dtype | None, *, trust_remote_code: bool) -> PreTrainedModel:
    """The model on the meta device, with the configurations that are in `checkpoint`.

    Raises:
        ValueError: config.json names no dtype, and none is given.
    """
    config = AutoConfig.from_pretrained(checkpoint, trust_remote_code=trust_remote_code)
    dtype = dtype or config.dtype
    if dtype is None:
        raise ValueError(f"{checkpoint}/config.json does not say in which dtype the model was trained: give --dtype")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    if (checkpoint / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(checkpoint)
    return model


def read_weights(
    model: PreTrainedModel, stored: StoredWeights, dtype: torch.dtype | None, out: Path
) -> dict[str, torch.Tensor]:
    """What `model.save_pretrained` takes as `state_dict`, under the names of `stored`; a tied weight comes once.

    Args:
        model: on the meta device.
        dtype: of floating-point tensors; None: as they are stored.
        out: on the disk that has to hold them.

    Raises:
        ValueError: `stored` is not this model, or memory does not suffice.
        OSError: the disk does not suffice.
    """
    expected = remove_tied_weights_from_state_dict(dict(model.state_dict()), model)
    aliases = model.state_dict().keys() - expected.keys()  # DeepSpeed's whole copies make a tied weight two tensors
    weights = {name: tensor for name, tensor in stored.tensors.items() if name not in aliases}
    check_weights(model, expected, weights, as_saved=stored.as_saved)
    dtypes = {n: dtype if dtype and t.dtype.is_floating_point else t.dtype for n, t in weights.items()}
    sizes = {name: tensor.shape.numel() * dtypes[name].itemsize for name, tensor in weights.items()}
    in_memory = [n for n, t in weights.items() if not isinstance(t, torch.Tensor) or t.dtype != dtypes[n]]
    check_room(out, total_bytes=sum(sizes.values()), memory_bytes=sum(sizes[name] for name in in_memory))
    return {name: tensor.contiguous().to(dtypes[name]) for name, tensor in weights.items()}


# -- checks -----------------------------------------------------------------------------------------------------------


def check_checkpoint(checkpoint: Path, *, allow_incomplete: bool) -> tuple[CompleteRecord | None, list[str]]:
    """Refuse what is no complete checkpoint of a whole model.

    Returns:
        Its record, if it is complete, and notes for the user.

    Raises:
        ValueError: says what it is, and what to give instead.
    """
    if inside := checkpoints(checkpoint):
        newest = ", ".join(str(path) for path in inside[:3])
        raise ValueError(f"{checkpoint} is the output folder of a run, not a checkpoint; its newest are: {newest}")
    if not checkpoint.is_dir():
        beside = ", ".join(path.name for path in checkpoints(checkpoint.parent)[:3])
        raise ValueError(f"{checkpoint} does not exist" + (f"; the newest there are: {beside}" if beside else ""))
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
    """Raises ValueError unless `found` are the weights of `model`, which are `expected`."""
    if as_saved:
        # Under names that may be older than this transformers, and stay: only the sum can be compared.
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
    """Raises ValueError when it is no size."""
    try:
        split_torch_state_dict_into_shards({}, max_shard_size=max_shard_size)
    except ValueError as error:
        raise ValueError(f"max_shard_size is {max_shard_size!r}, write it like 500MB or 5GB: {error}") from None


def check_out(out: Path) -> None:
    """Raises ValueError unless `out` is a new or an empty folder."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        what = "is not empty" if out.is_dir() else "is a file"
        raise ValueError(f"{out} {what}: give a folder that is new or empty, or remove it")
