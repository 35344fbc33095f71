"""What follows an attempt: decided by what rank 0 has said, and by how many crashes stand in a row."""

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from grpo.faults.failure import answer_to_end
from grpo.ops.launch.next_attempt import DONE, FAILED, START_AGAIN, conclude, count_crash, decide, main, read_state
from grpo.record.folder import RunFolder
from tests.support.launching import ROOT

FINISHED = {"state": "finished", "why": "all steps are done"}
BY_A_PERSON = {"state": "stopped", "why": "stop was written", "step": 7, "requeue": False}
BY_THE_SCHEDULER = {**BY_A_PERSON, "requeue": True}
HEALS = {"state": "failed", "why": "a node is gone", "kind": "node_lost", "nodes": [1]}
HOPELESS = {**HEALS, "why": "28 ranks do not fit", "kind": "user"}
FULL_AT_5 = {**HEALS, "why": "80 GiB are full", "kind": "memory", "step": 5}


@pytest.mark.parametrize(
    ("state", "crashes", "code", "why"),
    [
        (FINISHED, 0, DONE, "training has finished"),
        (BY_A_PERSON, 0, DONE, "stopped after step 7: stop was written"),
        (BY_THE_SCHEDULER, 0, START_AGAIN, "stopped after step 7 to go on later: stop was written"),
        (HEALS, 1, START_AGAIN, r"failed: a node is gone \(crash 1 of 3 .*\[GRPO-710\]\)"),
        (HEALS, 3, FAILED, r"failed: a node is gone \(crash 3 of 3 .*\[GRPO-710\]\)"),
        (HOPELESS, 1, FAILED, r"failed \(user\), and starting again would not help: 28 ranks do not fit"),
        (None, 2, START_AGAIN, r"died without a word \(crash 2 of 3 .*\[GRPO-710\]\)"),
        (None, 3, FAILED, r"died without a word \(crash 3 of 3 .*\[GRPO-710\]\)"),
        (None, 0, START_AGAIN, "died without a word"),  # another node counts, or a newer checkpoint is complete
        ({"state": "failed"}, 0, START_AGAIN, "failed: no reason given"),
    ],
)
def test_decide_matches_state_and_crashes(state: dict | None, crashes: int, code: int, why: str) -> None:
    decided, reported = decide(state, answer_to_end(state), crashes, max_crashes=3)
    assert decided == code
    assert re.fullmatch(why, reported)


def test_count_crash_counts_each_attempt_once(tmp_path: Path) -> None:
    record = tmp_path / "crashes.17.json"
    assert [count_crash(record, -1, attempt, limit=3) for attempt in ("0", "0", "1", "1", "2")] == [1, 1, 2, 2, 3]


def test_crash_count_after_newer_complete_checkpoint_resets(tmp_path: Path) -> None:
    def crash(attempt: str) -> int:
        conclude(tmp_path, None, job="17", attempt=attempt, max_crashes=3)
        return json.loads((tmp_path / "crashes.17.json").read_text())["crashes"]

    assert [crash("0"), crash("1")] == [1, 2]
    (tmp_path / "checkpoint-9").mkdir()
    assert crash("2") == 3, "that one is not complete"
    (tmp_path / "checkpoint-9" / "complete.json").touch()
    assert [crash("3"), crash("4"), crash("4")] == [0, 1, 1]
    for step in (10, 8):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "complete.json").touch()
    assert [crash("5"), crash("6")] == [0, 1], "as numbers: 10 is newer than 9"


def test_conclude_of_full_memory_after_first_step_restarts_once(tmp_path: Path) -> None:
    def crash(attempt: str, **state: object) -> int:
        return conclude(tmp_path, FULL_AT_5 | state, job="17", attempt=attempt, max_crashes=9)[0]

    assert crash("0", step=0) == FAILED, "before it every start meets it again"
    (tmp_path / "crashes.17.json").unlink()
    assert [crash("1"), crash("1"), crash("2"), crash("2")] == [START_AGAIN, START_AGAIN, FAILED, FAILED]
    (tmp_path / "checkpoint-9").mkdir()
    (tmp_path / "checkpoint-9" / "complete.json").touch()
    assert [crash("3"), crash("4")] == [START_AGAIN, FAILED], "behind a newer checkpoint, too"


def test_crash_count_after_planned_stop_resets(tmp_path: Path) -> None:
    crashes = tmp_path / "crashes.17.json"
    for attempt in ("0", "1"):
        conclude(tmp_path, HEALS, job="17", attempt=attempt, max_crashes=3)
    conclude(tmp_path, BY_THE_SCHEDULER, job="17", attempt="2", max_crashes=3)
    assert not crashes.exists()
    assert conclude(tmp_path, None, job="17", attempt="3", max_crashes=3)[0] == START_AGAIN
    assert json.loads(crashes.read_text())["crashes"] == 1


def test_conclude_with_follow_counts_no_crashes(tmp_path: Path) -> None:
    for _ in range(4):
        assert conclude(tmp_path, None, job="17", attempt="0", max_crashes=3, follow=True)[0] == START_AGAIN
    assert conclude(tmp_path, HOPELESS, job="17", attempt="0", max_crashes=3, follow=True)[0] == FAILED
    assert not list(tmp_path.iterdir())


def test_crashes_and_state_of_another_job_are_ignored(tmp_path: Path) -> None:
    for attempt in ("0", "1"):
        conclude(tmp_path, None, job="16", attempt=attempt, max_crashes=3)
    assert conclude(tmp_path, None, job="17", attempt="0", max_crashes=2)[0] == START_AGAIN
    assert read_state(tmp_path, lambda state: True) is None
    (tmp_path / "run_state.json").write_text(json.dumps(FINISHED | {"job": "16"}))
    assert read_state(tmp_path, lambda state: state.get("job") == "17") is None
    (tmp_path / "run_state.json").write_text('{"state": "fini')
    assert read_state(tmp_path, lambda state: True) is None, "half a file"


def test_next_attempt_command_follows_run_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def command(attempt: int) -> int:
        return main([str(tmp_path), "--job", "17", "--attempt", str(attempt), "--max_crashes", "2"])

    def attempt(number: int, **state: object) -> None:
        run = RunFolder(tmp_path, {"GRPO_JOB": "17", "GRPO_ATTEMPT": str(number)})
        run.update(state="running")
        if state:
            run.update(**state)
        run.release()

    attempt(0)
    assert [command(0), command(0)] == [START_AGAIN, START_AGAIN], "asked twice, answered the same"
    assert capsys.readouterr().out.count("job 17, attempt 0: died without a word (crash 1 of 2") == 2
    attempt(1, state="stopped", why="asked to", requeue=True)
    assert command(1) == START_AGAIN
    for number, expected in ((2, START_AGAIN), (3, FAILED)):
        attempt(number, state="failed", why="a node is gone")
        assert command(number) == expected
    attempt(4, state="finished", why="all steps are done")
    assert command(4) == DONE


def test_next_attempt_command_runs_without_site_packages(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-S",
        "-m",
        "grpo.ops.launch.next_attempt",
        str(tmp_path),
        "--job",
        "17",
        "--attempt",
        "0",
    ]
    done = subprocess.run(command, cwd=ROOT, env={}, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (START_AGAIN, "")


def test_conclude_without_output_folder_counts_crash(tmp_path: Path) -> None:
    code, why = conclude(tmp_path / "not" / "there", None, job="17", attempt="0", max_crashes=2)
    assert (code, "crash 1 of 2" in why) == (START_AGAIN, True)


def test_next_attempt_command_with_failed_script_returns_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunFolder(tmp_path, {"GRPO_JOB": "17", "GRPO_ATTEMPT": "0"})
    run.update(state="finished", why="all steps are done")
    run.release()
    asked = [str(tmp_path), "--job", "17", "--attempt", "0"]
    assert (main(asked), main([*asked, "--failed"])) == (DONE, FAILED)
    assert "training has finished, but the script failed after it" in capsys.readouterr().out


def test_conclude_with_unusable_crash_record_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "crashes.17.json").write_text("")  # as a machine leaves it that has lost its power
    assert conclude(tmp_path, None, job="17", attempt="0", max_crashes=2)[0] == START_AGAIN

    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    assert conclude(tmp_path, None, job="17", attempt="1", max_crashes=9)[0] == START_AGAIN
    assert "No space left on device" in capsys.readouterr().err

    def stale(path: Path) -> str:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(Path, "read_text", stale)
    assert read_state(tmp_path, lambda state: True) is None


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENAMETOOLONG])
def test_conclude_with_permanently_unwritable_folder_returns_failed(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(path: Path, text: str) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", refuse)
        code, _ = conclude(tmp_path, None, job="17", attempt="0", max_crashes=9)
    assert code == FAILED
    assert f"crashes.17.json: [Errno {number}]" in capsys.readouterr().err


def test_conclude_on_full_disk_fails_after_repeated_crashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(attempt: str) -> int:
        return conclude(tmp_path, None, job="17", attempt=attempt, max_crashes=3)[0]

    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    assert [crash(attempt) for attempt in ("0", "0", "1", "1", "2")] == [START_AGAIN] * 4 + [FAILED]
    (tmp_path / "checkpoint-9").mkdir()
    (tmp_path / "checkpoint-9" / "complete.json").touch()
    assert [crash(attempt) for attempt in ("3", "4", "5", "6")] == [START_AGAIN] * 3 + [FAILED], "as with a record"
    conclude(tmp_path, BY_THE_SCHEDULER, job="17", attempt="7", max_crashes=3)
    assert not list(tmp_path.glob("crashes*")), "what is no crash forgets those before"

    def takes_nothing(path: Path) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(Path, "touch", takes_nothing)
    assert crash("8") == FAILED
