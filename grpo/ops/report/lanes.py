"""Timeline: lanes of engines and ranks of each node; the whole run as shares, its last steps span by span."""

from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import altair as alt
import numpy as np

from grpo.ops.report.charts import COLOURS, Columns, numbers, specification
from grpo.ops.report.reading import Run
from grpo.ops.report.shares import OTHER, made_last
from grpo.ops.report.timelines import Spans
from grpo.record.timeline import records

MAX_NODES = 16
MAX_SPANS = 12_000  # drawn one by one
MAX_RECTANGLES = 24_000  # of the overview
LAST_STEPS = 50
BRUSH = {"fill": "#808890", "fillOpacity": 0.25, "stroke": "#808890", "strokeOpacity": 1, "strokeWidth": 2}
PHASES = {
    records.GENERATE: "#3b82c4",
    records.WAIT_GENERATE: "#e08e2b",
    records.SCORE: "#c05299",
    records.OLD_LOGPROBS: "#6cb8b1",
    records.REFERENCE_LOGPROBS: "#2f7f86",
    records.FORWARD: "#7fb765",
    records.BACKWARD: "#3f7d3a",
    records.OPTIMIZER: "#a3a63b",
    records.SYNC: "#7c63c8",
    records.VERIFICATION: "#a58be0",
    records.SAVE: "#9a6a45",
    records.EVALUATE: "#6b7a90",
    records.RESTART: "#d2443c",
    records.START: "#98a2ad",
    OTHER: "#bcc3ca",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """Contents of the timeline chart. Times are seconds after `began`."""

    began: float
    """Unix seconds."""
    ended_s: float
    labels: tuple[str, ...]
    """One for each lane, from top to bottom."""
    phases: tuple[str, ...]
    overview: Columns
    """x0, x1, y0, y1, phase: rectangles as high as the phase's share of the time between x0 and x1."""
    detail: Columns
    """The same for single spans, with their step."""
    detail_from_s: float
    first_shown_s: float
    """Beginning of the last `LAST_STEPS` steps."""
    detail_steps: int
    left_out: int
    """Number of nodes left out."""

    def for_page(self) -> dict[str, Any]:
        reported = {each.name: getattr(self, each.name) for each in fields(self)}
        return reported | {
            "colours": [colour_of(phase, self.phases) for phase in self.phases],
            "overview_spec": lane_spec(len(self.labels), 11, True),
            "detail_spec": lane_spec(len(self.labels), 20, False),
        }


def colour_of(phase: str, phases: tuple[str, ...]) -> str:
    """Return a phase's colour; phases named by users get one of the remaining colours."""
    return PHASES.get(phase) or COLOURS[phases.index(phase) % len(COLOURS)]


def lanes_of(run: Run) -> Lanes | None:
    """Lay out the lanes of a run; None without spans."""
    spans = run.timeline.spans
    in_engines, in_ranks = spans.in_lanes("engine "), spans.in_lanes("rank ")
    if not (in_engines | in_ranks).any():
        return None
    nodes = shown_nodes(run)
    keep = (in_engines | in_ranks) & np.isin(spans.node, nodes)
    index = np.flatnonzero(keep)
    lane = 2 * np.searchsorted(nodes, spans.node[index]) + in_ranks[index]
    began = float(spans.begin[index].min())
    ended = float(spans.end[index].max())
    phases = tuple(phase for phase in PHASES if phase in spans.phases)
    phases += tuple(sorted({spans.phases[code] for code in np.unique(spans.phase[index])} - set(phases)))
    phase = np.array([phases.index(each) if each in phases else 0 for each in spans.phases])[spans.phase[index]]
    labels = tuple(f"node {node} {what}" for node in nodes for what in ("engines", "ranks"))
    detail_from, detail_steps, first_shown = detail_range(spans, index)
    return Lanes(
        began=began,
        ended_s=round(ended - began, 2),
        labels=labels,
        phases=phases,
        overview=overview_of(spans, index, lane, phase, (len(labels), len(phases))),
        detail=detail_of(spans, index, lane, phase, began, detail_from),
        detail_from_s=round(detail_from - began, 2),
        first_shown_s=round(first_shown - began, 2),
        detail_steps=detail_steps,
        left_out=len(np.unique(spans.node)) - len(nodes),
    )


def shown_nodes(run: Run) -> list[int]:
    """Return all nodes; if there are too many, the first and the slowest at generation."""
    nodes = [int(node) for node in np.unique(run.timeline.spans.node)]
    if len(nodes) <= MAX_NODES:
        return nodes
    figures = run.metrics.by_node.get("rollout/generate_s")
    taken = dict(enumerate(np.nanmean(figures, axis=0).tolist())) if figures is not None and len(figures) else {}
    slowest = sorted(nodes, key=lambda node: (node != nodes[0], -taken.get(node, 0.0), node))
    return sorted(slowest[:MAX_NODES])


def detail_range(spans: Spans, index: np.ndarray) -> tuple[float, int, float]:
    """Return the time from which spans are drawn one by one, the number of steps from there, and the beginning of the
    last `LAST_STEPS`."""
    steps, row, counts = np.unique(spans.step[index], return_inverse=True, return_counts=True)
    newest = made_last(row, spans.attempt[index])
    begins = np.full(len(steps), np.inf)
    np.minimum.at(begins, row[newest], spans.begin[index][newest])
    # in the order they ran: the newest attempt may not have reached the previous one's steps
    order = np.argsort(begins)
    fits = max(1, int((np.cumsum(counts[order][::-1]) <= MAX_SPANS).sum()))
    whole_run = fits == len(steps)
    begin = float(spans.begin[index].min()) if whole_run else float(begins[order[-fits]])
    return begin, fits, float(begins[order[-min(LAST_STEPS, fits)]])


def overview_of(
    spans: Spans,
    index: np.ndarray,
    lane: np.ndarray,
    phase: np.ndarray,
    size: tuple[int, int],
) -> Columns:
    """Return each phase's share of each time slice, per lane, as stacked rectangles.

    Args:
        index: indices of the spans; `lane` and `phase` belong to them.
        size: (number of lanes, number of phases).
    """
    began = spans.begin[index].min()
    ended = max(spans.end[index].max(), began + 1.0)
    num_lanes, num_phases = size
    pieces = int(np.clip(MAX_RECTANGLES // (num_lanes * 4), 60, 400))
    edges = np.linspace(began, ended, pieces + 1)
    covered = np.zeros((num_lanes, num_phases, pieces))
    groups = lane * num_phases + phase
    order = np.argsort(groups, kind="stable")
    found, starts = np.unique(groups[order], return_index=True)
    for group, members in zip(found, np.split(order, starts[1:]), strict=True):
        chosen = index[members]
        seconds = np.diff(time_until(spans.begin[chosen], spans.end[chosen], edges))
        covered[group // num_phases, group % num_phases] = seconds
    shares = covered / np.diff(edges)
    shares /= np.maximum(shares.sum(1, keepdims=True), 1)  # engines of one node share its lane, and overlap
    top = np.cumsum(shares, axis=1)
    row, which, piece = np.nonzero(shares > 0.004)
    bottom = row + 1 - 0.06 - top[row, which, piece] * 0.88
    return {
        "x0": [round(value, 1) for value in (edges[piece] - began).tolist()],
        "x1": [round(value, 1) for value in (edges[piece + 1] - began).tolist()],
        "y0": [round(value, 3) for value in bottom.tolist()],
        "y1": [round(value, 3) for value in (bottom + shares[row, which, piece] * 0.88).tolist()],
        "phase": which.tolist(),
    }


def time_until(begin: np.ndarray, end: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """[edges] seconds of the spans before each edge."""

    def behind(times: np.ndarray) -> np.ndarray:
        times = np.sort(times)
        sums = np.concatenate([[0.0], np.cumsum(times - edges[0])])
        count = np.searchsorted(times, edges)
        return count * (edges - edges[0]) - sums[count]

    return behind(begin) - behind(end)


def detail_of(
    spans: Spans, index: np.ndarray, lane: np.ndarray, phase: np.ndarray, began: float, begin: float
) -> Columns:
    """Return the spans after `begin`; engines of one node side by side in its lane."""
    keep = spans.end[index] > begin
    index, lane, phase = index[keep], lane[keep], phase[keep]
    in_engines = spans.in_lanes("engine ")[index]
    names = [spans.lanes[code] for code in spans.lane[index]]
    number = np.array([int(name.split()[-1]) if name.split()[-1].isdigit() else 0 for name in names])
    number = np.where(in_engines, number, 0)
    most = np.where(in_engines, int(number.max(initial=0)) + 1, 1)
    return {
        "x0": [round(value, 2) for value in (spans.begin[index] - began).tolist()],
        "x1": [round(value, 2) for value in (spans.end[index] - began).tolist()],
        "y0": numbers(np.round(lane + 0.06 + 0.88 * number / most, 3)),
        "y1": numbers(np.round(lane + 0.06 + 0.88 * (number + 1) / most, 3)),
        "phase": phase.tolist(),
        "step": spans.step[index].tolist(),
    }


@lru_cache
def lane_spec(num_lanes: int, lane_height: int, has_brush: bool) -> dict[str, Any]:
    """Specification of rectangles over time; the page's script fills in labels, colours, and the visible range."""
    params: list[Any] = [alt.param(name=name, value=value) for name, value in (("labels", []), ("from", 0), ("to", 1))]
    scale = alt.Scale(type="utc", nice=False, domainRaw=alt.expr("[from, to]"))
    # Every lane has its label; in the overview every node has one.
    middles = [row + 0.5 for row in range(num_lanes)] if not has_brush else [*range(1, num_lanes, 2)]
    label = "labels[floor(datum.value)]" if not has_brush else "split(labels[datum.value], ' ranks')[0]"
    clock = "utcFormat(datum.value, to - from > 1.7e8 ? '%b %d %H:%M' : to - from > 3e5 ? '%H:%M' : '%H:%M:%S')"
    axis = alt.Axis(values=middles, title=None, grid=False, minExtent=96, ticks=False, domain=False, labelExpr=label)
    tooltip = [
        alt.Tooltip("what:N", title="phase"),
        *(alt.Tooltip(f"{each}:N") for each in ("lane", "step", "seconds")),
    ]
    times = alt.Axis(tickCount=6, grid=False, labelExpr=clock, labelOverlap="greedy")
    rows = alt.Chart(alt.NamedData("rows")).mark_rect(aria=False, clip=True)
    encoded = rows.encode(
        x=alt.X("x0:T", scale=scale, title=None, axis=times),
        x2="x1:T",
        y=alt.Y("y0:Q", scale=alt.Scale(domain=[0, num_lanes], reverse=True, nice=False), axis=axis),
        y2="y1:Q",
        color=alt.Color("phase:N", scale=None, legend=None),
        **({} if has_brush else {"tooltip": tooltip}),
    )
    if has_brush:
        params.append(alt.selection_interval(name="brush", encodings=["x"], mark=alt.BrushConfig(**BRUSH)))
    return specification(encoded.add_params(*params), num_lanes * lane_height)
