"""A control group of the kernel's that counts and limits memory; version 1 or 2, whichever is mounted."""

import contextlib
import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path

_numbers = itertools.count()
_ROOT = Path("/sys/fs/cgroup")


class MemoryGroup:
    """Has no limit at first. Raises OSError where none may be made."""

    def __init__(self) -> None:
        self._is_v1 = (_ROOT / "memory").exists()
        root = _ROOT / "memory" if self._is_v1 else _ROOT
        self._folder = root / f"grpo-test-{os.getpid()}-{next(_numbers)}"
        self._folder.mkdir()

    def limit(self, num_bytes: int | None) -> None:
        name, none = ("memory.limit_in_bytes", "-1") if self._is_v1 else ("memory.max", "max")
        (self._folder / name).write_text(none if num_bytes is None else str(num_bytes))

    @property
    def members(self) -> Path:
        """The file that takes a process's pid."""
        return self._folder / "cgroup.procs"

    @property
    def used_bytes(self) -> int:
        """The kernel's cache of files included."""
        return int((self._folder / ("memory.usage_in_bytes" if self._is_v1 else "memory.current")).read_text())

    @property
    def kills(self) -> int:
        """Processes that the kernel's OOM killer has taken."""
        lines = (self._folder / ("memory.oom_control" if self._is_v1 else "memory.events")).read_text().splitlines()
        return int(dict(line.split() for line in lines)["oom_kill"])

    def lift_after_a_kill(self, timeout_s: float) -> None:
        """Those that are left are to have what they want again."""
        deadline = time.monotonic() + timeout_s
        while not self.kills:
            assert time.monotonic() < deadline, f"nothing was killed in {timeout_s:g} s"
            time.sleep(0.05)
        self.limit(None)

    def remove(self, patience_s: float = 10.0) -> None:
        """When its last process is gone, which the kernel notes a moment later."""
        deadline = time.monotonic() + patience_s
        while True:
            try:
                self._folder.rmdir()
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
            else:
                return


@contextlib.contextmanager
def memory_group() -> Iterator[MemoryGroup]:
    group = MemoryGroup()
    try:
        yield group
    finally:
        group.remove()


def eat_all_memory(most_bytes: int = 8 << 30) -> None:
    """Until this process is killed for it, before all others of its group."""
    Path("/proc/self/oom_score_adj").write_text("1000")
    eaten: list[bytes] = []
    while sum(len(each) for each in eaten) < most_bytes:
        eaten.append(b"x" * (64 << 20))
    raise MemoryError(f"{most_bytes} bytes and no limit")
