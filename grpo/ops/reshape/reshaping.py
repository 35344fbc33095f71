"""Conversion of a checkpoint of M training processes for N: the checks, and the folder."""

import os
import shutil
from pathlib import Path

import torch

from grpo.checkpoints.checkpoints import CompleteRecord, files_in, read_resumable, record_name, verify, write_complete
from grpo.checkpoints.pickles import load_mapped
from grpo.ops.reshape.rank_files import (
    ahead_parts,
    generation_batches,
    random_name,
    random_states,
    reference_parts,
    rollout_state,
)
from grpo.ops.reshape.zero import partition_file, reshape_zero
from grpo.ops.space import check_disk, check_free
from grpo.record.durable import appearing_whole
from grpo.record.folder import make_run_folder


def reshape(checkpoint: Path, out: Path, *, ranks: int) -> dict[str, int]:
    """Write `checkpoint` as `out`, for `ranks` training processes; `out` appears whole or not at all.

    Needs no accelerator. Host memory: one new rank's weights and moments, 12 bytes per parameter over `ranks`.

    Returns:
        Settings to resume with.

    Raises:
        ValueError: `checkpoint` is incomplete or damaged, is in the middle of a generation batch, or its batches cannot
            be divided by `ranks`; or `out` is not empty.
        OSError: the disk is too small, or a file cannot be read or written.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed is imported to read its files, and computes nothing
    out = out.resolve()
    record = read_resumable(checkpoint)
    check_wish(checkpoint, record, out, ranks)
    settings = batch_settings(record, ranks)
    batches = generation_batches(checkpoint, record)
    verify(checkpoint, record, record.files)
    tag = deepspeed_folder(checkpoint)
    make_run_folder(out.parent)
    with appearing_whole(out) as partial:
        for name in shared_files(checkpoint, record, tag):
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(checkpoint / name, partial / name)
        shapes = None
        if tag is not None:
            reshape_zero(checkpoint / tag, partial / tag, before=record.world_size, ranks=ranks)
            shapes = partitioned_shapes(checkpoint / tag)
        parts = reference_parts(checkpoint, record.world_size)
        ahead = ahead_parts(checkpoint, record.world_size, ranks)
        for rank in range(ranks):
            state = rollout_state(parts, batches=batches, rank=rank, ranks=ranks, shapes=shapes, ahead=ahead[rank])
            torch.save(state, partial / f"rollout_state_{rank}.pt")
            torch.save(random_states(checkpoint, record, rank), partial / random_name(rank, ranks))
        write_complete(
            partial,
            step=record.step,
            world_size=ranks,
            sampling=record.sampling,
            reshaped_from=record.reshaped_from or record.world_size,
        )
    return settings


def check_wish(checkpoint: Path, record: CompleteRecord, out: Path, ranks: int) -> None:
    """Check that the conversion is possible.

    Raises:
        ValueError: `ranks` or `out` is unsuitable.
        OSError: the disk is too small.
    """
    if ranks < 1:
        raise ValueError(f"--ranks is {ranks}; it is 1 or more")
    if ranks == record.world_size:
        raise ValueError(f"{checkpoint} is for {ranks} training processes already: resume from it")
    check_free(out, "an --out")
    check_disk(out, sum(record.files.values()), what="the checkpoint takes", option="an --out")


def batch_settings(record: CompleteRecord, ranks: int) -> dict[str, int]:
    """Return settings with the largest micro-batch, up to the present one, with which `ranks` make the same batches.

    Raises:
        ValueError: there is none.
    """
    sampling = record.sampling
    size, steps = sampling["generation_batch_size"], sampling["steps_per_generation"]
    accumulation = sampling["gradient_accumulation_steps"]
    present = size // (steps * (record.reshaped_from or record.world_size))
    for micro_batch in range(present, 0, -1):
        new_steps, rest = divmod(size, micro_batch * ranks)
        if rest == 0 and new_steps * accumulation % steps == 0:
            return {
                "per_device_train_batch_size": micro_batch,
                "steps_per_generation": new_steps,
                "gradient_accumulation_steps": new_steps * accumulation // steps,
            }
    fitting = [str(count) for count in range(1, size + 1) if size % count == 0]
    raise ValueError(
        f"{ranks} training processes cannot share generation batches of {size} completions, with {accumulation} of "
        f"{steps} micro-batches to an optimizer step: take a number that divides {size} ({', '.join(fitting[:12])} …)"
    )


def deepspeed_folder(checkpoint: Path) -> str | None:
    """Name of the folder with DeepSpeed's files; None if the ranks hold everything whole (DDP, one process)."""
    try:
        return (checkpoint / "latest").read_text().strip()
    except FileNotFoundError:
        return None


def shared_files(checkpoint: Path, record: CompleteRecord, tag: str | None) -> list[str]:
    """List the files independent of the number of ranks."""
    own = {random_name(rank, record.world_size) for rank in range(record.world_size)}
    own |= {f"rollout_state_{rank}.pt" for rank in range(record.world_size)}
    own |= {record_name(rank) for rank in range(record.world_size)}
    return [name for name in files_in(checkpoint) if name not in own and not (tag and name.startswith(f"{tag}/"))]


def partitioned_shapes(tag: Path) -> dict[str, torch.Size] | None:
    """Shapes of all parameters by name under ZeRO-3; None otherwise."""
    if not (tag / partition_file(0)).exists():
        return None
    states = load_mapped(tag / partition_file(0))
    shapes = {name: shape for group in states["param_shapes"] for name, shape in group.items()}
    return {**shapes, **(states["frozen_param_shapes"] or {})}
