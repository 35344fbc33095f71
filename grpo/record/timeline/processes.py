"""What processes on CPUs use, each with its children: an engine's host has its workers under it."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

Key = tuple[int, float]
"""A process: its pid, and when it began, for pids come again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFigures:
    busy: float | None
    """Processor seconds for each second since the reading before; None in the first."""
    memory_bytes: int
    """Resident; what processes share counts in each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    time: float
    root: Key
    cpu_s: dict[Key, float]


class Processes:
    """Reads trees of processes by name, and remembers the last reading of each. For one thread."""

    def __init__(self) -> None:
        self._last: dict[str, _Reading] = {}

    def read(self, pids: Mapping[str, int]) -> dict[str, ProcessFigures]:
        """By name, with all processes below those named, but for those below another one that is named.

        A process that ends in between is left out: from the next reading on, or from this one.
        """
        trees = {name: tree for name, pid in pids.items() if (tree := _tree(pid))}
        told = {}
        for name, tree in trees.items():
            below = {
                pid for other in trees.values() if other[0].pid in {each.pid for each in tree[1:]} for pid in other
            }
            if (figures := self._read(name, [each for each in tree if each not in below])) is not None:
                told[name] = figures
        self._last = {name: reading for name, reading in self._last.items() if name in told}
        return told

    def _read(self, name: str, tree: list[psutil.Process]) -> ProcessFigures | None:
        now, memory_bytes = time.time(), 0
        cpu_s: dict[Key, float] = {}
        for process in tree:
            try:
                with process.oneshot():
                    times, memory = process.cpu_times(), process.memory_info()
                    cpu_s[process.pid, process.create_time()] = times.user + times.system
                memory_bytes += memory.rss
            except psutil.Error:  # it has ended
                continue
        root = next(iter(cpu_s), None)
        if root is None or root[0] != tree[0].pid:
            return None
        before = self._last.get(name)
        self._last[name] = _Reading(time=now, root=root, cpu_s=cpu_s)
        return ProcessFigures(busy=_busy(before, self._last[name]), memory_bytes=memory_bytes)


def _tree(pid: int) -> list[psutil.Process]:
    """A process and all below it; empty when it is gone."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []


def _busy(before: _Reading | None, now: _Reading) -> float | None:
    if before is None or before.root != now.root or now.time <= before.time:
        return None
    used = 0.0
    for key, cpu_s in now.cpu_s.items():
        if key in before.cpu_s:
            used += cpu_s - before.cpu_s[key]
        elif key[1] >= before.time:  # else it has come from elsewhere: what it did there is not of this tree
            used += cpu_s
    return max(used, 0.0) / (now.time - before.time)
