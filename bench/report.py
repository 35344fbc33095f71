"""What a benchmark has to say: ratios first, then the measured quantities; on the screen and as JSON."""

import argparse
import json
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table

from bench.measured import code_of
from grpo.place.same_everywhere import read_versions
from tools.code_digest import commit

RESULTS = Path(__file__).resolve().parent / "results"
WRITTEN = ("bench/results", "bench/RESULTS.md")  # by benchmarks: no change of the code
WIDTH = 120  # columns where the output is no terminal


class _Spread:
    """Median and range of `values`, one per repetition."""

    __slots__ = ()
    name: str
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError(f"{self.name!r} has no values: it takes at least one repetition")

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure(_Spread):
    """One measured quantity."""

    name: str
    unit: str
    """'s', 'GB/s', 'tokens/s', 'MiB'."""
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio(_Spread):
    """One figure over another, pair by pair over the repetitions."""

    name: str
    values: tuple[float, ...]
    goal: float | None = None
    """The median is to be at least this; None: there is no goal."""

    @property
    def reached(self) -> bool | None:
        return None if self.goal is None else self.median >= self.goal


def ratio(name: str, numerator: Figure, denominator: Figure, goal: float | None = None) -> Ratio:
    """Repetition by repetition, so that what slows the machine down for a while slows both sides of a pair.

    Raises ValueError when the two have not as many repetitions.
    """
    pairs = zip(numerator.values, denominator.values, strict=True)
    return Ratio(name=name, values=tuple(above / below for above, below in pairs), goal=goal)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All that one benchmark found."""

    benchmark: str
    settings: dict[str, Any]
    ratios: tuple[Ratio, ...]
    figures: tuple[Figure, ...]
    notes: tuple[str, ...] = ()
    """Sentences that a reader of the numbers has to know."""

    def print(self) -> None:
        """The table, on standard output."""
        console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False, markup=False)
        settings = ", ".join(f"{name} {value}" for name, value in self.settings.items() if is_plain(value))
        table = Table(title=f"{self.benchmark}: {settings}", title_justify="left", pad_edge=False)
        table.add_column("", overflow="fold")
        for column in ("median", "min .. max", "unit", "goal"):
            table.add_column(column, justify="right", no_wrap=True)
        for of_ratios in self.ratios:
            style = "bold red" if of_ratios.reached is False else "bold"
            table.add_row(of_ratios.name, number(of_ratios.median), spread(of_ratios), "", goal(of_ratios), style=style)
        table.add_section()
        for figure in self.figures:
            table.add_row(figure.name, number(figure.median), spread(figure), figure.unit, "")
        console.print(table)
        for note in self.notes:
            console.print(f"- {note}")
        sys.stdout.flush()

    def write(self, path: Path) -> None:
        """Everything as one JSON object, with the machine, versions, command, date and code; makes the folder."""
        content = {
            "benchmark": self.benchmark,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": shlex.join(["python", *sys.orig_argv[1:]]),
            "commit": commit(*WRITTEN),
            "code": code_of(self.benchmark),
            "machine": machine(),
            "versions": versions(),
            "settings": self.settings,
            "ratios": [_with_statistics(of_ratios) | {"reached": of_ratios.reached} for of_ratios in self.ratios],
            "figures": [_with_statistics(figure) for figure in self.figures],
            "notes": self.notes,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n")


def _with_statistics(measured: Figure | Ratio) -> dict[str, Any]:
    return asdict(measured) | {"median": measured.median, "low": measured.low, "high": measured.high}


def number(value: float) -> str:
    """Three digits that count, and no power of ten where the unit is well chosen: '0.0123', '1.23', '12,345'."""
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:#.3g}".rstrip(".")


def spread(measured: Figure | Ratio) -> str:
    return f"{number(measured.low)} .. {number(measured.high)}" if len(measured.values) > 1 else ""


def goal(of_ratios: Ratio) -> str:
    return "" if of_ratios.goal is None else f">= {of_ratios.goal:g} {'yes' if of_ratios.reached else 'NO'}"


def is_plain(setting: Any) -> bool:
    """Whether a setting goes into the line above a table; all of them are in the JSON."""
    return not isinstance(setting, (dict, list, tuple))


def machine() -> dict[str, Any]:
    """Cores that this process may use, CPU model, memory and GPUs of this machine."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": models[0] if models else platform.machine(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "system": platform.platform(),
    }


def versions() -> dict[str, str]:
    """Of Python, of grpo and of the packages that decide about speed."""
    return {"python": platform.python_version()} | read_versions()


def interleave(variants: Mapping[str, Callable[[], float]], repetitions: int) -> dict[str, list[float]]:
    """A B A B ...: what a drift of the machine does, it does to all. Each callable returns its own seconds."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(repetitions):
        for name, run in variants.items():
            seconds[name].append(run())
    return seconds


def argument_parser(description: str) -> argparse.ArgumentParser:
    """The options that all benchmarks have; a script adds its own, and its own defaults by `set_defaults`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=device)
    parser.add_argument("--repetitions", type=int, default=5, help="of each variant, interleaved")
    parser.add_argument(
        "--short", action="store_true", help="a few seconds of measuring: whether it works, not how fast"
    )
    parser.add_argument(
        "--output", type=Path, help="JSON file (default: in bench/results; with --short the table alone)"
    )
    return parser


def finish(report: Report, args: argparse.Namespace) -> None:
    """Prints the report and writes it to `--output`, else to `bench/results/<benchmark>.json` (`-cuda` on GPUs).

    A short form writes only where `--output` says, and never in the place of a real result.
    """
    common = {"device": args.device, "repetitions": args.repetitions} | ({"short": True} if args.short else {})
    report = replace(report, settings=common | report.settings)
    report.print()
    path = args.output
    if path is None and not args.short:
        path = RESULTS / f"{report.benchmark}{'-cuda' if args.device == 'cuda' else ''}.json"
    if path is not None:
        report.write(path)
