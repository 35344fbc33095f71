"""The processes that this one has started, and those that they have: found by descent, whatever sessions they are in.

`adopt` makes it the parent of whatever loses its own, so that no process leaves the tree. Reads /proc; needs no psutil.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import time
from pathlib import Path

from tests.support.left_over import shared_memory_of

_PR_SET_CHILD_SUBREAPER = 36


def adopt() -> None:
    """From now on orphans below this process become its children, until it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants() -> dict[int, str]:
    """Their states, as in /proc/PID/stat, by pid; `Z` has ended and waits for its parent."""
    children: dict[int, list[tuple[int, str]]] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # ended while we looked
            if entry.name.isdigit():
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                children.setdefault(int(parent), []).append((int(entry.name), state))
    found: dict[int, str] = {}
    above = [os.getpid()]
    while above:
        for pid, state in children.get(above.pop(), ()):
            found[pid] = state
            above.append(pid)
    return found


def bury(spared: int) -> None:
    """Take the exit codes of ended children that were adopted; that of `spared` is its starter's."""
    for pid, state in descendants().items():
        if state == "Z" and pid != spared:
            with contextlib.suppress(ChildProcessError):  # not a child, but a child's
                os.waitpid(pid, os.WNOHANG)


def end_descendants(spared: int, patience_s: float = 60.0) -> list[int]:
    """Kill them all, and remove the shared memory and temporary folders of jobs that they held.

    Args:
        spared: the child whose exit code is not to be taken. It is killed like the others.

    Returns:
        Those that are still there: a process that is stuck in a driver cannot be killed.
    """
    deadline = time.monotonic() + patience_s
    memory: set[Path] = set()
    folders: set[Path] = set()
    while living := [pid for pid, state in descendants().items() if state not in "ZX"]:
        if time.monotonic() > deadline:
            break
        memory |= shared_memory_of(living)
        folders |= _folders_of_jobs(living)
        for pid in living:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
        bury(spared)
    for path in memory:
        path.unlink(missing_ok=True)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    return living


def _folders_of_jobs(pids: list[int]) -> set[Path]:
    """Their TMPDIR, where `launching.start` has made it."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for each in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                if each.startswith(b"TMPDIR=/tmp/job-"):
                    found.add(Path("/tmp", Path(os.fsdecode(each[len(b"TMPDIR=") :])).parts[2]))
    return found
