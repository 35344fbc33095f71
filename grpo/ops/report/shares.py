"""Shares of a run's time: seconds of each part of each step, waits, and the remaining time."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from grpo.ops import first_and_last
from grpo.ops.report.reading import Run
from grpo.ops.report.timelines import Spans
from grpo.record.timeline import records

# A rank's phases in the order of a step. Other names are users' own.
PARTS = (
    records.WAIT_GENERATE,
    records.SCORE,
    records.OLD_LOGPROBS,
    records.REFERENCE_LOGPROBS,
    records.FORWARD,
    records.BACKWARD,
    records.OPTIMIZER,
    records.SYNC,
    records.VERIFICATION,
    records.SAVE,
    records.EVALUATE,
)
OTHER = "other"
RECENT_LOGS = 100


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Seconds of each part of each step, as a mean over the nodes' local mains."""

    steps: np.ndarray  # [S] int64: finished optimizer steps when it began
    attempts: np.ndarray  # [S] int64
    names: tuple[str, ...]
    seconds: np.ndarray  # [S, P]; `OTHER`: time without a span
    lengths_s: np.ndarray  # [S]: the whole step

    @cached_property
    def shares(self) -> dict[str, float]:
        """Share of each part in the total time of all steps."""
        total = float(self.lengths_s.sum())
        return dict(zip(self.names, (self.seconds.sum(0) / total).tolist(), strict=True)) if total > 0 else {}


def parts_of(spans: Spans, done: int = 0) -> Parts:
    """Compute the parts from the last attempt at each step. Empty without spans of ranks.

    Args:
        done: number of finished steps; later ones are left out. 0: unknown.
    """
    keep = spans.in_lanes("rank ") & ~spans.in_phases(records.START)
    if done:
        keep &= spans.step < done
    if not keep.any():
        none = np.zeros(0, dtype=np.int64)
        return Parts(steps=none, attempts=none, names=(), seconds=np.zeros((0, 0)), lengths_s=np.zeros(0))
    step, attempt = spans.step[keep], spans.attempt[keep]
    steps, row = np.unique(step, return_inverse=True)
    counts = made_last(row, attempt)
    row, index = row[counts], np.flatnonzero(keep)[counts]
    newest = np.zeros(len(steps), dtype=np.int64)
    newest[row] = spans.attempt[index]
    begin, end = spans.begin[index], spans.end[index]

    found = {spans.phases[code] for code in np.unique(spans.phase[index])}
    names = (*(part for part in PARTS if part in found), *sorted(found - {*PARTS, OTHER}), OTHER)
    column = np.array([names.index(phase) if phase in found else 0 for phase in spans.phases])[spans.phase[index]]
    summed = np.bincount(row * len(names) + column, end - begin, len(steps) * len(names)).reshape(-1, len(names))
    pairs = np.unique(row * (spans.node.max() + 1) + spans.node[index])
    seconds = summed / np.bincount(pairs // (spans.node.max() + 1), minlength=len(steps))[:, None]

    first, last = np.full(len(steps), np.inf), np.full(len(steps), -np.inf)
    np.minimum.at(first, row, begin)
    np.maximum.at(last, row, end)
    lengths = last - first
    follows = (np.diff(steps) == 1) & (np.diff(newest) == 0)
    lengths[:-1] = np.where(follows, np.maximum(first[1:] - first[:-1], 0), lengths[:-1])
    seconds[:, -1] = np.maximum(lengths - seconds[:, :-1].sum(1), 0)
    return Parts(steps=steps, attempts=newest, names=names, seconds=seconds, lengths_s=lengths)


def made_last(row: np.ndarray, attempt: np.ndarray) -> np.ndarray:
    """[P] bool: True for spans of the last attempt at their step."""
    newest = np.full(int(row.max()) + 1, -1)
    np.maximum.at(newest, row, attempt)
    return attempt == newest[row]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowest:
    """The node that the others wait for most often."""

    node: int
    share: float
    """Share of the steps in which it was the slowest to generate."""
    ratio: float
    """Ratio of its time to the median of the others, in the median step."""


def slowest_of(run: Run) -> Slowest | None:
    """Return the node that generated longest in most of the logged steps; None with one node, or without complete
    figures."""
    figures = of_present_nodes(run, "rollout/generate_s")
    if figures is None or figures.shape[1] < 2:
        return None
    full = figures[np.isfinite(figures).all(1)]
    if not len(full):
        return None
    node, times = np.unique(np.argmax(full, axis=1), return_counts=True)
    worst = int(node[np.argmax(times)])
    others = np.median(np.delete(full, worst, axis=1), axis=1)
    ratios = full[:, worst] / np.where(others > 0, others, np.nan)
    ratio = float(np.nanmedian(ratios)) if np.isfinite(ratios).any() else 1.0
    return Slowest(node=worst, share=float(times.max() / times.sum()), ratio=ratio)


def of_present_nodes(run: Run, name: str) -> np.ndarray | None:
    """[S, N] a metric by node, for the present number of nodes; nan in steps of attempts with more nodes."""
    table = run.metrics.by_node.get(name)
    if table is None:
        return None
    had_more = np.isfinite(table[:, run.num_nodes :]).any(1)
    return np.where(had_more[:, None], np.nan, table[:, : run.num_nodes])


def mean(run: Run, name: str, recent: int | None = None) -> float | None:
    """Mean of a metric over the logs with it, or over the last `recent` of them; None if no log has it."""
    column = run.metrics.get(name)
    if column is None:
        return None
    values = column[np.isfinite(column)]
    return float(values[-recent:].mean() if recent else values.mean())


def ends(run: Run, name: str) -> tuple[float, float] | None:
    """Mean of a metric over the first steps and over the last ones (`windows`); None if no log has it."""
    column = run.metrics.get(name)
    if column is None:
        return None
    known = np.isfinite(column)
    steps = run.metrics.steps[known].tolist()
    return first_and_last(steps, column[known].tolist(), end=steps[-1])


def maximum(run: Run, name: str) -> float:
    """Largest value of a metric; 0 without any."""
    column = run.metrics.get(name)
    return 0.0 if column is None else float(np.nanmax(column))


def total_steps(run: Run) -> int | None:
    """Return the planned number of steps; None if unknown."""
    arguments = run.settings.arguments
    wanted = arguments.get("max_steps")
    if isinstance(wanted, int) and wanted > 0:
        return wanted
    epochs, epoch = arguments.get("num_train_epochs"), run.metrics.get("epoch")
    if not isinstance(epochs, int | float) or epoch is None:
        return None
    row = np.flatnonzero(np.isfinite(epoch) & (epoch > 0))
    return round(run.metrics.steps[row[-1]] / epoch[row[-1]] * epochs) if len(row) else None


def step_s(run: Run) -> float | None:
    """Seconds of a step: the median of the last ones."""
    seconds, steps = _recent(run)
    return float(np.median(seconds / steps)) if len(steps) else None


def tokens_per_gpu(run: Run) -> float | None:
    """Trained tokens per second, prompts included, for each GPU of ranks and engines (on CPUs: each process)."""
    topology, tokens = run.settings.topology, run.metrics.get("num_tokens")
    of_engines = sum(run.by_node("engines")) * topology.get("tensor_parallel_size", 1)
    if tokens is None or not topology.get("world_size"):
        return None
    devices = topology["world_size"] + of_engines
    seconds, counted = _recent(run, tokens)
    return float(counted.sum() / seconds.sum() / devices) if len(seconds) else None


def _recent(run: Run, counted: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return, for the last logs, the seconds since the previous log and the increase of steps or of `counted`; not
    across attempts."""
    seconds, steps = np.diff(run.metrics.times), np.diff(run.metrics.steps if counted is None else counted)
    usable = np.isfinite(seconds) & (seconds > 0) & np.isfinite(steps)
    attempts = run.metrics.columns.get("attempt")
    if attempts is not None:
        usable &= np.diff(attempts) == 0
    return seconds[usable][-RECENT_LOGS:], steps[usable][-RECENT_LOGS:]


def left_s(run: Run) -> float | None:
    """Return the seconds until the last step at the present speed, with saves and evaluations; None if the run has
    ended or the number is unknown."""
    wanted, (seconds, steps) = total_steps(run), _recent(run)
    if run.has_ended or wanted is None or not len(steps):
        return None
    return max(0, wanted - run.step) * float(seconds.sum() / steps.sum())
