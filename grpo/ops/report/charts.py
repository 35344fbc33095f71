"""Charts as Vega-Lite specifications, made with Altair, and their tables of numbers.

A specification names its fields x0, y0, lo0, hi0 … and holds no data: the page has each table once, and fills them in.
It also has no colours of text or grid; these follow the reader's light or dark mode.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import altair as alt
import numpy as np

# Visible on white and on black, and distinguishable without colour vision as far as possible for this many.
COLOURS = ("#3b82c4", "#e08e2b", "#4f9d52", "#d2554c", "#7c63c8", "#9a6a45", "#c05299", "#2f8f96")
LIMIT_COLOUR = "#8b939c"
FEW_POINTS = 30
WHOLE_STEPS = "datum.value % 1 ? '' : format(datum.value, ',d')"
DIGITS = 5  # of the numbers in the page
LOGARITHMIC = "nats, logarithmic"  # a unit with a logarithmic axis: a small value and its limit are visible together
FROM_ZERO = ("share", "s", "tokens", "GiB", "weight syncs or steps")  # units with an axis from 0
Columns = dict[str, list[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """One curve, or one layer of a stack."""

    label: str
    colour: str
    column: str
    """Column of the table with the displayed value at a step."""
    low: str = ""
    high: str = ""
    """Columns of a band around the curve, or of a layer's edges; empty without one."""
    is_dashed: bool = False
    """True for a limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One chart of the page."""

    id: str
    title: str
    unit: str
    """Unit of the numbers: "s", "share", "nats" …"""
    note: str
    """Meaning of a band or a colour, in a few words."""
    table: str
    lines: tuple[Mark, ...]
    spec: dict[str, Any]
    summary: str = ""
    """Text alternative for readers who cannot see the chart."""
    fields: dict[str, str] = field(default_factory=dict)
    """Names in the specification to columns of the table."""
    width: str = ""
    """"wide" for a chart over the full width."""

    def for_page(self) -> dict[str, Any]:
        """Return the chart's part of the page's data, for its script."""
        lines = [{"label": line.label, "column": line.column, "colour": line.colour} for line in self.lines]
        shown = {"table": self.table, "fields": self.fields, "lines": lines, "unit": self.unit, "title": self.title}
        return {**shown, "spec": self.spec}


def numbers(values: np.ndarray) -> list[Any]:
    """Convert to JSON numbers: few digits, None for NaN and infinity."""
    if np.issubdtype(values.dtype, np.integer):
        return values.tolist()
    return [_short(value) for value in values.tolist()]


def _short(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{DIGITS}g}")
    return int(short) if short.is_integer() else short


def line_chart(
    id: str,
    title: str,
    unit: str,
    table: str,
    lines: Sequence[Mark],
    columns: Columns,
    *,
    note: str = "",
    height: int = 110,
) -> Chart:
    """Make a chart of curves over the steps, with bands if there are any."""
    shape = tuple(
        (line.colour, bool(line.low), line.is_dashed, len(there(columns[line.column])) <= FEW_POINTS) for line in lines
    )
    is_flat = len({value for line in lines for value in there(columns[line.column])}) == 1
    return _chart(id, title, unit, table, lines, columns, note=note, spec=_line_spec(shape, unit, height, is_flat))


def stacked_chart(
    id: str, title: str, unit: str, table: str, lines: Sequence[Mark], columns: Columns, *, note: str = ""
) -> Chart:
    """Make a chart of stacked layers; each line's `low` and `high` are its layer's edges."""
    spec = _stacked_spec(tuple(line.colour for line in lines))
    return _chart(id, title, unit, table, lines, columns, note=note, spec=spec, width="wide")


def _chart(id: str, title: str, unit: str, table: str, lines: Sequence[Mark], columns: Columns, **shown: Any) -> Chart:
    fields = {"x0": "step"}
    for number, line in enumerate(lines):
        fields[f"y{number}"] = line.column
        if line.low:
            fields |= {f"lo{number}": line.low, f"hi{number}": line.high}
    summary = "; ".join(summary_of(line.label, columns["step"], columns[line.column]) for line in lines)
    return Chart(
        id=id, title=title, unit=unit, table=table, lines=tuple(lines), fields=fields, summary=summary, **shown
    )


def there(values: list[Any]) -> list[Any]:
    return [value for value in values if value is not None]


def _axis_y(unit: str, *, is_flat: bool = False) -> alt.Axis:
    """Vega derives the digits from the distance of two ticks; a flat curve has only one tick."""
    shown = {"share": ".3~p", "tokens": ".3~s", "tokens/s": ".3~s"}.get(unit, ".4~g" if is_flat else "")
    return alt.Axis(tickCount=4, title=None, **({"format": shown} if shown else {}))


def _x() -> alt.X:
    return alt.X(
        "x0:Q",
        title=None,
        axis=alt.Axis(tickCount=5, labelExpr=WHOLE_STEPS),
        scale=alt.Scale(nice=False, zero=False),
    )


def _cursor() -> alt.Chart:
    """Cursor at the reader's position: the script sets `at`."""
    opacity = alt.expr("at === null ? 0 : 0.55")
    rule = alt.Chart(alt.NamedData("one")).mark_rule(opacity=opacity, tooltip=None, aria=False)
    return rule.encode(x=alt.value(alt.expr("at === null ? 0 : scale('x', at)")))


@lru_cache
def _line_spec(
    shape: tuple[tuple[str, bool, bool, bool], ...], unit: str, height: int, is_flat: bool
) -> dict[str, Any]:
    rows = alt.Chart(alt.NamedData("rows"))
    layers: list[alt.Chart] = []
    axis, scale = _axis_y(unit, is_flat=is_flat), alt.Scale(zero=unit in FROM_ZERO)
    if unit == LOGARITHMIC:
        axis, scale = alt.Axis(tickCount=4, title=None, format=".0e", grid=False), alt.Scale(type="log")
    for number, (colour, has_band, *_) in enumerate(shape):
        if has_band:
            band = rows.mark_area(color=colour, opacity=0.18, aria=False)
            layers.append(band.encode(x=_x(), y=alt.Y(f"lo{number}:Q", axis=axis, scale=scale), y2=f"hi{number}:Q"))
    for number, (colour, _, is_dashed, is_short) in enumerate(shape):
        look: dict[str, Any] = {"strokeDash": [5, 4]} if is_dashed else {}
        if is_short:  # a line of one point is not seen
            look["point"] = {"color": colour, "size": 22, "filled": True}
        line = rows.mark_line(color=colour, strokeWidth=1.4, aria=False, **look)
        layers.append(line.encode(x=_x(), y=alt.Y(f"y{number}:Q", axis=axis, scale=scale)))
    return finished(layers, height)


@lru_cache
def _stacked_spec(colours: tuple[str, ...]) -> dict[str, Any]:
    rows = alt.Chart(alt.NamedData("rows"))
    layers = [
        rows.mark_area(color=colour, opacity=0.95, interpolate="step", aria=False).encode(
            x=_x(), y=alt.Y(f"lo{number}:Q", axis=_axis_y("s")), y2=f"hi{number}:Q"
        )
        for number, colour in enumerate(colours)
    ]
    return finished(layers, 170)


def finished(layers: list[alt.Chart], height: int) -> dict[str, Any]:
    """Combine layers and the reader's cursor in one specification."""
    at = alt.param(name="at", value=None)
    return specification(alt.layer(*layers, _cursor()).add_params(at), height)


def specification(chart: alt.Chart | alt.LayerChart, height: int) -> dict[str, Any]:
    """Specification of a chart as wide as its container in the page."""
    spec = chart.properties(width="container", height=height).to_dict()
    # the page has its own; `$schema` is an address that the page must not load
    for name in ("$schema", "config", "datasets"):
        spec.pop(name, None)
    return spec


def summary_of(label: str, steps: list[Any], values: list[Any]) -> str:
    """Describe a curve in words."""
    there = [(step, value) for step, value in zip(steps, values, strict=True) if value is not None]
    if not there:
        return f"{label}: no values"
    (first, begin), (last, end) = there[0], there[-1]
    least, most = min(value for _, value in there), max(value for _, value in there)
    return f"{label}: {begin:.4g} at step {first}, {end:.4g} at step {last}, between {least:.4g} and {most:.4g}"
