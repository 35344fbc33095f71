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
        self._files = [path for path in _candidates(pid, root) if _count_in(path) is not None][:1]
        self._seen = self._before = self._now()

    def look(self) -> None:
        """From time to time."""
        self._before, self._seen = self._seen, self._now()

    def lately(self) -> int:
        """Number of processes that it has taken; 0 where there is no count."""
        return self._now() - self._before

    def _now(self) -> int:
        return sum(_count_in(path) or 0 for path in self._files)


def _candidates(pid: int, root: Path) -> Iterator[Path]:
    """Files that may hold the count, the best one first."""
    groups: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in (root / f"proc/{pid}/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            groups |= dict.fromkeys(controllers.split(","), path.lstrip("/"))
    mounted = root / "sys/fs/cgroup"
    if "memory" in groups:
        yield mounted / "memory" / groups["memory"] / "memory.oom_control"
        yield mounted / "memory" / "memory.oom_control"  # a container sees its own group as the root of all
    for unified in (mounted, mounted / "unified"):
        yield unified / groups.get("", "") / "memory.events"
        yield unified / "memory.events"
    yield root / "proc/vmstat"


def _count_in(path: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == _COUNT:
                return int(value)
    return None
