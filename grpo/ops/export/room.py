"""Whether a model fits where it is to be written, and into memory before; and that others may read it then."""

import shutil
import stat
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


def let_others_read(folder: Path) -> None:
    """The weights in it, as all that was written beside them: safetensors lets only their owner read them (0.8)."""
    mode = 0o666 & stat.S_IMODE(folder.stat().st_mode)
    for file in folder.glob("*.safetensors"):
        file.chmod(mode)
