"""What a launcher says of its attempt's end, from how its ranks ended and what rank 0 has left."""

import time
from pathlib import Path

import pytest

from grpo.faults.failure import FailureKind
from grpo.ops.launch.agent import Ending
from grpo.ops.launch.attempt import Attempt
from grpo.ops.launch.next_attempt import DONE, FAILED, START_AGAIN
from grpo.record.files import note_failure, note_run
from grpo.record.folder import RunFolder

WELL, BY_SIGTERM = Ending(has_succeeded=True), Ending(has_succeeded=False, is_terminated=True)
SOON_S = 30.0  # half of what a launcher waits for a file system


def make_attempt(folder: Path, number: int = 0, *, has_trainer: bool = True, **state: object) -> Attempt:
    """The head's; `state` is what rank 0 has said at last."""
    notes = folder / f"notes-{number}"
    notes.mkdir()
    named = {"GRPO_JOB": "17", "GRPO_ATTEMPT": str(number)}
    attempt = Attempt(
        output_dir=folder / "run", notes=notes, launched=50.0, started=100.0 + number, is_head=True, env=named
    )
    if has_trainer:
        env = {**named, **attempt.variables()}
        note_run(folder / "run", env)
        run = RunFolder(folder / "run", env)
        run.update(state="running")
        if state:
            run.update(**state)
        run.release()
    return attempt


def test_attempt_variables_hold_launch_and_start_times(tmp_path: Path) -> None:
    """Before the doctor and the rendezvous: a request to stop that is made meanwhile is for this attempt."""
    reported = make_attempt(tmp_path, has_trainer=False).variables()
    assert (reported["GRPO_LAUNCHED"], reported["GRPO_STARTED"]) == ("50.0", "100.0")


@pytest.mark.parametrize(
    ("ending", "code", "why"),
    [
        (WELL, DONE, "training has finished"),
        (Ending(has_succeeded=False), FAILED, "training has finished, but the script failed after it"),
        (BY_SIGTERM, START_AGAIN, "training has finished, but a SIGTERM has ended the script after it"),
    ],
)
def test_conclude_after_finished_training_follows_script_end(
    ending: Ending, code: int, why: str, tmp_path: Path
) -> None:
    """The model that a script saves, say."""
    attempt = make_attempt(tmp_path, state="finished", why="all steps are done")
    then = "; the same line with --resume auto goes on from the beginning" if code == START_AGAIN else ""
    assert attempt.conclude(ending, max_crashes=3) == (code, f"{why}; {tmp_path / 'run'}{then}")


def test_conclude_with_restart_names_newest_complete_checkpoint(tmp_path: Path) -> None:
    for step, file in ((10, "complete.json"), (20, "trainer_state.json")):
        (folder := tmp_path / "run" / f"checkpoint-{step}").mkdir(parents=True)
        (folder / file).write_text("{}")
    attempt = make_attempt(tmp_path, state="failed", why="rank 1 died", kind=FailureKind.MACHINE, step=22)
    code, why = attempt.conclude(Ending(has_succeeded=False, rank=1), max_crashes=3)
    assert code == START_AGAIN
    assert why.startswith("failed: rank 1 died")
    assert why.endswith(f"; {tmp_path / 'run'}; the same line with --resume auto goes on from checkpoint-10")


@pytest.mark.parametrize(
    ("step", "code", "why"),
    [
        (0, FAILED, "not started again: this would fail again"),
        (22, START_AGAIN, "failed: a reward; {run}; the same line with --resume auto goes on from checkpoint-10"),
    ],
)
def test_conclude_of_user_failure_is_final_only_before_first_step(
    step: int, code: int, why: str, tmp_path: Path
) -> None:
    (folder := tmp_path / "run" / "checkpoint-10").mkdir(parents=True)
    (folder / "complete.json").write_text("{}")
    attempt = make_attempt(tmp_path, state="failed", why="a reward", kind=FailureKind.USER, step=step)
    note_failure(attempt.variables(), "a reward", FailureKind.USER, step=step)
    got = attempt.conclude(Ending(has_succeeded=False, rank=0), max_crashes=3)
    assert got == (code, why.format(run=tmp_path / "run"))


def test_conclude_of_sigterm_before_trainer_counts_no_crash(tmp_path: Path) -> None:
    attempt = make_attempt(tmp_path, has_trainer=False)
    code, why = attempt.conclude(BY_SIGTERM, max_crashes=1)
    assert (code, why) == (START_AGAIN, "ended by a SIGTERM, before there was a trainer")


def test_conclude_of_sigterm_without_final_state_counts_crash(tmp_path: Path) -> None:
    """Slurm ends the other nodes of a job by SIGTERM when one has failed."""
    ends = [make_attempt(tmp_path, number).conclude(BY_SIGTERM, max_crashes=2) for number in (0, 1)]
    assert [code for code, _ in ends] == [START_AGAIN, FAILED]
    assert ends[0][1].startswith("died without a word (crash 1 of 2 ")


@pytest.fixture
def followed(tmp_path: Path) -> Attempt:
    """Of node 1, whose ranks have noted where the run is."""
    (tmp_path / "notes").mkdir()
    made = Attempt(output_dir=None, notes=tmp_path / "notes", launched=5.0, started=5.0, is_head=False, env={})
    note_run(tmp_path / "run", made.variables())
    return made


@pytest.mark.parametrize(("kind", "code"), [(FailureKind.NODE_LOST, START_AGAIN), (FailureKind.USER, FAILED)])
def test_conclude_with_cause_noted_by_rank_skips_wait_for_rank_0(
    followed: Attempt, kind: FailureKind, code: int
) -> None:
    note_failure({**followed.variables(), "RANK": "1"}, "node 0 is gone", kind)
    note_failure(followed.variables(), "a connection has ended", FailureKind.MACHINE)  # what follows from the first
    begun = time.monotonic()
    got, why = followed.conclude(Ending(has_succeeded=False, rank=1), max_crashes=3)
    assert time.monotonic() - begun < SOON_S
    assert (got, "node 0 is gone" in why) == (code, True), why


def test_conclude_prefers_state_of_rank_0_over_rank_notes(followed: Attempt, tmp_path: Path) -> None:
    note_failure(followed.variables(), "a peer has left", FailureKind.MACHINE)
    run = RunFolder(tmp_path / "run", {"GRPO_JOB": "7", "GRPO_STARTED": "5.0"})
    run.update(state="failed", why="a misspelt option", kind=FailureKind.USER)
    run.release()
    code, why = followed.conclude(Ending(has_succeeded=False, rank=1), max_crashes=3)
    assert (code, "misspelt" in why) == (FAILED, True), why
