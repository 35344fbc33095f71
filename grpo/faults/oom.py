"""Whether the kernel's OOM killer was it: its own count of the processes that it has taken.

A pod has no `dmesg`, and a process that was killed says nothing. The count is the control group's (v2: `memory.events`,
v1: `memory.oom_control`), which also counts what a want of memory on the whole machine has taken of it; without one it
is the machine's (`/proc/vmstat`).
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

_COUNT = "oom_kill"


class OomKills:
    """Counts since the look before the last one, so that what was long ago is not taken for the cause of something new.

    Args:
        pid: of a process whose control group is looked at.
        root: of the file systems; another one in tests.
    """

    def __init__(self, pid: int, root: Path = Path("/")) -> None:
        self._files = [path for path in _candidates(pid, root) if kills_in(path) is not None][:1]
        self._seen = self._before = self._now()

    def look(self) -> None:
        """From time to time."""
        self._before, self._seen = self._seen, self._now()

    def lately(self) -> int:
        """Number of processes that it has taken; 0 where there is no count."""
        return self._now() - self._before

    def _now(self) -> int:
        return sum(kills_in(path) or 0 for path in self._files)


def _candidates(pid: int, root: Path) -> Iterator[Path]:
    """Files that may hold the count, the best one first."""
    groups: dict[str, str] = {}
    with contextlib.suppress(OSError):
        groups = groups_of((root / f"proc/{pid}/cgroup").read_text())
    mounted = root / "sys/fs/cgroup"
    if "memory" in groups:
        yield mounted / "memory" / groups["memory"] / "memory.oom_control"
        yield mounted / "memory" / "memory.oom_control"  # a container sees its own group as the root of all
    for unified in (mounted, mounted / "unified"):
        yield unified / groups.get("", "") / "memory.events"
        yield unified / "memory.events"
    yield root / "proc/vmstat"


def groups_of(text: str) -> dict[str, str]:
    """Paths of the control groups in `/proc/PID/cgroup`, without their first slash, by controller; "": version 2's."""
    lines = (line.split(":", 2) for line in text.splitlines())
    return {name: path.lstrip("/") for _, controllers, path in lines for name in controllers.split(",")}


def kills_in(path: Path) -> int | None:
    """How many processes a file says that were killed for want of memory; None where it does not say."""
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == _COUNT:
                return int(value)
    return None
