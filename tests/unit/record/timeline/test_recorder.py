"""What is recorded can be read, while it is written and after whatever has become of the writer."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from grpo.record.screen import show_log
from grpo.record.timeline import recorder
from grpo.record.timeline.recorder import Recorder, thin_out
from grpo.record.timeline.records import (
    GENERATE,
    SCORE,
    SYNC,
    AttemptLine,
    Line,
    Span,
    Usage,
    covered,
    from_line,
    read_timelines,
    timeline_path,
    to_line,
)

PATIENCE_S = 60.0


def attempt(number: int = 0, **more: object) -> AttemptLine:
    fields = {"attempt": number, "node": 1, "host": "h1", "time": 5.0, "ranks": [4, 5]} | more
    return AttemptLine(**fields)  # type: ignore[arg-type]


def test_timeline_line_round_trip_is_exact() -> None:
    for record in (
        attempt(rank_devices=["0", "1"], engine_devices=[["2", "3"], []], clock_offset_s=-0.25),
        Span(attempt=2, lane="engine 0", phase=GENERATE, begin=1.5, end=2.5, step=7, tokens=0, requests=3, on_gpu=True),
        Usage(attempt=0, time=3.0, device="GPU-1a", busy=0.0, power_w=301.5),
    ):
        assert from_line(to_line(record)) == record
    assert json.loads(to_line(Span(attempt=0, lane="a", phase="b", begin=0, end=1, step=0))).keys() == {
        "kind", "attempt", "lane", "phase", "begin", "end", "step",
    }  # fmt: skip


def test_recorder_with_threads_and_two_attempts_keeps_all_spans(tmp_path: Path) -> None:
    path = timeline_path(tmp_path, 1)
    for number in (0, 1):
        timeline = Recorder(path, attempt(number, clock_offset_s=100.0))
        timeline.step = 3
        before = time.time() - 100.0
        with timeline.span(SCORE, name="accuracy"):
            time.sleep(0.001)
            timeline.step = 4  # a span belongs to the step in which it began
        threads = [
            threading.Thread(target=timeline.add, args=[SYNC, 1.0, 2.0, "sync"], kwargs={"bytes": 5}) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        timeline.close()
        timeline.close()
        (read,) = read_timelines(tmp_path)
        assert (read.node, read.unreadable, [each.attempt for each in read.attempts]) == (1, 0, [*range(number + 1)])
        score, *syncs = [span for span in read.spans if span.attempt == number]
        assert (score.lane, score.phase, score.name, score.step) == ("rank 4", SCORE, "accuracy", 3)
        assert before - 1e-3 <= score.begin <= score.end <= time.time() - 100.0 + 1e-3
        assert [(sync.lane, sync.step, sync.bytes) for sync in syncs] == [("sync", 4, 5)] * 8
        assert syncs[0].end - syncs[0].begin == pytest.approx(1.0)


def test_read_timelines_during_recording_finds_spans(tmp_path: Path) -> None:
    timeline = Recorder(timeline_path(tmp_path, 1), attempt())
    timeline.add(SYNC, 1.0, 2.0)
    deadline = time.monotonic() + PATIENCE_S
    while not (found := read_timelines(tmp_path)) or not found[0].spans:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    timeline.close()


def test_recorder_after_truncated_line_loses_one_line(tmp_path: Path) -> None:
    path = timeline_path(tmp_path, 1)
    path.parent.mkdir()
    path.write_text(to_line(attempt()) + '\n{"kind":"span","att')
    timeline = Recorder(path, attempt(1))
    timeline.close()
    (read,) = read_timelines(tmp_path)
    assert ([each.attempt for each in read.attempts], read.unreadable) == ([0, 1], 1)


def test_read_timelines_counts_unreadable_lines(tmp_path: Path) -> None:
    path = timeline_path(tmp_path, 0)
    path.parent.mkdir()
    path.write_bytes(
        b'[]\n1\n{"kind":"what"}\n{"kind":"span"}\n\xff\xfe\n{"kind":"usage","attempt":0,"time":1,"device":"0","new":1}\n'
    )
    (path.parent / "node7.jsonl").mkdir()
    (path.parent / "nodes.jsonl").write_text("")
    one, other = read_timelines(tmp_path)
    assert (one.unreadable, one.usages) == (5, [Usage(attempt=0, time=1, device="0")])
    assert (other.node, other.unreadable) == (7, 1)
    assert read_timelines(tmp_path / "nothing") == []


@pytest.mark.parametrize(
    "record",
    [
        attempt(ranks=7),
        attempt(engine_devices=["x"]),
        Span(attempt=0, lane="rank 0", phase="b", begin=None, end=1, step=0),  # type: ignore[arg-type]
        Span(attempt=0, lane="rank 0", phase="c", begin=0, end=float("nan"), step=0),
        Span(attempt=0, lane="rank 0", phase="d", begin=0, end=1, step=0, tokens="many"),  # type: ignore[arg-type]
        Span(attempt=0, lane="rank 0", phase="e", begin=0, end=1, step=True),
        Usage(attempt=0, time=float("inf"), device="0"),
    ],
)
def test_from_line_with_wrong_field_types_raises(record: Line) -> None:
    with pytest.raises(ValueError, match=r"no (AttemptLine|Span|Usage) of this version"):
        from_line(to_line(record))


SCRIPT = """
import sys
from pathlib import Path
from grpo.record.timeline.recorder import Recorder
from grpo.record.timeline.records import AttemptLine
timeline = Recorder(Path(sys.argv[1]), AttemptLine(attempt=0, node=1, host="h", time=0.0, ranks=[0]))
timeline.add("train", 1.0, 2.0)
"""


def test_recorder_at_process_exit_writes_all_records(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-c", SCRIPT, str(timeline_path(tmp_path, 1))]
    subprocess.run(command, check=True, env=environment, timeout=PATIENCE_S)
    (timeline,) = read_timelines(tmp_path)
    assert (len(timeline.attempts), len(timeline.spans)) == (1, 1)


def test_recorder_without_path_drops_records() -> None:
    timeline = Recorder()
    assert not timeline.is_on
    with timeline.span(SCORE):
        pass
    timeline.put(attempt())
    timeline.close()


def test_recorder_rest_covers_tail_and_drops_empty_spans(tmp_path: Path) -> None:
    timeline = Recorder(timeline_path(tmp_path, 1), attempt())
    with timeline.rest(SCORE):
        with timeline.span(SCORE, name="accuracy"):
            time.sleep(0.002)
        with timeline.span(SYNC, "sync"):  # another lane
            time.sleep(0.002)
    timeline.add(SYNC, 1.0, 1.0)
    timeline.close()
    inner, sync, rest = read_timelines(tmp_path)[0].spans
    assert (inner.name, sync.lane, rest.phase, rest.name, rest.begin) == ("accuracy", "sync", SCORE, "", inner.end)


def test_recorder_span_with_error_is_recorded(tmp_path: Path) -> None:
    timeline = Recorder(timeline_path(tmp_path, 1), attempt())

    def fails() -> None:
        time.sleep(0.001)
        raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost"), timeline.span(SYNC):
        fails()
    timeline.close()
    assert [span.phase for span in read_timelines(tmp_path)[0].spans] == [SYNC]


def test_recorder_with_unwritable_file_reports_and_stops(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    show_log()
    (tmp_path / "timeline").write_text("a file")
    timeline = Recorder(timeline_path(tmp_path, 1), attempt())
    deadline = time.monotonic() + PATIENCE_S
    while timeline.is_on:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with timeline.span(SYNC):
        pass
    timeline.close()
    assert "node1.jsonl is not written any more" in capfd.readouterr().out


def test_recorder_over_max_bytes_keeps_newest_spans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "FLUSH_S", 0.0)
    path = timeline_path(tmp_path, 1)
    monkeypatch.setattr(recorder, "MAX_BYTES", 20_000)
    timeline = Recorder(path, attempt())
    for number in range(2_000):
        timeline.add(SYNC, float(number), number + 1.0, bytes=number)
        if number % 100 == 0:
            deadline = time.monotonic() + PATIENCE_S
            while not timeline._lines.empty() and time.monotonic() < deadline:
                time.sleep(0.001)
    timeline.close()
    assert path.stat().st_size <= 40_000
    (read,) = read_timelines(tmp_path)
    assert read.attempts == [attempt()]
    assert [span.bytes for span in read.spans[-50:]] == [*range(1950, 2000)], "the newest are all there"
    first = [span.bytes for span in read.spans[:10]]
    assert first == sorted(first)  # type: ignore[type-var]
    assert read.unreadable == 0


def test_thin_out_removes_whole_steps_and_samples(tmp_path: Path) -> None:
    """Two phases a step and two devices a sample: by lines it would be always the same one."""
    path = tmp_path / "node0.jsonl"
    lines = [to_line(attempt())]
    for step in range(8):
        common = {"attempt": 0, "lane": "rank 0", "step": step}
        lines += [to_line(Span(phase=phase, begin=step, end=step + 0.5, **common)) for phase in (SCORE, SYNC)]
        lines += [to_line(Usage(attempt=0, time=float(step), device=device)) for device in "01"]
    path.write_text("".join(line + "\n" for line in lines))
    thin_out(path)
    records = [from_line(line) for line in path.read_text().splitlines()]
    spans, usages = ([each for each in records if isinstance(each, kind)] for kind in (Span, Usage))
    assert [(each.step, each.phase) for each in spans if each.step < 4] == [
        (step, phase) for step in (1, 3) for phase in (SCORE, SYNC)
    ]
    assert [(each.time, each.device) for each in usages if each.time < 4] == [
        (time, device) for time in (1, 3) for device in "01"
    ]
    assert len([each for each in spans if each.step >= 4]) == 8
    assert isinstance(records[0], AttemptLine)


def test_thin_out_keeps_all_attempt_lines(tmp_path: Path) -> None:
    path = tmp_path / "node0.jsonl"
    path.write_text("".join(to_line(attempt(number)) + "\n" for number in range(10)))
    thin_out(path)
    assert len(path.read_text().splitlines()) == 10


def test_covered_counts_overlap_once() -> None:
    assert covered([(5, 6), (0, 2), (1, 3), (3, 4), (0.5, 1)]) == 5
    assert covered([(4, 3), (3, 4)]) == 1, "one that ends before it begins is empty"
    assert covered([]) == 0
