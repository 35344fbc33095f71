"""`write_report`: one run, or several, as one self-contained HTML file that opens from disk."""

import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import vl_convert

from grpo import __version__
from grpo.ops.report import lanes as timeline
from grpo.ops.report.advice import figures_of, percent
from grpo.ops.report.compare import MAX_RUNS, compare, text_of
from grpo.ops.report.completions import read_completions
from grpo.ops.report.curves import Multiples, overview
from grpo.ops.report.failures import deaths_of, failures_of
from grpo.ops.report.reading import Run, read_run
from grpo.ops.report.shares import parts_of
from grpo.ops.report.steps import step_figures
from grpo.ops.report.symptoms import code
from grpo.ops.report.thinning import bins_of
from grpo.ops.report.verdict import verdict_of
from grpo.record.durable import write_atomically

FILES = Path(__file__).parent


def write_report(runs: Sequence[Path], out: Path) -> list[Run]:
    """Write the page of a run, or the comparison of two to eight. `out` appears whole or not at all.

    Returns:
        The runs as read.

    Raises:
        ValueError: a folder does not hold a run, or there are too many runs.
        OSError: `out` cannot be written.
    """
    if not 1 <= len(runs) <= MAX_RUNS:
        raise ValueError(f"{len(runs)} runs are given: a page holds 1 to {MAX_RUNS}")
    if len({run.resolve() for run in runs}) < len(runs):
        raise ValueError("a run is given twice: name each once")
    read = [read_run(run, name) for run, name in zip(runs, names_of(runs), strict=True)]
    if not out.absolute().parent.is_dir():
        raise ValueError(f"{out.absolute().parent} is no folder: make it, or set another --out")
    html = page_of_run(read[0]) if len(read) == 1 else page_of_runs(read)
    write_atomically(out, html)
    return read


def names_of(runs: Sequence[Path]) -> list[str]:
    """Return the folders' names, with enough parents to be unique."""
    parts = [run.resolve().parts for run in runs]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-count:]) for each in parts]
        if len(set(names)) == len(names):
            break
    return names


def page_of_run(run: Run) -> str:
    missing = list(run.missing)
    figures = figures_of(run, parts_of(run.timeline.spans, run.step))
    verdict, steps, groups = verdict_of(figures), step_figures(figures), overview(run)
    lanes, browser = timeline.lanes_of(run), read_completions(run.folder, missing)
    failures, deaths = failures_of(run), deaths_of(run)
    data = page_data([steps, *(part for _, part in groups.values())])
    data |= {"lanes": lanes.for_page() if lanes else None, "completions": browser.for_page() if browser else None}
    count = len(failures) + len(deaths)
    tabs = {"overview": "Overview", "time": "Time", "completions": "Completions"}
    tabs |= {"failures": f"Failures ({count})" if count else "Failures", "setup": "Setup"}
    phases = [(each, timeline.colour_of(each, lanes.phases)) for each in lanes.phases] if lanes else []
    return render(
        "page.html.jinja",
        data,
        run=run,
        verdict=verdict,
        missing=missing,
        lanes=lanes,
        phases=phases,
        last_steps=min(timeline.LAST_STEPS, lanes.detail_steps) if lanes else 0,
        steps=steps,
        groups=groups,
        browser=browser,
        failures=failures,
        deaths=deaths,
        setup=setup_of(run),
        tabs=list(tabs.items()),
        thinned=thinned_note([run]),
    )


def page_of_runs(runs: Sequence[Run]) -> str:
    comparison = compare(runs)
    return render(
        "compare.html.jinja",
        page_data([comparison.curves]) | {"lanes": None, "completions": None},
        comparison=comparison,
        missing=[f"{run.name}: {line}" for run in runs for line in run.missing],
        tabs=[("curves", "Curves"), ("settings", "Settings")],
        thinned=thinned_note(runs),
    )


def thinned_note(runs: Sequence[Run]) -> str:
    most = max(bins_of(len(run.metrics.steps)).rows_per_point for run in runs)
    return f"Long series are thinned out: a point stands for up to {most} logs, as their mean." if most > 1 else ""


def setup_of(run: Run) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return tables of the last attempt's settings, software and topology."""
    last = run.last
    software = [*last.versions.items(), *([("python", last.python)] if last.python else [])]
    software += [("commit", last.commit)] if last.commit else []
    topology = [(name, text_of(value)) for name, value in last.topology.items()]
    arguments = [(name, text_of(value)) for name, value in sorted(last.arguments.items())]
    tables = [("Topology", topology), ("Software", software)]
    if last.changed is None:
        return [*tables, ("Settings", arguments)]
    changed = [each for each in arguments if each[0] in last.changed]
    others = [each for each in arguments if each[0] not in last.changed]
    return [("Settings that differ from the defaults", changed), *tables, ("All other settings", others)]


def page_data(parts: Sequence[Multiples]) -> dict[str, Any]:
    """Return the tables and charts for the page's script."""
    tables = {name: table for part in parts for name, table in part.tables.items()}
    charts = {chart.id: chart.for_page() for part in parts for chart in part.charts}
    return {"tables": tables, "charts": charts}


def in_script(data: Any) -> str:
    """Encode as JSON for a <script> element; no text inside can end the element."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    text = text.encode("utf-8", errors="replace").decode()  # half of a surrogate pair
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def vega() -> str:
    """Bundle Vega, Vega-Lite and vega-embed into one script; takes seconds."""
    script = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    return script.replace("</script", "<\\/script").replace("<!--", "<\\!--")


@cache
def environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FILES), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    filters: dict[str, Callable[..., str]] = {"moment": moment, "figure": short, "share": share, "code": code}
    environment.filters |= filters
    return environment


def moment(time: float | None) -> str:
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M:%S") if time else "–"


def short(value: float | None, unit: str = "") -> str:
    return "–" if value is None else f"{value:,.0f}{unit}" if abs(value) >= 1000 else f"{value:.3g}{unit}"


def share(value: float | None) -> str:
    return "–" if value is None else percent(value)


def render(template: str, data: dict[str, Any], **values: Any) -> str:
    page = environment().get_template(template)
    html = page.render(
        **values,
        version=__version__,
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S"),
        css=(FILES / "page.css").read_text(encoding="utf-8"),
        js=(FILES / "page.js").read_text(encoding="utf-8"),
        vega=vega(),
        data=in_script(data),
    )
    return html.encode("utf-8", errors="replace").decode()
