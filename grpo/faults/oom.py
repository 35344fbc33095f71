"""Detection of the kernel's OOM killer, by its own count of killed processes.

A pod has no `dmesg`, and a killed process reports nothing. The count is the control group's (v2: `memory.events`, v1:
`memory.oom_control`), which includes kills for lack of memory on the whole machine; without a control group it is the
machine's (`/proc/vmstat`).
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

_COUNT = "oom_kill"


class OomKills:
    """Count of recent kills: those since the last look but one, so that old kills do not explain new deaths.

    Args:
        pid: a process in the control group to read.
        root: root of the file systems; tests pass another.
    """

    def __init__(self, pid: int, root: Path = Path("/")) -> None:
        self._files = [path for path in _candidates(pid, root) if kills_in(path) is not None][:1]
        self._seen = self._before = self._now()

    def look(self) -> None:
        """Read the count; call it regularly."""
        self._before, self._seen = self._seen, self._now()

    def lately(self) -> int:
        """Number of recently killed processes; 0 without a count."""
        return self._now() - self._before

    def _now(self) -> int:
        return sum(kills_in(path) or 0 for path in self._files)


def _candidates(pid: int, root: Path) -> Iterator[Path]:
    """Candidates for the file with the count, best first."""
    groups: dict[str, str] = {}
    with contextlib.suppress(OSError):
        groups = groups_of((root / f"proc/{pid}/cgroup").read_text())
    mounted = root / "sys/fs/cgroup"
    if "memory" in groups:
        yield mounted / "memory" / groups["memory"] / "memory.oom_control"
        yield mounted / "memory" / "memory.oom_control"  # a container sees its own group as the root
    for unified in (mounted, mounted / "unified"):
        yield unified / groups.get("", "") / "memory.events"
        yield unified / "memory.events"
    yield root / "proc/vmstat"


def groups_of(text: str) -> dict[str, str]:
    """Parse `/proc/PID/cgroup`: path without its first slash by controller; the key "" is version 2's."""
    lines = (line.split(":", 2) for line in text.splitlines())
    return {name: path.lstrip("/") for _, controllers, path in lines for name in controllers.split(",")}


def kills_in(path: Path) -> int | None:
    """Number of processes killed for lack of memory, according to a file; None if it has no count."""
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == _COUNT:
                return int(value)
    return None
