"""Tab of times: parts of a step, and waits."""

import numpy as np

from grpo.ops.report.advice import Figures, percent
from grpo.ops.report.charts import COLOURS, Mark, line_chart, numbers, stacked_chart
from grpo.ops.report.curves import WAITS, Multiples, add_curves, steps_of
from grpo.ops.report.lanes import colour_of
from grpo.ops.report.reading import Run
from grpo.ops.report.shares import of_present_nodes
from grpo.ops.report.thinning import bins_of

MANY_NODES = len(COLOURS)


def step_figures(figures: Figures) -> Multiples:
    """Make all charts of the tab except the lanes."""
    found, run = Multiples(), figures.run
    add_parts(found, figures)
    bins = bins_of(len(run.metrics.steps))
    found.tables["waits"] = steps_of(run.metrics, bins)
    add_tokens(found, run)
    add_curves(found, run.metrics, bins, "waits", WAITS)
    return found


def add_parts(found: Multiples, figures: Figures) -> None:
    parts = figures.parts
    if not len(parts.steps):
        found.absent.append("parts of a step (timeline/)")
        return
    bins = bins_of(len(parts.steps), 300)
    seconds = bins.means(parts.seconds)
    edges = np.concatenate([np.zeros((len(seconds), 1)), np.cumsum(seconds, axis=1)], axis=1)
    columns = found.tables["parts"] = {"step": numbers(parts.steps[bins.starts] + 1)}
    lines = []
    for number, name in enumerate(parts.names):
        columns[name] = numbers(seconds[:, number])
        columns[f"{name}:low"], columns[f"{name}:high"] = numbers(edges[:, number]), numbers(edges[:, number + 1])
        share = parts.shares.get(name, 0.0)
        label = f"{name} {percent(share) if share >= 0.005 else '<1 %'}"
        colour = colour_of(name, parts.names)
        lines.append(Mark(label=label, colour=colour, column=name, low=f"{name}:low", high=f"{name}:high"))
    note = "mean over the nodes' first ranks; with each part its share of all steps"
    found.charts.append(stacked_chart("parts", "Step time by its parts", "s", "parts", lines, columns, note=note))


def add_tokens(found: Multiples, run: Run) -> None:
    """Add one curve per node; with many nodes their mean, and a band."""
    table = of_present_nodes(run, "rollout/tokens_per_s")
    if table is None or not np.isfinite(table).any():
        found.absent.append("tokens/s by node")
        return
    bins = bins_of(len(table), 300)
    columns = found.tables["tokens"] = {"step": numbers(bins.last(run.metrics.steps))}
    if table.shape[1] <= MANY_NODES:
        means = bins.means(table)
        lines = []
        for node in range(table.shape[1]):
            columns[f"node {node}"] = numbers(means[:, node])
            lines.append(Mark(label=f"node {node}", colour=COLOURS[node], column=f"node {node}"))
        note = ""
    else:
        known = np.isfinite(table).any(1)
        for name, of_nodes in (("mean", np.nanmean), ("least", np.nanmin), ("most", np.nanmax)):
            figures = np.full(len(table), np.nan)
            figures[known] = of_nodes(table[known], axis=1)
            columns[name] = numbers(bins.means(figures))
        lines = [Mark(label="mean over nodes", colour=COLOURS[0], column="mean", low="least", high="most")]
        note = "band: slowest to fastest node"
    chart = line_chart("tokens", "Tokens sampled, by node", "tokens/s", "tokens", lines, columns, note=note, height=150)
    found.charts.append(chart)
