"""A run's folder as records. Files may be missing or damaged; `missing` lists these."""

import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from grpo.faults.failure import FailureKind, FailureRecord
from grpo.ops.report.timelines import TimelineArrays, read_timelines
from grpo.record import files

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRecord:
    """One attempt of a run from `run.json`; missing values have their defaults."""

    attempt: int = 0
    job: str = ""
    started: float | None = None
    ended: float | None = None
    """Unix seconds; None while it runs."""
    state: str = ""
    why: str = ""
    from_step: int = 0
    step: int = 0
    failure: FailureRecord | None = None
    restarts: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    arguments: dict[str, Any] = field(default_factory=dict)
    changed: tuple[str, ...] | None = None
    """Arguments with other values than their defaults; None if this was not recorded."""
    versions: dict[str, str] = field(default_factory=dict)
    python: str = ""
    commit: str = ""
    topology: dict[str, Any] = field(default_factory=dict)

    @property
    def has_trained(self) -> bool:
        """True if it has made a step of its own."""
        return self.step > self.from_step


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """`metrics.jsonl`: each step once, in order."""

    steps: np.ndarray  # [S] int64
    times: np.ndarray  # [S] float64, Unix seconds; nan if a line has none
    columns: dict[str, np.ndarray]  # each [S] float64; nan if a step has no such value
    by_node: dict[str, np.ndarray]  # each [S, N] float64

    @property
    def reward_functions(self) -> list[str]:
        """Names of the reward functions, in alphabetical order."""
        parts = (name.split("/") for name in sorted(self.columns))
        return ["/".join(part[1:-1]) for part in parts if len(part) > 2 and (part[0], part[-1]) == ("rewards", "mean")]

    def get(self, name: str) -> np.ndarray | None:
        """Return a column with at least one value; None otherwise."""
        column = self.columns.get(name)
        return None if column is None or not np.isfinite(column).any() else column


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """All records of a run, except its completions."""

    folder: Path
    name: str
    state: str
    """running, finished, stopped or failed; empty if unknown."""
    why: str
    is_requeued: bool
    """True if the job asks to be started again."""
    attempts: tuple[AttemptRecord, ...]
    metrics: Metrics
    timeline: TimelineArrays
    missing: tuple[str, ...]
    """One line for each missing or unreadable file, or part of a file."""

    @property
    def last(self) -> AttemptRecord:
        return self.attempts[-1] if self.attempts else AttemptRecord()

    @property
    def settings(self) -> AttemptRecord:
        """Newest attempt with recorded settings; an attempt that failed before its trainer was built has none."""
        return next((each for each in reversed(self.attempts) if each.arguments or each.topology), self.last)

    @property
    def num_nodes(self) -> int:
        reported = self.settings.topology.get("num_nodes")
        widths = [figures.shape[1] for figures in self.metrics.by_node.values()]
        found = [int(self.timeline.spans.node.max()) + 1] if len(self.timeline.spans) else []
        return reported if isinstance(reported, int) and reported > 0 else max([1, *widths, *found])

    def by_node(self, what: str) -> list[int]:
        """`ranks` or `engines` of each node; [] if unknown."""
        topology = self.settings.topology  # older runs, before nodes could differ, have one number for all
        found = topology.get(f"{what}_by_node") or [topology.get(f"{what}_per_node")] * self.num_nodes
        return found if isinstance(found, list) and all(isinstance(each, int) for each in found) else []

    @property
    def step(self) -> int:
        """Finished optimizer steps."""
        logged = int(self.metrics.steps[-1]) if len(self.metrics.steps) else 0
        return max(logged, self.last.step)

    @property
    def has_ended(self) -> bool:
        return self.state in files.ENDED and not self.is_requeued


def read_run(folder: Path, name: str = "") -> Run:
    """Read the records of a run.

    Raises:
        ValueError: there is no such folder, or it does not hold a run.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder: give a run's output_dir")
    parts = (files.METRICS_FILE, files.HISTORY_FILE, files.STATE_FILE, files.TIMELINE_FOLDER, files.COMPLETIONS_FOLDER)
    if not any((folder / part).exists() for part in parts):
        raise ValueError(f"{folder} holds none of {', '.join(parts)}: give a run's output_dir")
    missing: list[str] = []
    state = read_object(
        folder / files.STATE_FILE, missing, "how the last attempt stands"
    )  # first, so that it is not newer than the rest
    attempts = read_attempts(folder / files.HISTORY_FILE, missing)
    ending = all_typed(state, {"state": attempts[-1].state if attempts else "", "why": ""})
    is_running = ending["state"] == "running"
    metrics = read_metrics(folder / files.METRICS_FILE, missing, is_running=is_running)
    nodes = next((each.topology["num_nodes"] for each in reversed(attempts) if "num_nodes" in each.topology), None)
    timeline = read_timelines(folder, nodes if isinstance(nodes, int) else 0, missing, is_running=is_running)
    begins = sorted(each.started for each in attempts if each.started)
    if begins:
        metrics, timeline = numbered_by(begins, metrics), timeline.numbered_by(begins)
    return Run(
        folder=folder,
        name=name or folder.resolve().name,
        **ending,
        is_requeued=typed(state, "requeue", bool, False),
        attempts=attempts,
        metrics=metrics,
        timeline=timeline,
        missing=tuple(missing),
    )


def typed(content: Any, name: str, kind: type[T], default: T) -> T:
    """Return a value of a JSON object if it has the type, else the default."""
    value = content.get(name) if isinstance(content, dict) else None
    if isinstance(default, float) and isinstance(value, int):  # JSON may write whole seconds without a point
        value = float(value)
    return value if isinstance(value, kind) else default


def all_typed(content: Any, defaults: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a JSON object under these names, as `typed` does: with the type of the default."""
    return {name: typed(content, name, type(default), default) for name, default in defaults.items()}


def read_object(path: Path, missing: list[str], what: str) -> dict[str, Any]:
    """Read a file with one JSON object; {} and a line in `missing` if it is not one."""
    try:
        content = json.loads(path.read_text(errors="replace"))
    except FileNotFoundError:
        missing.append(f"{path.name} is not there: {what} is not known")
        return {}
    except (OSError, ValueError, RecursionError) as error:
        missing.append(f"{path.name} cannot be read ({first_line(error)}): {what} is not known")
        return {}
    if not isinstance(content, dict):
        missing.append(f"{path.name} holds no JSON object: {what} is not known")
        return {}
    return content


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def read_attempts(path: Path, missing: list[str]) -> tuple[AttemptRecord, ...]:
    reported = read_object(path, missing, "what the run was started with, and its failures,")
    found = reported.get("attempts", [])
    if not isinstance(found, list) or (reported and not found):
        missing.append(f"{path.name} lists no attempts")
        return ()
    attempts = [read_attempt(number, each) for number, each in enumerate(found) if isinstance(each, dict)]
    if len(attempts) < len(found):
        missing.append(f"{path.name}: {len(found) - len(attempts)} of {len(found)} attempts cannot be read")
    return tuple(attempts)


def read_attempt(number: int, entry: dict[str, Any]) -> AttemptRecord:
    defaults = {"attempt": number, "from_step": 0, "step": 0, "state": "", "why": "", "arguments": {}, "topology": {}}
    times = all_typed(entry, {"started": -1.0, "ended": -1.0})
    return AttemptRecord(
        **{name: time for name, time in times.items() if time > 0},
        job=str(entry.get("job") or ""),
        python=str(entry.get("python") or ""),
        commit=str(entry.get("commit") or ""),
        restarts=tuple(map(str, typed(entry, "restarts", list, []))),
        command=tuple(map(str, typed(entry, "command", list, []))),
        changed=tuple(map(str, entry["changed"])) if isinstance(entry.get("changed"), list) else None,
        **all_typed(entry, defaults),
        failure=read_failure(entry.get("failure")),
        versions={name: str(version) for name, version in typed(entry, "versions", dict, {}).items()},
    )


def read_failure(entry: Any) -> FailureRecord | None:
    if not isinstance(entry, dict):
        return None
    return FailureRecord(
        **all_typed(entry, {"node": -1, "rank": -1, "host": "?", "phase": "?", "cause": ""}),
        kind=next((kind for kind in FailureKind if kind == entry.get("kind")), FailureKind.MACHINE),
        nodes=tuple(each for each in typed(entry, "nodes", list, []) if isinstance(each, int)),
    )


def read_metrics(path: Path, missing: list[str], *, is_running: bool = False) -> Metrics:
    """Read the metrics. Lines of one step are merged; a later attempt's lines replace an earlier one's."""
    try:
        text = path.read_text(errors="replace")
    except OSError as error:
        why = "is not there" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
        missing.append(f"{path.name} {why}: no curves")
        return metrics_of({})
    lines: dict[int, dict[str, Any]] = {}
    unread = 0
    for number, line in enumerate(raw := text.splitlines()):
        if not line.strip():
            continue
        try:
            content = json.loads(line)
            step = int(content["step"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            unread += not (is_running and number == len(raw) - 1)  # that one is being written
            continue
        before = lines.get(step)
        if before is not None and before.get("attempt") == content.get("attempt"):
            before.update(content)
        else:
            lines[step] = content
    if unread:
        missing.append(f"{path.name}: {unread} line{'s' * (unread > 1)} cannot be read (cut off, or damaged)")
    if not lines:
        missing.append(f"{path.name} holds no step: no curves")
    return metrics_of(lines)


def metrics_of(lines: dict[int, dict[str, Any]]) -> Metrics:
    rows = [lines[step] for step in sorted(lines)]
    names = {name: None for row in rows for name, value in row.items() if type(value) in (int, float)}
    columns = {name: as_numbers([row.get(name) for row in rows]) for name in names}
    by_node = [typed(row, "by_node", dict, {}) for row in rows]
    figures = {name: None for row in by_node for name, value in row.items() if isinstance(value, list)}
    return Metrics(
        steps=np.array(sorted(lines), dtype=np.int64),
        times=columns.get("time", np.full(len(rows), np.nan)),
        columns={name: column for name, column in columns.items() if name not in ("step", "time")},
        by_node={name: node_table([typed(row, name, list, []) for row in by_node]) for name in figures},
    )


def as_numbers(values: list[Any]) -> np.ndarray:
    """Convert to float64; nan for non-numbers."""
    return np.array([each if type(each) in (int, float) else np.nan for each in values], dtype=float)


def numbered_by(begins: list[float], metrics: Metrics) -> Metrics:
    """Number attempts by their start times: a second job in the same folder counts from 0 again."""
    known = np.isfinite(metrics.times)
    if not known.any():
        return metrics
    numbers = np.where(known, np.searchsorted(begins, metrics.times, side="right") - 1.0, np.nan)
    return replace(metrics, columns={**metrics.columns, "attempt": numbers})


def node_table(rows: list[list[Any]]) -> np.ndarray:
    """[S, N], nan if a step has no figure of a node."""
    width = max(map(len, rows), default=0)
    table = np.full((len(rows), width), np.nan)
    for row, figures in enumerate(rows):
        table[row, : len(figures)] = as_numbers(figures)
    return table


def attempt_of_log(path: Path) -> tuple[int, int] | None:
    """Parse node and attempt from the file name of an engine's log."""
    found = re.fullmatch(r"engine-node(\d+)-\d+\.attempt-(\d+)\.log", path.name)
    return (int(found[1]), int(found[2])) if found else None
