"""Puts a fault into a running job: which processes it takes, by pid, and what is done to them."""

import contextlib
import errno
import json
import os
import signal
import time
from collections.abc import Callable, Collection
from pathlib import Path

import psutil

from tests.faults.matrix import NODES, Cell
from tests.support.contract import STARTUP_S, inner_process, worker_process
from tests.support.launching import Job
from tests.support.left_over import shared_memory_of

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
FILL_BYTES = 1 << 16


def struck_rank(cell: Cell) -> int:
    """The local main of the node that is struck, or the other rank of the only node."""
    return 1 if cell.fault.target == "other" or NODES[cell.layout] == 2 else 0


def rank_pid(marks: Path, rank: int) -> int:
    return json.loads((marks / f"rank-{rank}.json").read_text())["pid"]


def engine_pid(marks: Path, rank: int) -> int:
    return json.loads((marks / f"engine-{rank}-1.json").read_text())["pid"]


def _awaited(find: Callable[[], list[int]]) -> list[int]:
    """What `find` finds: where a checkpoint is being loaded, an engine may be at its imports still."""
    deadline = time.monotonic() + STARTUP_S
    while True:
        try:
            return find()
        except StopIteration:
            assert time.monotonic() < deadline, "vLLM's processes have not begun their work"
            time.sleep(0.05)


def targets(job: Job, marks: Path, cell: Cell) -> list[int]:
    """Pids of the processes that the fault takes."""
    what, rank = cell.fault.target, struck_rank(cell)
    node = 0 if what.endswith(" 0") else NODES[cell.layout] - 1
    match what.removesuffix(" 0"):
        case "host":
            return [engine_pid(marks, rank)]
        case "core":
            return _awaited(lambda: [inner_process(engine_pid(marks, rank)).pid])
        case "worker":
            return _awaited(lambda: [worker_process(engine_pid(marks, rank)).pid])
        case "main" | "other":
            return [rank_pid(marks, rank)]
        case "agent":
            return [job.launchers[node].pid]
        case "node":
            launcher = psutil.Process(job.launchers[node].pid)
            return [each.pid for each in (launcher, *launcher.children(recursive=True))]
    raise ValueError(f"{cell.name}: there is no target {what!r}")


def send(pids: Collection[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def fill(folder: Path) -> None:
    """Until there is no space in the file system of `folder`."""
    with (folder / "filler").open("wb", buffering=0) as filler:
        try:
            while True:
                filler.write(bytes(FILL_BYTES))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise


def seen_by(pid: int, folder: Path) -> Path:
    """A folder in the mounts of process `pid`."""
    return Path(f"/proc/{pid}/root{folder}")


def lose_memory(files: Collection[str]) -> None:
    """What of these is a node's memory goes with the node; other tests look at what is left there, too."""
    for path in files:
        if path.startswith("/dev/shm/"):
            Path(path).unlink(missing_ok=True)


def own_files(pids: Collection[int], temporary: Path) -> set[str]:
    """What goes with a machine and with nobody else: its processes' shared memory, their folders in `temporary`."""
    found = {str(path) for path in temporary.glob("grpo-launch-*")}
    for pid in pids:
        with contextlib.suppress(OSError):
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            folder = Path(next((each[7:].decode() for each in environment if each.startswith(b"TMPDIR=")), "/"))
            if folder.parent == temporary:  # an engine's private one
                found.add(str(folder))
    return found | {str(path) for path in shared_memory_of(pids)}
