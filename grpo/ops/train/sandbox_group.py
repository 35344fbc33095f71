"""A control group for each program: one limit for the memory of all its processes and of its files in memory.

It requires permission to create groups. In version 1 it is below the own group. Version 2 takes limits only with
`memory` in `cgroup.subtree_control`; the kernel does not allow that for a group with processes, except the root. So
there it is below the parent, and not higher: the limits of the job would no longer apply.
"""

import contextlib
import fcntl
import functools
import logging
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from grpo.faults.oom import groups_of, kills_in

PREFIX = "grpo-sandbox-"  # then the id of its process
_REMOVAL_S = 5.0  # killed processes may still be exiting
_TRIAL_S, _TRIAL_BYTES = 30.0, 2**26

_LIMIT = {1: "memory.limit_in_bytes", 2: "memory.max"}
_OF_SOME_KERNELS = {  # swap; and the kill of the whole group, not only of its largest process
    1: {"memory.memsw.limit_in_bytes": "{}"},
    2: {"memory.swap.max": "0", "memory.oom.group": "1"},
}
_COUNTS = {1: "memory.oom_control", 2: "memory.events"}
_ENTRANCES = {1: "tasks", 2: "cgroup.procs"}  # in version 1, the other file waits 10 ms for all processors

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlace:
    """Folder for new groups."""

    folder: Path
    version: int
    """1 or 2."""


@contextlib.contextmanager
def program_group(place: GroupPlace, memory_bytes: int) -> Iterator[Path]:
    """Create a group without processes; yield its folder, and remove it in the end.

    Raises:
        OSError: the kernel refuses the group or its limit.
    """
    with contextlib.ExitStack() as stack:
        for is_last in (False, False, True):
            folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=place.folder))
            stack.callback(_remove, folder)
            try:
                stack.enter_context(_locked(folder))
                set_limits(folder, place.version, memory_bytes)
                break
            except OSError:  # another process may have removed it before it was locked
                if is_last:
                    raise
        yield folder


def set_limits(group: Path, version: int, memory_bytes: int) -> None:
    """Limit memory, and memory with swap if the kernel counts it.

    Raises:
        OSError: the group takes no limit.
    """
    # fails for a folder that is not a control group, instead of creating a file
    (group / _LIMIT[version]).open("r+").close()
    (group / _LIMIT[version]).write_text(str(memory_bytes))
    for name, value in _OF_SOME_KERNELS[version].items():
        if (group / name).exists():
            (group / name).write_text(value.format(memory_bytes))


def entrance(group: Path) -> Path:
    """Return the file to which a single-threaded process writes 0 to join."""
    return next(group / name for name in _ENTRANCES.values() if (group / name).exists())


def is_full(group: Path | None) -> bool:
    """True if a process of the group was killed for lack of memory."""
    return group is not None and any(kills_in(group / name) for name in _COUNTS.values())


@functools.cache
def own_place() -> GroupPlace | None:
    """Find the folder for this process's groups, if permitted; remove groups of ended processes, and log the choice."""
    files = (Path("/proc/self/cgroup"), Path("/proc/self/mountinfo"))
    cgroups, mountinfo = (path.read_text() if path.exists() else "" for path in files)
    place = find_place(cgroups, mountinfo, can_limit=_can_limit)
    if place is None:
        _log.info("programs of the model: memory is limited for each process; no control group can be made for all")
        return None
    _log.info("programs of the model: memory is limited by control groups below %s (v%d)", place.folder, place.version)
    for folder in place.folder.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError), _locked(folder):
            folder.rmdir()
    return place


def find_place(cgroups: str, mountinfo: str, *, can_limit: Callable[[GroupPlace], bool]) -> GroupPlace | None:
    """Return the first place accepted by `can_limit`.

    Args:
        cgroups: `/proc/self/cgroup`.
        mountinfo: `/proc/self/mountinfo`.
        can_limit: returns True if a new group there takes a limit and a process.
    """
    groups = groups_of(cgroups)
    version = 1 if "memory" in groups else 2
    own = PurePosixPath("/", groups.get("memory", groups.get("", "..")))
    for line in mountinfo.splitlines():
        mount, _, file_system = line.partition(" - ")
        root, mounted = mount.split()[3:5]
        kind, _, options = file_system.split()
        is_it = kind == "cgroup2" if version == 2 else kind == "cgroup" and "memory" in options.split(",")
        if not is_it or ".." in own.parts or not own.is_relative_to(root):  # outside the mount
            continue
        folder = Path(mounted, own.relative_to(root))
        folders = [folder, folder.parent] if version == 2 and own != PurePosixPath(root) else [folder]
        for place in (GroupPlace(folder=each, version=version) for each in folders):
            if can_limit(place):
                return place
    return None


def _can_limit(place: GroupPlace) -> bool:
    with contextlib.suppress(OSError, subprocess.SubprocessError), program_group(place, _TRIAL_BYTES) as group:
        enter = ["/bin/sh", "-c", 'echo 0 > "$0"', str(entrance(group))]
        return subprocess.run(enter, stderr=subprocess.DEVNULL, timeout=_TRIAL_S).returncode == 0
    return False


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a group's folder; the lock shows a living creator, in any container.

    Raises:
        OSError: another process holds it, or it is gone.
    """
    number = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(number)


def _remove(folder: Path) -> None:
    until = time.monotonic() + _REMOVAL_S
    while folder.exists():
        try:
            folder.rmdir()
        except OSError as error:
            if time.monotonic() > until:
                _log.warning("the control group %s stays behind: %s; a later job there removes it", folder, error)
                return
            time.sleep(0.002)
