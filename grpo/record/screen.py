"""Output of a run on rank 0's screen: placement at the start, a summary at the end."""

import contextlib
import errno
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from tqdm.auto import tqdm  # type: ignore[import-untyped]

from grpo.place.launch import read_launch
from grpo.place.log import LOGS_FOLDER, UnlockedHandler, start_log
from grpo.place.topology import NodeTopology
from grpo.record.files import METRICS_FILE

_bar_console: Console | None = None


class Screen(UnlockedHandler):
    """Log handler for the screen: INFO of rank 0, and records of other ranks marked for it; see `grpo.place.log`."""

    def __init__(self, rank: int) -> None:
        super().__init__(logging.INFO)
        self._rank = rank

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "on_screen", self._rank == 0):
            say(record.getMessage())


_screen: Screen | None = None


def show_log(level: int | None = None) -> None:
    """Collect this rank's log records, and show those for users on the screen. Call again to set another level.

    Args:
        level: as for `start_log`.
    """
    global _screen
    start_log(level)
    if _screen is None:
        try:
            rank = read_launch(os.environ).rank
        except ValueError:  # reported when the launch is checked
            rank = 0
        _screen = Screen(rank)
        logging.getLogger("grpo").addHandler(_screen)


def print_above(console: Console | None) -> None:
    """Let `say` print above the bar drawn on this console, until the next call."""
    global _bar_console
    _bar_console = console


def say(*lines: str) -> None:
    """Print lines beside a progress bar, not into it. From any thread; a closed or full screen does not fail the
    job."""
    try:
        for line in lines:
            if (console := _bar_console) is not None:
                console.print(f"[grpo] {line}", markup=False, highlight=False, soft_wrap=True)
            elif sys.stdout is not None:  # None if the process started without one
                tqdm.write(f"[grpo] {line}")
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        if error.errno == errno.EPIPE:
            _write_to_nobody()
    except ValueError:  # a closed file
        sys.stdout = None  # print takes None for no screen


def _write_to_nobody() -> None:
    """Redirect standard output to /dev/null once its reader is gone: later prints, and Python's exit, would fail."""
    with open(os.devnull, "w") as nobody, contextlib.suppress(OSError, ValueError):
        os.dup2(nobody.fileno(), sys.stdout.fileno())


def placement_lines(topology: NodeTopology, output_dir: Path, *, model: str) -> list[str]:
    """Lines about placement: GPUs and hosts of this node's ranks and engines, and the number of the others."""
    nodes, engines = _count(topology.num_nodes, "node"), _count(topology.num_engines, "engine")
    ranks = _span("rank", [str(rank) for rank in topology.node_ranks])
    if topology.devices:
        trained_on = _span("GPU", topology.devices[: topology.local_world_size])
        served_on = _span("GPU", topology.reserved_devices)
        where = f"{ranks} on {trained_on}, {engines} on {served_on}"
    else:
        where = f"{ranks} and {engines} on its CPUs"
    others = f", and so on the others; {_count(topology.world_size, 'rank')} in all" if topology.num_nodes > 1 else ""
    if len({*zip(topology.ranks_by_node, topology.engines_by_node, strict=True)}) > 1:
        others = f"; of all nodes {_sum(topology.ranks_by_node)} ranks, {_sum(topology.engines_by_node)} engines"
    return [
        f"{nodes}; on {topology.host}: {where}{others}",
        f"model: {model}; the run's folder: {output_dir} (the engines' logs: {output_dir / LOGS_FOLDER})",
    ]


def closing_lines(log_history: Sequence[Mapping[str, Any]], output_dir: Path, *, first_step: int) -> list[str]:
    """Lines about the result: steps, seconds, first and last reward, and the locations of files.

    Args:
        first_step: steps done by earlier attempts; the seconds are this one's.
    """
    totals = next((log for log in reversed(log_history) if "train_runtime" in log), None)
    # TRL logs None without any reward
    rewards = [log["reward"] for log in log_history if log.get("reward") is not None]
    lines = []
    if totals is not None:
        reward = f", reward {rewards[0]:.3f} at first, {rewards[-1]:.3f} at last" if rewards else ""
        steps = _count(totals["step"], "step")
        done = f"{steps}, the last {totals['step'] - first_step} of them" if first_step else steps
        lines.append(f"done: {done} in {totals['train_runtime']:.0f} s{reward}")
    logs = output_dir / LOGS_FOLDER
    engines = f", the engines' logs in {logs}" if logs.exists() else ""
    lines.append(f"every step's metrics are in {output_dir / METRICS_FILE}{engines}")
    return lines


def _sum(counts: Sequence[int]) -> str:
    """Join as '7 + 6'."""
    return " + ".join(map(str, counts))


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _span(what: str, names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"{what} {names[0]}"
    if names[0].isdigit() and list(names) == [str(int(names[0]) + index) for index in range(len(names))]:
        return f"{what}s {names[0]}-{names[-1]}"
    return f"{what}s {', '.join(names)}"
