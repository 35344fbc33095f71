"""A run's folder as records: each step once, numbers as in the files, and a line for all that is missing or damaged."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from grpo.ops.report.curves import PROGRESS, Multiples, add_curves, steps_of
from grpo.ops.report.lanes import lanes_of
from grpo.ops.report.page import write_report
from grpo.ops.report.reading import read_metrics, read_run
from grpo.ops.report.shares import parts_of
from grpo.ops.report.thinning import bins_of
from grpo.ops.report.timelines import read_timelines
from grpo.record.timeline.records import AttemptLine, Span, Usage, timeline_path, to_line
from tests.support.made_runs import MadeRun, make_run


def write_lines(path: Path, *lines: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def span(phase: str, begin: float, end: float, **others: object) -> str:
    given = {"attempt": 0, "lane": "rank 0", "step": 0} | others
    return to_line(Span(phase=phase, begin=begin, end=end, **given))  # type: ignore[arg-type]


# -- metrics ----------------------------------------------------------------------------------------------------------


def test_read_metrics_of_repeated_step_keeps_later_attempt(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "metrics.jsonl",
        {"step": 1, "time": 10.0, "attempt": 0, "reward": 0.1},
        {"step": 2, "time": 20.0, "attempt": 0, "reward": 0.2, "kl": 5.0},
        {"step": 2, "time": 30.0, "attempt": 1, "reward": 0.3},
        {"step": 2, "time": 31.0, "attempt": 1, "eval_reward": 0.9},
        {"step": 3, "time": 40.0, "attempt": 1, "reward": None, "by_node": {"rollout/generate_s": [1, 2.5]}},
    )
    missing: list[str] = []
    metrics = read_metrics(path, missing)
    assert missing == []
    assert metrics.steps.tolist() == [1, 2, 3]
    assert metrics.columns["reward"][:2].tolist() == [0.1, 0.3]
    assert np.isnan(metrics.columns["reward"][2])
    assert metrics.columns["eval_reward"][1] == 0.9
    assert metrics.get("kl") is None  # only the attempt that does not count had it
    assert metrics.by_node["rollout/generate_s"][2].tolist() == [1.0, 2.5]


@pytest.mark.parametrize("renumbers", [False, True], ids=["a requeue", "another job"])
def test_parts_and_lanes_after_lost_steps_prefer_newest_attempt(renumbers: bool, tmp_path: Path) -> None:
    """Fewer than had been: the newest attempt has not come as far as the one before."""
    made = make_run(tmp_path / "run", MadeRun(steps=160, nodes=2, fault="failed", lost=60, renumbers=renumbers))
    reported = json.loads((made / "run.json").read_text())["attempts"]
    again = reported[1]["started"]
    for path in (made / "timeline").iterdir():  # as it stands ten steps after the resume
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        kept = [line for line in lines if line.get("begin", line.get("time")) < again or line.get("step", 0) < 30]
        path.write_text("".join(json.dumps(line) + "\n" for line in kept))
    run = read_run(made)
    parts = parts_of(run.timeline.spans)
    assert parts.attempts.tolist() == [0] * 20 + [1] * 10 + [0] * 50
    assert parts.lengths_s.max() < 30  # the time between the attempts is no step's
    lanes = lanes_of(run)
    assert lanes is not None
    assert lanes.detail_steps == 80
    assert lanes.first_shown_s == pytest.approx(60 + 40 * 22, rel=0.1)  # the ten new ones, and forty of the old ones
    write_report([made], tmp_path / "page.html")


def test_read_metrics_with_unreadable_lines_counts_them(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "metrics.jsonl",
        {"step": 1, "reward": 1.0},
        "{not json",
        '"text"',
        '{"reward": 2}',
        '{"step": 2, "re',
    )
    missing: list[str] = []
    assert read_metrics(path, missing).steps.tolist() == [1]
    assert missing == ["metrics.jsonl: 4 lines cannot be read (cut off, or damaged)"]
    missing.clear()
    read_metrics(path, missing, is_running=True)  # the last one is being written
    assert missing == ["metrics.jsonl: 3 lines cannot be read (cut off, or damaged)"]


@pytest.mark.parametrize(
    ("points", "note"),
    [(2, "band: least to most"), (4, "")],  # a point stands for two steps
)
def test_chart_note_names_band_only_when_thinned(points: int, note: str, tmp_path: Path) -> None:
    lines = [{"step": step, "reward": 1.0} for step in range(1, 5)]
    metrics = read_metrics(write_lines(tmp_path / "metrics.jsonl", *lines), [])
    bins, found = bins_of(4, points), Multiples()
    found.tables["metrics"] = steps_of(metrics, bins)
    add_curves(found, metrics, bins, "metrics", PROGRESS[:1])
    (chart,) = found.charts
    assert chart.note == note


# -- timelines --------------------------------------------------------------------------------------------------------


def test_read_timelines_with_damaged_lines_skips_and_counts_them(tmp_path: Path) -> None:
    good = [
        to_line(AttemptLine(attempt=0, node=0, host="a", time=1.0, rank_devices=["0"], engine_devices=[["1"]])),
        span("forward", 1.0, 2.0),
        to_line(Usage(attempt=0, time=2.0, device="1", busy=0.5)),
    ]
    wrong = ["{", '{"kind":"span"}', span("sync", 2.0, 3.0).replace("2.0", '"x"'), '{"kind":"?"}', "\x00\xff"]
    wrong.append(span("sync", 2.0, 3.0).replace('"attempt":0', f'"attempt":{10**30}'))
    write_lines(timeline_path(tmp_path, 0), good[0], wrong[0], good[1], *wrong[1:], good[2])
    with timeline_path(tmp_path, 0).open("a") as file:
        file.write('{"kind":"span","att')
    missing: list[str] = []
    timeline = read_timelines(tmp_path, 2, missing)
    assert missing == [
        "timeline/ lacks node1.jsonl: those nodes have no timeline",
        "timeline/node0.jsonl: the last line is cut off",
        "timeline/node0.jsonl: 6 lines cannot be read (damaged)",
    ]
    assert [timeline.spans.phases[code] for code in timeline.spans.phase] == ["forward"]
    assert timeline.usages.is_engine.tolist() == [True]


def test_read_timelines_with_unknown_fields_ignores_them(tmp_path: Path) -> None:
    line = json.loads(span("forward", 1.0, 2.0)) | {"later": {"deep": [1]}}
    write_lines(timeline_path(tmp_path, 0), line)
    missing: list[str] = []
    assert len(read_timelines(tmp_path, 1, missing).spans) == 1
    assert missing == []


def test_parts_of_step_sum_spans_and_other_to_its_length(tmp_path: Path) -> None:
    for node, wait in ((0, 2.0), (1, 4.0)):
        lane = f"rank {8 * node}"
        write_lines(
            timeline_path(tmp_path, node),
            span("start", 0.0, 90.0, lane=lane),
            span("forward", 90.0, 91.0, lane=lane, step=1),  # attempt 1 makes step 1 again
            span("wait for generation", 100.0, 100.0 + wait, lane=lane, attempt=1),
            span("forward", 105.0, 107.0, lane=lane, attempt=1),
            span("weight sync: gather", 105.0, 109.0, lane="sync", attempt=1),
            span("forward", 110.0, 113.0, lane=lane, step=1, attempt=1),
        )
    parts = parts_of(read_timelines(tmp_path, 2, []).spans)
    assert parts.steps.tolist() == [0, 1]
    assert parts.names == ("wait for generation", "forward", "other")
    assert parts.lengths_s.tolist() == [10.0, 3.0]
    assert parts.seconds.tolist() == [[3.0, 2.0, 5.0], [0.0, 3.0, 0.0]]
    assert parts.shares["forward"] == pytest.approx(5 / 13)
    assert parts_of(read_timelines(tmp_path, 2, []).spans, done=1).steps.tolist() == [0]  # the other is not done yet


# -- thinning ---------------------------------------------------------------------------------------------------------


def test_bins_of_long_series_give_mean_least_and_most() -> None:
    bins = bins_of(7, points=3)
    values = np.array([1.0, 3.0, np.nan, 5.0, np.nan, np.nan, np.nan])
    assert bins.starts.tolist() == [0, 2, 4]
    assert bins.rows_per_point == 3
    np.testing.assert_equal(bins.means(values), [2.0, 5.0, np.nan])
    np.testing.assert_equal(bins.least(values), [1.0, 5.0, np.nan])
    np.testing.assert_equal(bins.most(values), [3.0, 5.0, np.nan])
    assert bins.last(np.arange(7)).tolist() == [1, 3, 6]


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_bins_of_short_series_keep_values(rows: int) -> None:
    bins = bins_of(rows, points=5)
    values = np.arange(rows, dtype=float)
    assert not bins.is_thinned
    for each in (bins.means(values), bins.least(values), bins.most(values), bins.last(values)):
        assert each.tolist() == values.tolist()


# -- folders ----------------------------------------------------------------------------------------------------------

DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no-metrics": (lambda run: (run / "metrics.jsonl").unlink(), "metrics.jsonl is not there: no curves"),
    "empty-metrics": (lambda run: (run / "metrics.jsonl").write_text(""), "metrics.jsonl holds no step"),
    "no-run": (lambda run: (run / "run.json").unlink(), "run.json is not there"),
    "cut-run": (lambda run: (run / "run.json").write_text('{"attempts": [{"att'), "run.json cannot be read"),
    "odd-run": (lambda run: (run / "run.json").write_text('{"attempts": [7, {"topology": 3}]}'), "1 of 2 attempts"),
    "list-run": (lambda run: (run / "run.json").write_text("[]"), "run.json holds no JSON object"),
    "no-state": (lambda run: (run / "run_state.json").unlink(), "run_state.json is not there"),
    "no-timeline": (lambda run: shutil.rmtree(run / "timeline"), "timeline/ holds no file"),
    "one-node": (lambda run: (run / "timeline/node1.jsonl").unlink(), "timeline/ lacks node1.jsonl"),
    "empty-node": (lambda run: (run / "timeline/node1.jsonl").write_text(""), "timeline/node1.jsonl is empty"),
    "binary-node": (lambda run: (run / "timeline/node1.jsonl").write_bytes(bytes(range(256)) * 9 + b"\n"), "damaged"),
    "folder-node": (lambda run: as_folder(run / "timeline/node1.jsonl"), "timeline/node1.jsonl cannot be read"),
    "no-completions": (lambda run: shutil.rmtree(run / "completions"), "completions/ holds no file"),
    "cut-completions": (lambda run: cut(run / "completions/step-00000010.parquet"), "step-00000010.parquet cannot be"),
    "no-logs": (lambda run: shutil.rmtree(run / "logs"), ""),
}


def as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-50])


@pytest.mark.parametrize("damage", DAMAGES)
def test_report_of_damaged_folder_names_damage(damage: str, run_with: Callable[[str], Path], tmp_path: Path) -> None:
    folder = shutil.copytree(run_with("failed"), tmp_path / "run")
    apply, words = DAMAGES[damage]
    apply(folder)
    write_report([folder], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert words in page
    assert "missing or damaged" in page or not words


def test_report_of_one_line_run_writes_page(tmp_path: Path) -> None:
    write_lines(tmp_path / "run" / "metrics.jsonl", {"step": 1, "reward": 0.5})
    write_report([tmp_path / "run"], tmp_path / "page.html")
    assert "0.500" in (tmp_path / "page.html").read_text()


def test_read_run_of_folder_without_run_raises(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds none of metrics\.jsonl"):
        read_run(tmp_path)
    with pytest.raises(ValueError, match="is no folder: give a run's output_dir"):
        read_run(tmp_path / "absent")
