"""Checks before a tool writes a model or a checkpoint: the folder is free, disk and memory suffice."""

import shutil
from pathlib import Path

import psutil


def check_free(out: Path, option: str) -> None:
    """Check that `out` is a new or an empty folder.

    Args:
        option: name of the option in the error.

    Raises:
        ValueError: it is not.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        what = "is not empty" if out.is_dir() else "is a file"
        raise ValueError(f"{out} {what}: give {option} that is new or empty, or remove it")


def check_disk(out: Path, num_bytes: int, *, what: str, option: str) -> None:
    """Check the disk space for `out`.

    Args:
        what: subject and verb of the error, such as "the checkpoint takes".

    Raises:
        OSError: less than `num_bytes` is free.
    """
    existing = next(parent for parent in out.parents if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < num_bytes:
        raise OSError(
            f"{what} {num_bytes / 1e9:.1f} GB, but {existing} has {free / 1e9:.1f} GB free: free space, or "
            f"give {option} on another disk"
        )


def check_memory(num_bytes: int) -> None:
    """Check this host's memory for a model of `num_bytes`.

    Raises:
        ValueError: less is available.
    """
    available = psutil.virtual_memory().available
    if available < num_bytes:
        raise ValueError(
            f"the model takes {num_bytes / 1e9:.1f} GB of memory in the dtype to write, but this host has "
            f"{available / 1e9:.1f} GB available: export on a host with more, or give --dtype bfloat16"
        )
