"""Small multiples: the curves of a run, and their tables."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from grpo.ops.report.charts import COLOURS, LIMIT_COLOUR, LOGARITHMIC, Chart, Columns, Mark, line_chart, numbers
from grpo.ops.report.reading import Metrics, Run
from grpo.ops.report.thinning import Bins, bins_of

BLUE, ORANGE = COLOURS[:2]
SMOOTHED = 20  # window of a smoothed curve: the run's points, divided by this


@dataclass(slots=True)
class Multiples:
    """Charts of one tab, added one by one."""

    name: str = "time"
    charts: list[Chart] = field(default_factory=list)
    tables: dict[str, Columns] = field(default_factory=dict)
    absent: list[str] = field(default_factory=list)
    """Metrics absent from the run's logs."""

    def add(self, title: str, unit: str, table: str, lines: Sequence[Mark], *, note: str = "") -> None:
        """Add a chart of curves; their columns must be in the table already."""
        id = f"{self.name}-{len(self.charts)}-{title.lower().replace(' ', '-')}"
        self.charts.append(line_chart(id, title, unit, table, lines, self.tables[table], note=note))


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One chart, defined by its metrics."""

    title: str
    unit: str
    metrics: tuple[tuple[str, str], ...]
    """Name and label of each."""
    limit: str = ""
    is_smoothed: bool = False
    """True for a moving average over a twentieth of the run's logs."""


PROGRESS = (
    Curve(title="Reward", unit="reward", metrics=(("reward", "mean"),), is_smoothed=True),
    Curve(title="Spread of rewards", unit="reward", metrics=(("reward_std", "standard deviation"),)),
    Curve(
        title="Groups with zero std",
        unit="share",
        metrics=(("frac_reward_zero_std", "all completions with the same reward: no advantage"),),
    ),
    Curve(
        title="Completion length",
        unit="tokens",
        metrics=(
            ("completions/length_p50", "median"),
            ("completions/length_p10", "p10"),
            ("completions/length_p90", "p90"),
        ),
    ),
)
POLICY_LAG = Curve(
    title="Age of completions (policy lag)",
    unit="weight syncs or steps",
    metrics=(("rollout/policy_lag", "weight syncs"), ("rollout/policy_lag_steps", "steps")),
)
STABILITY = (
    Curve(title="Entropy", unit="nats", metrics=(("entropy", "of the next token"),)),
    Curve(title="KL to the reference", unit="nats", metrics=(("kl", "per token"),)),
    Curve(
        title="Truncated and clipped",
        unit="share",
        metrics=(
            ("completions/clipped_ratio", "completions, truncated"),
            ("clip_ratio/region_mean", "tokens, clipped by the loss"),
            ("sampling/importance_sampling_ratio/clipped_share", "importance sampling, clipped"),
        ),
    ),
    Curve(
        title="Engine against trainer",
        unit=LOGARITHMIC,
        metrics=(
            ("weight_sync/logprob_gap_mean", "verified tokens, mean"),
            ("weight_sync/logprob_gap_judged", "what is held to the limit"),
            ("sampling/logprob_gap", "trained tokens, mean"),
        ),
        limit="weight_sync/logprob_gap_limit",
    ),
    POLICY_LAG,
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
        title="Weight sync",
        unit="s",
        metrics=(
            ("weight_sync/total_s", "all of it"),
            ("weight_sync/gather_s", "gather"),
            ("weight_sync/send_s", "send and load"),
        ),
    ),
)


def overview(run: Run) -> dict[str, tuple[str, Multiples]]:
    """Return the charts by group, in order, each group with a description of the healthy case."""
    bins = bins_of(len(run.metrics.steps))
    functions = [
        Curve(
            title=f"Reward function {name}",
            unit="reward",
            metrics=((f"rewards/{name}/mean", "mean"),),
            is_smoothed=True,
        )
        for name in run.metrics.reward_functions
        if len(run.metrics.reward_functions) > 1  # a single function is the reward
    ]
    lag = run.metrics.get("rollout/policy_lag")
    has_lag = lag is not None and bool((lag > 0).any())
    shown = [each for each in STABILITY if has_lag or each is not POLICY_LAG]
    progress = Multiples("progress")
    progress.tables["metrics"] = steps_of(run.metrics, bins)
    add_curves(progress, run.metrics, bins, "metrics", [PROGRESS[0], *functions, *PROGRESS[1:]])
    stability = Multiples("stability", tables=progress.tables)
    add_curves(stability, run.metrics, bins, "metrics", shown)
    speed = Multiples("speed")
    add_usages(speed, run)
    return {
        "Progress": (
            "Healthy is: the reward rises, its spread lasts, few groups have zero std, and lengths stay off the limit.",
            progress,
        ),
        "Stability": (
            "Healthy is: entropy falls slowly, KL and gradient norm have no jumps, few tokens are clipped, and "
            "engine and trainer agree.",
            stability,
        ),
        "Speed": (
            "Healthy is: neither ranks nor engines are idle for long. The tab Time says where a step goes.",
            speed,
        ),
    }


def steps_of(metrics: Metrics, bins: Bins) -> Columns:
    return {"step": numbers(bins.last(metrics.steps))}


def add_curves(found: Multiples, metrics: Metrics, bins: Bins, table: str, curves: Sequence[Curve]) -> None:
    """Add curves to a table of `found` that already has its steps."""
    columns = found.tables[table]
    for curve in curves:
        has_band = bins.is_thinned and len(curve.metrics) == 1
        lines = []
        for number, (name, label) in enumerate(curve.metrics):
            if metrics.get(name) is None:
                found.absent.append(name)
                continue
            values = metrics.columns[name]
            means = bins.means(values)
            if curve.unit == LOGARITHMIC:
                means = np.where(means > 0, means, np.nan)
            low, high = _band(values, bins, columns, name) if has_band else ("", "")
            columns.setdefault(name, numbers(means))
            lines.append(Mark(label=label, colour=COLOURS[number], column=name, low=low, high=high))
            if curve.is_smoothed and len(means) > SMOOTHED:
                columns[f"{name}:smooth"] = numbers(smoothed(means))
                lines.append(Mark(label="smoothed", colour=ORANGE, column=f"{name}:smooth"))
        if curve.limit and metrics.get(curve.limit) is not None and lines:
            columns[curve.limit] = numbers(bins.means(metrics.columns[curve.limit]))
            lines.append(Mark(label="limit", colour=LIMIT_COLOUR, column=curve.limit, is_dashed=True))
        if lines:
            found.add(curve.title, curve.unit, table, lines, note="band: least to most" if has_band else "")


def smoothed(values: np.ndarray) -> np.ndarray:
    """Moving average over a twentieth of the points; missing points are skipped."""
    window = np.ones(max(3, len(values) // SMOOTHED))
    known = np.isfinite(values)
    sums = np.convolve(np.where(known, values, 0.0), window, mode="same")
    counts = np.convolve(known, window, mode="same")
    return sums / np.maximum(counts, 1)


def _band(values: np.ndarray, bins: Bins, columns: Columns, name: str) -> tuple[str, str]:
    """Add columns with the minimum and maximum behind each point; return their names."""
    low = f"{name}:low"
    high = f"{name}:high"
    columns[low] = numbers(bins.least(values))
    columns[high] = numbers(bins.most(values))
    return low, high


def add_usages(found: Multiples, run: Run) -> None:
    """Add use and memory of the devices of ranks and engines over the steps."""
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
            lines.append(Mark(label=role, colour=colour, column=column, low=f"{column}:low", high=f"{column}:high"))
        if lines and values is memory and np.isfinite(total).any():
            columns["total"] = [round(float(np.nanmax(total)), 2)] * (len(edges) - 1)
            lines.append(Mark(label="there is", colour=LIMIT_COLOUR, column="total", is_dashed=True))
        if lines:
            found.add(title, unit, "usage", lines, note=note)


def _by_bin(row: np.ndarray, values: np.ndarray, num_bins: int) -> dict[str, np.ndarray]:
    counts, sums = np.bincount(row, minlength=num_bins), np.bincount(row, values, num_bins)
    low, high = np.full(num_bins, np.inf), np.full(num_bins, -np.inf)
    np.minimum.at(low, row, values)
    np.maximum.at(high, row, values)
    empty = np.where(counts > 0, 1.0, np.nan)
    return {"": sums / np.maximum(counts, 1) * empty, ":low": low * empty, ":high": high * empty}
