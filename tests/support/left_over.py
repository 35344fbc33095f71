"""What a job leaves behind: processes, files in its folder for temporary ones, shared memory. By what the kernel says.

Jobs of other tests may run beside. A job's processes are known by their TMPDIR, which is its own and which all of them
inherit, whoever their parents are by now.
"""

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path

# torchrun's folder for error files, which it leaves however it ends (2.13), what a job is given, and lasting caches.
LASTING = ("torch", f"vllm_{os.getuid()}")
# What CUDA, NCCL and Triton leave of processes that were killed, on machines with GPUs: nothing of ours is named so.
OF_GPUS = ("nccl-*", "cuda.shm.*", "cuda-*", "cuda_*", "tmp*triton*")


def _pids() -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            yield int(entry.name)


def processes_in(temporary: Path) -> dict[int, str]:
    """Living processes with their TMPDIR at `temporary` or below: command lines by pid."""
    found = {}
    for pid in _pids():
        with contextlib.suppress(OSError):  # ended while we looked, or another user's
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            ours = [each for each in variables if each.startswith(b"TMPDIR=" + os.fsencode(temporary))]
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            if ours and state not in "ZX":
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found[pid] = command.strip()
    return found


def files_in(temporary: Path) -> set[str]:
    """What lies in a job's folder for temporary files, caches aside.

    And wandb's folders aside, which an import makes and a killed process leaves; TRL imports it where it is installed.
    """
    found = (path for path in temporary.iterdir() if not path.name.startswith(LASTING))
    return {str(path) for path in found if not fnmatch(path.name, "tmp*wandb-*") and not _is_of_gpus(path)}


def _is_of_gpus(path: Path) -> bool:
    return any(fnmatch(path.name, pattern) for pattern in OF_GPUS)


def shared_memory_of(pids: Iterable[int]) -> set[Path]:
    """What these processes have mapped in /dev/shm."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                if "/dev/shm/" in line:
                    found.add(Path(line[line.index("/dev/shm/") :].removesuffix(" (deleted)")))
    return found


def orphaned_shared_memory() -> set[str]:
    """Files in /dev/shm that no living process has open or mapped."""
    # By inode: who made a semaphore has it mapped under the temporary name that it had before it was linked in place.
    files = {}
    for path in Path("/dev/shm").iterdir():
        with contextlib.suppress(OSError):
            if not _is_of_gpus(path):
                files[path.stat().st_ino] = str(path)
    for pid in _pids():
        process = Path(f"/proc/{pid}")
        with contextlib.suppress(OSError):
            for mapping in (process / "maps").read_text().splitlines():
                if "/dev/shm/" in mapping:
                    files.pop(int(mapping.split()[4]), None)
            for descriptor in (process / "fd").iterdir():
                if os.readlink(descriptor).startswith("/dev/shm/"):
                    files.pop(descriptor.stat().st_ino, None)
    return set(files.values())


def left_over(temporary: Path, known: set[str], patience_s: float = 15.0) -> set[str]:
    """What a job that has ended left: a line each. Waits for what is just going.

    Args:
        known: files that are not its fault: shared memory that nobody held before it, say.
    """
    deadline = time.monotonic() + patience_s
    while True:
        left = {f"process {pid}: {command}" for pid, command in processes_in(temporary).items()}
        left |= (files_in(temporary) | orphaned_shared_memory()) - known
        if not left or time.monotonic() > deadline:
            return {_with_content(line) for line in left}
        time.sleep(0.2)


def _with_content(line: str) -> str:
    path = Path(line)
    return f"{line}: {sorted(each.name for each in path.iterdir())}" if path.is_dir() else line
