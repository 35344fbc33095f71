"""What processes on CPUs use, each with its children: an engine's host has its workers under it."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFigures:
    busy: float | None
    """Processor seconds for each second since the reading before, of processes that were there; None in the first."""
    memory_bytes: int
    """Resident; what processes share counts in each."""


class Processes:
    """Reads trees of processes by name, and remembers the processes of the last reading. For one thread."""

    def __init__(self) -> None:
        self._known: dict[psutil.Process, psutil.Process] = {}

    def read(self, pids: Mapping[str, int]) -> dict[str, ProcessFigures]:
        """By name, with all processes below those named, but for those below another one that is named.

        A process that ends in between is left out: from the next reading on, or from this one.
        """
        trees = {name: tree for name, pid in pids.items() if (tree := _tree(pid))}
        figures = {}
        seen: dict[psutil.Process, psutil.Process] = {}
        for name, tree in trees.items():
            below = {each for other in trees.values() if other[0] in tree[1:] for each in other}
            own = [self._known.get(each, each) for each in tree if each not in below]
            with contextlib.suppress(psutil.Error):  # its first process has ended
                figures[name] = self._figures(own)
                seen |= {each: each for each in own}
        self._known = seen
        return figures

    def _figures(self, tree: list[psutil.Process]) -> ProcessFigures:
        is_known = tree[0] in self._known
        percents, memory_bytes = [], 0
        for process in tree:
            try:
                percents.append(process.cpu_percent())  # since it was asked last, by this object; at first 0
                memory_bytes += process.memory_info().rss
            except psutil.Error:
                if process is tree[0]:
                    raise
        return ProcessFigures(busy=sum(percents) / 100 if is_known else None, memory_bytes=memory_bytes)


def _tree(pid: int) -> list[psutil.Process]:
    """A process and all below it; empty when it is gone."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []
