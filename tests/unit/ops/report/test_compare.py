"""Several runs over each other."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo.cli import main
from grpo.ops.report.compare import compare, differing
from grpo.ops.report.page import names_of
from grpo.ops.report.reading import read_run
from tests.support.report_pages import data_of


def test_report_of_several_runs_keeps_each_runs_curve_values(
    run_with: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = shutil.copytree(run_with("slow-sync"), tmp_path / "short")
    lines = (short / "metrics.jsonl").read_text().splitlines()
    (short / "metrics.jsonl").write_text("\n".join(lines[1:40:3]) + "\n")  # steps 2, 5, 8 …
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(run_with("")), str(short)]) == 0
    page = (tmp_path / "report.html").read_text()
    table = data_of(page)["tables"]["runs"]
    assert table["step"] == list(range(1, 81))
    wanted = [json.loads(line)["reward"] for line in lines[1:40:3]]
    found = [value for value in table["1:reward"] if value is not None]
    assert found == pytest.approx(wanted, rel=1e-4)
    assert [step for step, value in zip(table["step"], table["1:reward"], strict=True) if value is not None][:2] == [
        2,
        5,
    ]
    assert None not in table["0:reward"]


def test_comparison_sentence_names_faster_run_and_rewards(run_with: Callable[[str], Path]) -> None:
    runs = [read_run(run_with("idle-engines"), "a"), read_run(run_with("slow-sync"), "b")]
    comparison = compare(runs)
    assert "a takes 33 s a step, 1.1" in comparison.sentence
    assert "times as fast as b" in comparison.sentence
    assert "reward at step 80: " in comparison.sentence
    assert ("generation_lookahead", ("0", "1")) in comparison.settings
    assert "max_completion_length" not in {name for name, _ in comparison.settings}


def test_differing_counts_missing_settings_as_different() -> None:
    found = differing([{"a": "1", "b": "2"}, {"a": "1"}, {"a": "1", "b": "2", "output_dir": "x"}])
    assert found == (("b", ("2", "–", "2")),)


def test_names_of_runs_with_same_name_adds_parent_folder(tmp_path: Path) -> None:
    assert names_of([tmp_path / "x" / "run", tmp_path / "y" / "run"]) == ["x/run", "y/run"]
    assert names_of([tmp_path / "a", tmp_path / "b"]) == ["a", "b"]
    assert names_of([tmp_path / "a"]) == ["a"]


def test_report_of_several_runs_with_one_lacking_metrics_shows_others(
    run_with: Callable[[str], Path], tmp_path: Path
) -> None:
    bare = shutil.copytree(run_with(""), tmp_path / "bare")
    (bare / "metrics.jsonl").unlink()
    out = tmp_path / "page.html"
    assert main(["report", str(bare), str(run_with("gap")), "--out", str(out)]) == 0
    page = out.read_text()
    assert "bare: metrics.jsonl is not there: no curves" in page
    assert data_of(page)["charts"]
