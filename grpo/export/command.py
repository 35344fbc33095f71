"""`grpo export CHECKPOINT OUT`: a checkpoint as a plain Hugging Face folder, in host memory near one shard.

The model class's own `save_pretrained` writes the folder. It is handed stand-ins that know their size, and read their
values from the checkpoint when their shard is written: the model is never whole in memory.
"""

import argparse
import os
import shutil
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from grpo.export.pending_weights import PendingTensor, pending_tensors
from grpo.export.stored_weights import open_weights
from grpo.run.checkpoints import checkpoints, read_complete

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
        help="largest file of weights, and with it the host memory that is needed (default: transformers' %(default)s)",
    )
    parser.add_argument(
        "--allow-incomplete",
        action="store_true",
        help="export also when complete.json is missing, or names files that are missing or cut short",
    )
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run the code that the model or its tokenizer brings along"
    )


def run(args: argparse.Namespace) -> int:
    """The command: 0, or 1 with the reason on stderr."""
    # A batch system ends a process by SIGTERM: leave nothing half written then either.
    inherited = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        exported = export(
            args.checkpoint,
            args.out,
            dtype=DTYPES.get(args.dtype),
            max_shard_size=args.max_shard_size,
            allow_incomplete=args.allow_incomplete,
            trust_remote_code=args.trust_remote_code,
        )
    except (OSError, ValueError) as error:
        print(f"grpo export: {error}", file=sys.stderr)
        return 1
    finally:
        signal.signal(signal.SIGTERM, inherited)
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
) -> Exported:
    """Write `checkpoint` as `out`, which appears whole or not at all.

    Needs no accelerator. Host memory: one shard, and beside it the largest parameter once as it is stored (float32 in
    a ZeRO-3 checkpoint) and once converted. It is written into a hidden folder beside `out` first; only SIGKILL leaves
    that behind.

    Args:
        checkpoint: as transformers' Trainer writes it with ZeRO-3, ZeRO-2, DDP or one process. DeepSpeed's files are
            pickles, and run code: export what you trust.
        dtype: None: the one that the model was trained in, which config.json in the checkpoint names.

    Raises:
        ValueError: `checkpoint` is not a whole checkpoint, `out` is not free, or memory does not suffice.
        OSError: the disk does not suffice, or a file cannot be read or written.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed is imported to read its files, and computes nothing
    out = out.resolve()
    notes = [*check_checkpoint(checkpoint, allow_incomplete=allow_incomplete)]
    check_out(out)
    stored = open_weights(checkpoint, masters=dtype is not None)
    model = model_without_weights(checkpoint, dtype, trust_remote_code=trust_remote_code)
    # What `save_pretrained` has written keeps its dtypes, which need not be the same for all tensors.
    pending = pending_tensors(model, stored, None if stored.as_saved and dtype is None else model.dtype)
    shard_bytes = plan_shards(pending, max_shard_size)
    check_room(out, total_bytes=sum(shard_bytes), largest_shard_bytes=max(shard_bytes))
    exported = Exported(
        num_files=len(shard_bytes),
        num_bytes=sum(shard_bytes),
        dtypes=tuple(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in pending.values()})),
        origin=stored.origin,
        notes=tuple(notes),
    )

    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        # The stand-ins bear the names of the checkpoint format already: no conversion.
        model.save_pretrained(partial, state_dict=pending, max_shard_size=max_shard_size, save_original_format=False)
        if (checkpoint / "tokenizer_config.json").exists():
            AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=trust_remote_code).save_pretrained(partial)
        for file in partial.glob("*.safetensors"):
            shutil.copymode(partial / "config.json", file)  # safetensors lets only their owner read them (0.8)
        os.rename(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return exported


def plan_shards(pending: dict[str, PendingTensor], max_shard_size: int | str) -> list[int]:
    """Bytes of each file that `save_pretrained` will write.

    Raises:
        ValueError: `max_shard_size` is no size.
    """
    try:
        split = split_torch_state_dict_into_shards(pending, max_shard_size=max_shard_size)
    except ValueError as error:
        raise ValueError(f"max_shard_size is {max_shard_size!r}, write it like 500MB or 5GB: {error}") from None
    return [sum(pending[name].num_bytes for name in names) for names in split.filename_to_tensors.values()]


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


# -- checks -----------------------------------------------------------------------------------------------------------


def check_checkpoint(checkpoint: Path, *, allow_incomplete: bool) -> list[str]:
    """Refuse what is no complete checkpoint of a whole model.

    Returns:
        Notes for the user.

    Raises:
        ValueError: says what it is, and what to give instead.
    """
    if inside := checkpoints(checkpoint):
        newest = ", ".join(str(path) for path in inside[:3])
        raise ValueError(f"{checkpoint} is the output folder of a run, not a checkpoint; its newest are: {newest}")
    if not checkpoint.is_dir():
        beside = ", ".join(path.name for path in checkpoints(checkpoint.parent)[:3])
        raise ValueError(f"{checkpoint} does not exist" + (f"; the newest there are: {beside}" if beside else ""))
    if (checkpoint / "adapter_config.json").exists():
        raise ValueError(f"{checkpoint} holds an adapter, not a whole model: merge it into its base model with peft")
    if not (checkpoint / "config.json").exists():
        raise ValueError(
            f"{checkpoint} has no config.json: give a checkpoint-<step> folder that the trainer has written"
        )
    notes = []
    try:
        read_complete(checkpoint)
    except ValueError as problem:
        if not allow_incomplete:
            raise ValueError(
                f"{problem}. This checkpoint was not finished, or grpo did not write it: export another one, or give "
                "--allow-incomplete to export what is there"
            ) from None
        notes.append(f"{problem}; exported all the same")
    if not (checkpoint / "tokenizer_config.json").exists():
        notes.append(f"{checkpoint} holds no tokenizer: the export has none either")
    return notes


def check_out(out: Path) -> None:
    """Raises ValueError unless `out` is a new or an empty folder."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        what = "is not empty" if out.is_dir() else "is a file"
        raise ValueError(f"{out} {what}: give a folder that is new or empty, or remove it")


def check_room(out: Path, *, total_bytes: int, largest_shard_bytes: int) -> None:
    """Refuse what the disk, or the host's memory, cannot hold.

    Raises:
        OSError: the disk.
        ValueError: the memory; names the setting.
    """
    existing = next(parent for parent in out.parents if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < total_bytes:
        raise OSError(
            f"the weights take {total_bytes / 1e9:.1f} GB, but {existing} has {free / 1e9:.1f} GB free: free space, or "
            "give an OUT on another disk"
        )
    available = available_memory_bytes()
    if available < largest_shard_bytes:
        raise ValueError(
            f"the largest file would hold {largest_shard_bytes / 1e9:.1f} GB, which are in memory at a time, but this "
            f"host has {available / 1e9:.1f} GB available: give --max-shard-size {max(1, available // (2 * 10**9))}GB"
        )


def available_memory_bytes() -> int:
    """What the kernel would give to new processes without swapping."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024
