"""The host that two attempts in a row blame, or the doctor, is to be replaced; no other is."""

import json
from pathlib import Path

import pytest

from grpo.faults.failure import FailureKind, FailureRecord
from grpo.ops.launch.faulty_host import Entry, faulty_host, read_faulty_host
from grpo.ops.launch.next_attempt import conclude
from grpo.record.folder import RunFolder, record_early_failure

ENGINE, MACHINE, USER = FailureKind.ENGINE, FailureKind.MACHINE, FailureKind.USER


def failed(attempt: int, host: str, kind: FailureKind = MACHINE, *, step: int = 0, phase: str = "train") -> Entry:
    failure = {"node": 1, "rank": 8, "host": host, "phase": phase, "cause": "words that nobody reads", "kind": kind}
    return {"attempt": attempt, "state": "failed", "kind": kind, "step": step, "failure": failure}


def without_a_word(attempt: int) -> Entry:
    return {"attempt": attempt, "state": "failed", "kind": None, "step": 7, "failure": None}


STOPPED = {"attempt": 1, "state": "stopped", "kind": None, "step": 7, "failure": None}


@pytest.mark.parametrize(
    ("attempts", "expected"),
    [
        ([], ""),
        ([failed(0, "b")], ""),
        ([failed(0, "b", step=3), failed(1, "b", step=5)], "b"),
        ([failed(0, "b", ENGINE, step=3), failed(1, "b", MACHINE, step=5)], "b"),
        ([failed(0, "b", FailureKind.NODE_LOST, step=3), failed(1, "b", step=5)], "b"),
        ([failed(0, "b", step=3), failed(1, "b", step=3)], ""),  # as a user's bug
        ([failed(0, "b", step=3), failed(1, "c", step=5)], ""),
        ([failed(0, "b", USER, step=3), failed(1, "b", USER, step=5)], ""),
        ([failed(0, "b", step=3), failed(1, "b", USER, step=5)], ""),
        ([failed(0, "b", USER, step=3), failed(1, "b", step=5)], ""),
        ([failed(0, "b", FailureKind.MEMORY, step=3), failed(1, "b", FailureKind.MEMORY, step=5)], ""),
        # An engine that comes up on no start, with a checkpoint or without, has seen no step's data.
        ([failed(0, "b", ENGINE, phase="engine start"), failed(1, "b", ENGINE, phase="start")], "b"),
        ([failed(0, "b", ENGINE, step=3, phase="generate"), failed(1, "b", ENGINE, phase="engine start")], "b"),
        ([failed(0, "b", ENGINE, step=3, phase="generate"), failed(1, "b", ENGINE, step=3, phase="generate")], ""),
        # In a row: with no other attempt between them, one that has left no word included.
        ([failed(0, "b", step=3), STOPPED, failed(2, "b", step=9)], ""),
        ([failed(0, "b", step=3), failed(2, "b", step=5)], ""),
        ([failed(0, "b", step=3), without_a_word(1)], ""),
        ([without_a_word(0), failed(1, "b", step=5)], ""),
        ([failed(0, "b", step=3), failed(1, "b", step=5), failed(2, "c", step=7)], ""),
        ([failed(0, "c", step=3), failed(1, "b", step=5), failed(2, "b", step=7)], "b"),
        # The doctor has looked at the node itself.
        ([failed(0, "b", phase="doctor")], "b"),
        ([failed(0, "c", step=3), failed(1, "b", phase="doctor")], "b"),
    ],
)
def test_faulty_host_matches_attempt_history(attempts: list[Entry], expected: str) -> None:
    assert faulty_host(attempts) == expected


def attempt_that_fails(folder: Path, number: int, record: FailureRecord, *, step: int) -> dict:
    """As rank 0 writes it down; the state at its end."""
    run = RunFolder(folder, {"GRPO_JOB": "17", "GRPO_ATTEMPT": str(number)})
    run.begin_attempt()
    run.update(state="failed", why=str(record), kind=record.kind, step=step, failure=record)
    run.release()
    return json.loads((folder / "run_state.json").read_text())


def test_read_faulty_host_follows_run_records(tmp_path: Path) -> None:
    record = FailureRecord(node=1, rank=8, host="b", phase="train", cause="CUDA error", kind=MACHINE)
    for number, (step, expected) in enumerate([(3, ""), (5, "b")]):
        state = attempt_that_fails(tmp_path, number, record, step=step)
        assert read_faulty_host(tmp_path, state) == expected
        _, why = conclude(tmp_path, state, job="17", attempt=str(number), max_crashes=3)
        assert ("take b out of the job" in why) == bool(expected)
    assert read_faulty_host(tmp_path, None) == ""
    assert read_faulty_host(tmp_path, {**state, "attempt": 2}) == "", "that one has left no record"
    (tmp_path / "run.json").write_text('{"attempts": [1]}')
    assert read_faulty_host(tmp_path, state) == ""
    assert read_faulty_host(tmp_path / "none", state) == ""


def test_read_faulty_host_before_trainer_takes_doctor_record(tmp_path: Path) -> None:
    record = FailureRecord(node=1, rank=-1, host="b", phase="doctor", cause="no GPU", kind=MACHINE)
    record_early_failure(tmp_path, {"GRPO_JOB": "17", "GRPO_ATTEMPT": "0"}, "no GPU", MACHINE, record)
    assert read_faulty_host(tmp_path, json.loads((tmp_path / "run_state.json").read_text())) == "b"
