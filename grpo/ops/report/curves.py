"""The small multiples: which curves a run has, and the tables behind them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from grpo.ops.report.charts import COLOURS, LIMIT_COLOUR, Chart, Columns, Line, line_chart, numbers
from grpo.ops.report.reading import Metrics, Run
from grpo.ops.report.thinning import Bins, bins_of

BLUE, ORANGE = COLOURS[:2]


@dataclass(slots=True)
class Multiples:
    """Figures of one tab, filled one by one."""

    charts: list[Chart] = field(default_factory=list)
    tables: dict[str, Columns] = field(default_factory=dict)
    absent: list[str] = field(default_factory=list)
    """Metrics that the run has not logged."""

    def add(self, title: str, unit: str, table: str, lines: Sequence[Line], *, note: str = "") -> None:
        """A figure of curves whose columns are in that table already."""
        id = f"{len(self.charts)}-{title.lower().replace(' ', '-')}"
        self.charts.append(line_chart(id, title, unit, table, lines, self.tables[table], note=note))


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A figure by the metrics that it shows."""

    title: str
    unit: str
    metrics: tuple[tuple[str, str], ...]
    """Name and label of each."""
    spread: str = ""
    """The metric of a standard deviation around the first."""
    limit: str = ""


LEARNING = (
    Curve(title="Reward", unit="reward", metrics=(("reward", "mean"),), spread="reward_std"),
    Curve(
        title="Groups without spread",
        unit="share",
        metrics=(("frac_reward_zero_std", "all completions with the same reward"),),
    ),
    Curve(title="Entropy", unit="nats", metrics=(("entropy", "of the next token"),)),
    Curve(title="KL to the reference", unit="nats", metrics=(("kl", "per token"),)),
    Curve(
        title="Completion length",
        unit="tokens",
        metrics=(
            ("completions/length_p50", "median"),
            ("completions/length_p10", "p10"),
            ("completions/length_p90", "p90"),
        ),
    ),
    Curve(
        title="Clipped and masked",
        unit="share",
        metrics=(
            ("completions/clipped_ratio", "completions at their longest"),
            ("clip_ratio/region_mean", "tokens, by the loss"),
            ("sampling/importance_sampling_ratio/clipped_share", "importance sampling"),
        ),
    ),
    Curve(
        title="Log-probability gap",
        unit="nats",
        metrics=(
            ("push/logprob_gap_mean", "verified tokens, mean"),
            ("push/logprob_gap_judged", "what is held to the limit"),
            ("sampling/logprob_gap", "trained tokens, mean"),
        ),
        limit="push/logprob_gap_limit",
    ),
    Curve(
        title="Policy lag",
        unit="pushes or steps",
        metrics=(("rollout/policy_lag", "pushes"), ("rollout/policy_lag_steps", "steps")),
    ),
    Curve(title="Gradient norm", unit="norm", metrics=(("grad_norm", "before clipping"),)),
    Curve(title="Loss", unit="loss", metrics=(("loss", "mean"),)),
)
WAITS = (
    Curve(
        title="Idle and waiting",
        unit="share",
        metrics=(("rollout/wait_share", "ranks wait for engines"), ("engine/idle_share", "engines idle")),
    ),
    Curve(
        title="Push",
        unit="s",
        metrics=(("push/total_s", "all of it"), ("push/gather_s", "gather"), ("push/send_s", "send and load")),
    ),
)


def learning(run: Run) -> Multiples:
    """How the policy does, and what its devices do."""
    found = Multiples()
    bins = bins_of(len(run.metrics.steps))
    found.tables["metrics"] = steps_of(run.metrics, bins)
    functions = [
        Curve(
            title=f"Reward function {name}",
            unit="reward",
            metrics=((f"rewards/{name}/mean", "mean"),),
            spread=f"rewards/{name}/std",
        )
        for name in run.metrics.reward_functions
    ]
    add_curves(found, run.metrics, bins, "metrics", [LEARNING[0], *functions, *LEARNING[1:]])
    add_usages(found, run)
    return found


def steps_of(metrics: Metrics, bins: Bins) -> Columns:
    return {"step": numbers(bins.last(metrics.steps))}


def add_curves(found: Multiples, metrics: Metrics, bins: Bins, table: str, curves: Sequence[Curve]) -> None:
    """Into that table of `found`, which has its steps already."""
    columns = found.tables[table]
    for curve in curves:
        lines, note = [], ""
        for number, (name, label) in enumerate(curve.metrics):
            if metrics.get(name) is None:
                found.absent.append(name)
                continue
            low, high, band = _band(curve, metrics, bins, columns, name) if number == 0 else ("", "", "")
            note = note or band
            columns.setdefault(name, numbers(bins.means(metrics.columns[name])))
            lines.append(Line(label=label, colour=COLOURS[number], column=name, low=low, high=high))
        if curve.limit and metrics.get(curve.limit) is not None and lines:
            columns[curve.limit] = numbers(bins.means(metrics.columns[curve.limit]))
            lines.append(Line(label="limit", colour=LIMIT_COLOUR, column=curve.limit, is_dashed=True))
        if lines:
            found.add(curve.title, curve.unit, table, lines, note=note)


def _band(curve: Curve, metrics: Metrics, bins: Bins, columns: Columns, name: str) -> tuple[str, str, str]:
    """Columns of the band around a curve: its spread, or the least and most of what one point stands for.

    Returns: their names, and what the band is; empty where there is none.
    """
    low, high, told = f"{name}:low", f"{name}:high", "band: least to most"
    middle = metrics.columns[name]
    spread = metrics.get(curve.spread) if curve.spread else None
    if spread is not None:
        lower, upper, told = bins.means(middle - spread), bins.means(middle + spread), "band: one standard deviation"
    elif bins.is_thinned and len(curve.metrics) == 1:
        lower, upper = bins.least(middle), bins.most(middle)
    else:
        return "", "", ""
    columns[low], columns[high] = numbers(lower), numbers(upper)
    return low, high, told


def add_usages(found: Multiples, run: Run) -> None:
    """What ranks' and engines' devices do and hold, over the steps."""
    usages, metrics = run.timeline.usages, run.metrics
    known = np.isfinite(metrics.times)
    if not len(usages) or not known.any():
        found.absent.append("use of devices (timeline/)")
        return
    steps = np.interp(usages.time, metrics.times[known], metrics.steps[known])
    edges = np.linspace(metrics.steps[0], metrics.steps[-1] + 1, min(240, len(metrics.steps)) + 1)
    row = np.clip(np.searchsorted(edges, steps, side="right") - 1, 0, len(edges) - 2)
    columns = found.tables["usage"] = {"step": numbers(np.floor(edges[:-1]).astype(np.int64))}
    devices = "GPUs" if run.settings.topology.get("has_gpus", True) else "processes"
    memory, total = usages.memory_bytes / 2**30, usages.memory_total_bytes / 2**30
    for title, unit, values, note in (
        (f"Use of {devices}", "share", usages.busy, "band: least to most busy device"),
        (f"Memory of {devices}", "GiB", memory, "band: least to fullest device"),
    ):
        lines = []
        for role, chosen, colour in (("ranks", ~usages.is_engine, BLUE), ("engines", usages.is_engine, ORANGE)):
            seen = chosen & np.isfinite(values)
            if not seen.any():
                continue
            column = f"{role}:{unit}"
            for suffix, figures in _by_bin(row[seen], values[seen], len(edges) - 1).items():
                columns[column + suffix] = numbers(figures)
            lines.append(Line(label=role, colour=colour, column=column, low=f"{column}:low", high=f"{column}:high"))
        if lines and values is memory and np.isfinite(total).any():
            columns["total"] = [round(float(np.nanmax(total)), 2)] * (len(edges) - 1)
            lines.append(Line(label="there is", colour=LIMIT_COLOUR, column="total", is_dashed=True))
        if lines:
            found.add(title, unit, "usage", lines, note=note)


def _by_bin(row: np.ndarray, values: np.ndarray, num_bins: int) -> dict[str, np.ndarray]:
    counts, sums = np.bincount(row, minlength=num_bins), np.bincount(row, values, num_bins)
    low, high = np.full(num_bins, np.inf), np.full(num_bins, -np.inf)
    np.minimum.at(low, row, values)
    np.maximum.at(high, row, values)
    empty = np.where(counts > 0, 1.0, np.nan)
    return {"": sums / np.maximum(counts, 1) * empty, ":low": low * empty, ":high": high * empty}
