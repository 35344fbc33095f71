"""`grpo plan --from-run`: made-up runs, and what they say of their placement."""

import json
from pathlib import Path
from typing import Any

import pytest

from grpo.cli import main
from grpo.ops.plan.from_run import Work, advice_of
from grpo.ops.plan.reserve import best_reserved
from grpo.record.timeline.records import Attempt, Span, to_line
from tests.support.made_runs import MadeRun, make_run


def made(folder: Path, **settings: Any) -> Path:
    return make_run(folder / "run", MadeRun(**{"steps": 40, "nodes": 2, **settings}))


def test_a_balanced_run_stays_as_it_is(tmp_path: Path) -> None:
    """Engines sample 20 s, ranks train 20 s, at the same time."""
    advice = advice_of(made(tmp_path))
    assert (advice.reserve, advice.reserved, advice.gpus_per_node, advice.overlapped) == (1, 1, 8, True)
    assert advice.engines_busy > 0.9
    assert advice.ranks_waited < 0.1
    assert advice.steps == 37, "40, less the first two and the last, of which nobody knows that it is whole"
    assert advice.line().startswith("as it is, 1 of 8 GPUs reserved: engines were busy 9")


def test_ranks_that_wait_beside_busy_engines_want_another_gpu(tmp_path: Path) -> None:
    """40 s of sampling beside 20 s of training: with 2 GPUs 20 s beside 20 * 7 / 6 s."""
    advice = advice_of(made(tmp_path, times={"generate": 40.0}))
    assert (advice.reserve, advice.num_processes) == (2, 12)
    assert advice.faster == pytest.approx(1 - 20 * 7 / 6 / 40, abs=0.05)
    line = advice.line()
    assert line.startswith("reserve 2 GPUs a node (num_processes: 12): engines were busy 9")
    assert ", ranks waited 5" in line
    assert "by this a step would take 6" in line


@pytest.mark.parametrize(("fault", "reserve"), [("waiting-ranks", 2), ("idle-engines", 1)])
def test_taking_turns_comes_first(tmp_path: Path, fault: str, reserve: int) -> None:
    """50 s, or 12 s, of sampling, then 20 s of training."""
    advice = advice_of(made(tmp_path, fault=fault))
    assert not advice.overlapped
    assert advice.reserve == reserve
    assert advice.line().startswith("set generation_lookahead to 1 first: engines were busy ")
    assert ("; then reserve 2 GPUs a node (num_processes: 12)" in advice.line()) == (reserve == 2)


@pytest.mark.parametrize("fault", ["", "waiting-ranks"])
def test_without_run_json_the_spans_say_whether_they_overlap(tmp_path: Path, fault: str) -> None:
    run = made(tmp_path, fault=fault)
    whole = advice_of(run)
    (run / "run.json").unlink()
    assert advice_of(run) == whole


def test_a_timeline_that_is_thinned_out_is_read_from_its_last_gap_on(tmp_path: Path) -> None:
    run = made(tmp_path, times={"generate": 40.0})
    whole = advice_of(run)
    for file in (run / "timeline").iterdir():
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        kept = [line for line in lines if "step" not in line or line["step"] >= 20 or line["step"] % 3 == 0]
        file.write_text("".join(json.dumps(line) + "\n" for line in kept))
    thinned = advice_of(run)
    assert thinned.steps == 19
    assert thinned.reserve == whole.reserve == 2
    assert thinned.engines_busy == pytest.approx(whole.engines_busy, abs=0.02)


def test_a_run_that_failed_and_went_on_is_judged_by_its_last_attempt(tmp_path: Path) -> None:
    assert advice_of(made(tmp_path, fault="failed")).attempt == 1


def test_the_command_prints_one_line_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = made(tmp_path)
    assert main(["plan", "--from-run", str(run)]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert main(["plan", "--json", "--from-run", str(run)]) == 0
    advice = json.loads(capsys.readouterr().out)
    assert advice["line"] == line
    assert advice["reserve"] == 1


def test_what_says_nothing_is_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(*words: str) -> str:
        assert main(["plan", "--from-run", *words]) == 1
        return capsys.readouterr().err

    assert "there is no timeline in it" in said(str(tmp_path))
    assert "--from-run reads the placement from the run: remove --num_processes" in said("x", "--num_processes", "7")
    assert "from the run: remove what follows ` -- `" in said("x", "--", "--beta", "1")
    assert "no attempt has 3 finished steps" in said(str(made(tmp_path, steps=2)))


def test_a_run_on_cpus_has_nothing_to_reserve(tmp_path: Path) -> None:
    lines: list[Any] = [Attempt(attempt=0, node=0, host="a", time=0.0, ranks=[0, 1], engine_devices=[[]])]
    for step in range(6):
        at = step * 2.0
        lines.append(Span(attempt=0, lane="engine 0", phase="generate", begin=at, end=at + 1, step=step))
        lines.append(Span(attempt=0, lane="rank 0", phase="forward", begin=at + 1, end=at + 2, step=step))
    (tmp_path / "timeline").mkdir()
    (tmp_path / "timeline" / "node0.jsonl").write_text("".join(to_line(line) + "\n" for line in lines))
    with pytest.raises(ValueError, match="its nodes have no GPUs"):
        advice_of(tmp_path)


@pytest.mark.parametrize(
    ("generate_s", "train_s", "reserved", "multiple", "best"),
    [
        (10, 10, 1, 1, 1),
        (20, 10, 1, 1, 2),  # 10 and 10 * 7 / 6
        (70, 10, 1, 1, 4),  # 17.5 and 17.5
        (1, 10, 2, 1, 1),
        (1, 10, 2, 2, 2),  # an engine of two GPUs
        (30, 10, 2, 2, 4),  # 15 and 15
        (10.4, 10, 1, 1, 1),
    ],
)
def test_the_best_number(generate_s: float, train_s: float, reserved: int, multiple: int, best: int) -> None:
    work = Work(gpus=8, reserved=reserved, generate_s=generate_s, train_s=train_s)
    assert best_reserved(work.step_s, reserved=reserved, choices=range(multiple, 8, multiple)) == best
