"""Whether a model fits where it is to be written, and into memory before."""

import shutil
from pathlib import Path

import psutil


def check_room(out: Path, *, total_bytes: int, memory_bytes: int) -> None:
    """Refuse what the disk, or the host's memory, cannot hold.

    Raises:
        OSError: the disk.
        ValueError: the memory.
    """
    existing = next(parent for parent in out.parents if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < total_bytes:
        raise OSError(
            f"the weights take {total_bytes / 1e9:.1f} GB, but {existing} has {free / 1e9:.1f} GB free: free space, or "
            "give an OUT on another disk"
        )
    available = psutil.virtual_memory().available
    if available < memory_bytes:
        raise ValueError(
            f"the model takes {memory_bytes / 1e9:.1f} GB of memory in the dtype to write, but this host has "
            f"{available / 1e9:.1f} GB available: export on a host with more, or give --dtype bfloat16"
        )
