"""Leftovers of earlier jobs on a node: shared memory, engines' folders, and build locks that block every later job.

Reported with the command to remove them; nothing is removed here. Processes of other users are only partly visible, so
only files of this user are judged.
"""

import contextlib
import os
import shlex
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from grpo.ops.doctor.records import Finding

MIB, GIB = 1 << 20, 1 << 30
# Of our engines; of vLLM's CPU workers, Python's shared memory (vLLM's message queues), semaphores, NCCL in a node
_SEGMENTS = ("grpo-engine-*", "sem.grpo-engine-*", "vllm_dist_*", "psm_*", "sem.mp-*", "nccl-*")
_YOUNG_S = 60.0  # its owner may not have opened it yet
_LONGEST_BUILD_S = 900.0  # nvcc takes minutes for DeepSpeed's larger extensions
_SHOWN = 4  # paths per finding


def _age_s(path: Path) -> float:
    return time.time() - path.stat().st_mtime


def _shown(paths: list[Path]) -> str:
    shown = []
    for path in paths[:_SHOWN]:
        with contextlib.suppress(OSError):  # gone meanwhile
            shown.append(f"{path} (of {time.strftime('%d %b, %H:%M', time.localtime(path.stat().st_mtime))})")
    return ", ".join(shown) + (f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else "")


def _remove(paths: list[Path], command: str = "rm") -> str:
    return f"{command} {shlex.join(str(path) for path in paths)}"


# -- shared memory ------------------------------------------------------------------------------------------------


def orphaned_segments(folder: Path) -> list[Path]:
    """Segments of our kinds, of this user, neither mapped nor open in any visible process."""
    orphans: dict[int, Path] = {}
    for pattern in _SEGMENTS:
        for path in folder.glob(pattern):
            with contextlib.suppress(OSError):  # gone meanwhile
                if path.stat().st_uid == os.getuid() and _age_s(path) > _YOUNG_S:
                    orphans[path.stat().st_ino] = path
    for process in Path("/proc").glob("[0-9]*") if orphans else ():
        with contextlib.suppress(OSError):  # ended, or another user's
            # By inode, which psutil does not report: a semaphore's creator has it mapped under its name before it was
            # linked in place.
            for mapping in (process / "maps").read_text().splitlines():
                if f"{folder}/" in mapping:
                    orphans.pop(int(mapping.split()[4]), None)
            for descriptor in (process / "fd").iterdir():
                orphans.pop(descriptor.stat().st_ino, None)
    return sorted(orphans.values())


def check_shared_memory(*, has_gpus: bool, folder: Path = Path("/dev/shm")) -> list[Finding]:
    """Check free space in /dev/shm, used by NCCL's and vLLM's processes of a node, and leftovers of ended jobs."""
    stat = os.statvfs(folder)
    free, size = stat.f_bavail * stat.f_frsize, stat.f_blocks * stat.f_frsize
    findings = []
    if free < GIB:
        message = f"{free / MIB:.0f} of {size / MIB:.0f} MiB free"
        fix = "start the container with --ipc=host or --shm-size=16g (Kubernetes: an emptyDir with medium: Memory at "
        fix += "/dev/shm)"
        make = Finding.fail if has_gpus and free < 128 * MIB else Finding.warn
        findings.append(make("/dev/shm", message, fix))
    if orphans := orphaned_segments(folder):
        held = sum(path.stat().st_size for path in orphans if path.exists())
        message = f"{len(orphans)} segments ({held / MIB:.0f} MiB) that no process here holds: {_shown(orphans)}"
        fix = f"if no other container uses this /dev/shm: {_remove(orphans)}"
        findings.append(Finding.warn("/dev/shm", message, fix))
    message = f"{free / GIB:.1f} of {size / GIB:.1f} GiB free, nothing left in it"
    return findings or [Finding.passed("/dev/shm", message)]


# -- engines' folders ---------------------------------------------------------------------------------------------


def abandoned_engine_folders(folder: Path) -> list[Path]:
    """This user's `grpo-engine-*` in `folder` without a living process that has it in its environment."""
    candidates = []
    for path in folder.glob("grpo-engine-*"):
        with contextlib.suppress(OSError):
            if path.stat().st_uid == os.getuid() and _age_s(path) > _YOUNG_S:
                candidates.append(path)
    for process in psutil.process_iter(["environ"]) if candidates else ():
        # An engine and its processes have the folder as TMPDIR and as GRPO_ENGINE_FOLDER.
        held = (process.info["environ"] or {}).values()  # None for another user's
        candidates = [path for path in candidates if str(path) not in held]
    return sorted(candidates)


def check_engine_folders(folder: Path) -> Finding:
    abandoned = abandoned_engine_folders(folder)
    if not abandoned:
        return Finding.passed("engine folders", f"none abandoned in {folder}")
    message = f"{len(abandoned)} whose engine is gone: {_shown(abandoned)}"
    return Finding.warn("engine folders", message, _remove(abandoned, "rm -r"))


# -- build locks --------------------------------------------------------------------------------------------------


def extension_locks(env: Mapping[str, str], home: Path) -> list[Path]:
    """Lock files of torch's extension builds: <root>/<extension>/lock, under the default root per Python and CUDA."""
    root = Path(env.get("TORCH_EXTENSIONS_DIR") or home / ".cache" / "torch_extensions")
    return sorted([*root.glob("*/lock"), *root.glob("*/*/lock")])


def _is_open_here(path: Path) -> bool:
    found = str(path.resolve())
    processes = psutil.process_iter(["open_files"])
    return any(file.path == found for process in processes for file in process.info["open_files"] or ())


def check_extension_locks(env: Mapping[str, str], home: Path) -> list[Finding]:
    """Check for stale locks: a killed build leaves its lock, and every later job waits for it forever (torch's
    FileBaton)."""
    findings = []
    for lock in extension_locks(env, home):
        try:
            building, age_s = _is_open_here(lock), _age_s(lock)
        except FileNotFoundError:
            continue  # released while we looked
        if building:
            findings.append(Finding.passed("build locks", f"{lock}: a build is running"))
        elif age_s > _LONGEST_BUILD_S:
            message = f"{lock} is {age_s / 60:.0f} minutes old and no process here builds"
            fix = f"{_remove([lock])}, or every job that needs this extension waits without end"
            findings.append(Finding.fail("build locks", message, fix))
        else:
            message = f"{lock} is {age_s:.0f} s old and no process here builds"
            fix = f"unless another node that shares this folder is building: {_remove([lock])}"
            findings.append(Finding.warn("build locks", message, fix))
    return findings or [Finding.passed("build locks", "none")]
