"""`grpo trace` on made-up runs, whole and damaged."""

import gzip
import json
from pathlib import Path

import pytest

from grpo.cli import main
from tests.support.made_runs import MadeRun, make_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", MadeRun(steps=20, nodes=2))


def test_trace_writes_file_beside_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(run)]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert said.out.startswith(f"{run}/trace.json: ")
    assert " of 2 node(s), " in said.out
    trace = json.loads((run / "trace.json").read_text())
    assert trace["otherData"]["began_unix_s"] == 1_790_000_000.0
    assert {event["ph"] for event in trace["traceEvents"]} == {"M", "X", "C", "i"}


def test_trace_with_gz_out_compresses_same_bytes(run: Path, tmp_path: Path) -> None:
    packed = tmp_path / "t.json.gz"
    assert main(["trace", str(run)]) == main(["trace", str(run), "--out", str(packed)]) == 0
    plain = (run / "trace.json").read_bytes()
    assert gzip.decompress(packed.read_bytes()) == plain
    assert packed.stat().st_size < len(plain) / 5


def test_trace_of_damaged_run_warns_and_writes_rest(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    timeline = run / "timeline"
    with (timeline / "node0.jsonl").open("a") as lines:
        lines.write('{"kind": "span", "att')  # as a kill leaves it
    (timeline / "node1.jsonl").unlink()
    assert main(["trace", str(run)]) == 0
    assert capsys.readouterr().err.splitlines() == [
        f"grpo trace: WARNING: node 1 of 2: no timeline in {timeline}, so not in the trace",
        "grpo trace: WARNING: 1 line(s) that cannot be read were left out",
    ]
    (timeline / "node0.jsonl").rename(timeline / "node3.jsonl")
    (run / "run.json").unlink()
    assert main(["trace", str(run)]) == 0
    assert "nodes 0, 1, 2 of 4: no timeline" in capsys.readouterr().err


def test_trace_of_unusable_input_prints_one_line_and_writes_nothing(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*words: str) -> str:
        assert main(["trace", *words]) == 1
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.startswith("grpo trace: ")
        assert said.err.count("\n") == 1
        return said.err

    assert f"{tmp_path}/no is no folder" in refused(str(tmp_path / "no"))
    (tmp_path / "empty").mkdir()
    assert f"{tmp_path}/empty/timeline has no node<k>.jsonl" in refused(str(tmp_path / "empty"))
    assert f"there is no folder {tmp_path}/no" in refused(str(run), "--out", str(tmp_path / "no" / "t.json"))
    assert f"--out {tmp_path} is a folder" in refused(str(run), "--out", str(tmp_path))
    for path in (run / "timeline").glob("*"):
        path.write_bytes(b"\xff\xfe{}\nnothing\n")
    assert "2 nodes" not in (said := refused(str(run)))
    assert "can be read as a timeline: 4 damaged line(s)" in said
    assert not list(run.glob("*trace.json*"))
