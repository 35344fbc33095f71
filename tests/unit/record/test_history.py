"""`run.json`: every attempt, and every way in which one can end."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from grpo.faults.failure import FailureKind, FailureRecord
from grpo.record.folder import RunFolder, record_early_failure
from grpo.record.history import RunHistory

ENV = {"GRPO_JOB": "17"}
RECORD = FailureRecord(node=1, rank=8, host="n1", phase="sync", cause="EngineDied: killed by signal 9")

BEGUN = """
import os, sys
from pathlib import Path
from grpo.record.folder import RunFolder
folder = RunFolder(Path(sys.argv[1]), {"GRPO_JOB": "17"})
folder.begin_attempt({"max_steps": 5}, {"num_nodes": 1})
"""


def attempts(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "run.json").read_text())["attempts"]


def begun(folder: Path, **env: str) -> RunFolder:
    run = RunFolder(folder, ENV | env)
    run.begin_attempt({"max_steps": 5}, {"num_nodes": 2, "hosts": ["n0", "n1"]})
    return run


def in_another_process(folder: Path, then: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", BEGUN + then, str(folder)], capture_output=True, text=True, timeout=120, check=False
    )


def test_run_history_follows_attempt_from_start_to_end(tmp_path: Path) -> None:
    run = begun(tmp_path, GRPO_STARTED="5.5")
    (entry,) = attempts(tmp_path)
    assert (entry["attempt"], entry["job"], entry["started"], entry["ended"]) == (0, "17", 5.5, None)
    assert (entry["state"], entry["why"], entry["failure"], entry["from_step"]) == ("running", "", None, 0)
    assert entry["arguments"] == {"max_steps": 5}
    assert entry["topology"] == {"num_nodes": 2, "hosts": ["n0", "n1"]}
    assert entry["command"][0] == sys.argv[0]
    assert entry["versions"].keys() >= {"grpo", "torch", "trl", "transformers"}
    assert entry["python"].startswith("3.")
    run.update(state="running", step=3, from_step=3)
    run.update(step=4, restarts=("after step 3: engine 0 is back",))
    (entry,) = attempts(tmp_path)
    assert (entry["from_step"], entry["step"], entry["restarts"]) == (
        3,
        4,
        ["after step 3: engine 0 is back"],
    )
    run.update(state="stopped", step=5, why="asked to")
    (entry,) = attempts(tmp_path)
    assert (entry["state"], entry["why"], entry["step"]) == ("stopped", "asked to", 5)
    assert entry["ended"] > 1e9
    run.update(state="failed", why="the store is gone with its launcher", failure=RECORD)
    assert attempts(tmp_path) == [entry]  # what stopped as asked has not failed


def test_run_history_keeps_failure_record_over_attempts(tmp_path: Path) -> None:
    run = begun(tmp_path)
    run.update(state="failed", why="ValueError: an echo")  # what this rank has seen by itself
    run.update(state="failed", why=str(RECORD), failure=RECORD)
    run.update(state="failed", failure=FailureRecord(node=0, rank=0, host="n0", phase="end", cause="a later one"))
    run.release()
    begun(tmp_path, GRPO_ATTEMPT="1").update(state="finished")
    first, second = attempts(tmp_path)
    assert first["failure"] == RECORD.as_dict()
    assert (first["why"], first["state"]) == ("ValueError: an echo", "failed")
    assert (second["attempt"], second["state"], second["failure"]) == (1, "finished", None)


def test_run_history_with_second_train_continues_attempt(tmp_path: Path) -> None:
    run = begun(tmp_path)
    run.update(state="failed", failure=RECORD)
    run.update(state="running", from_step=2, step=2)
    (entry,) = attempts(tmp_path)
    assert (entry["state"], entry["ended"], entry["failure"], entry["from_step"]) == ("running", None, None, 2)


def test_run_history_after_sigkill_closes_attempt_as_failed(tmp_path: Path) -> None:
    ended = in_another_process(tmp_path, "folder.update(step=2); os.kill(os.getpid(), 9)")
    assert ended.returncode == -9, ended.stderr
    assert attempts(tmp_path)[0]["state"] == "running"
    lines = [{"step": 3, "attempt": 0}, {"step": 4, "attempt": 0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 5, "att')
    os.utime(tmp_path / "metrics.jsonl", (4e9, 4e9))
    run = RunFolder(tmp_path, {"GRPO_JOB": "17"})
    assert run.attempt == 1
    run.begin_attempt()
    first, second = attempts(tmp_path)
    assert (first["state"], first["why"], first["kind"]) == ("failed", "ended without a word", None)
    assert (first["step"], first["ended"]) == (4, 4e9)  # the step it had written, and when it wrote last
    assert second["state"] == "running"


def test_run_history_after_sigkill_before_training_counts_attempt(tmp_path: Path) -> None:
    """`run_state.json` does not know of it."""
    in_another_process(tmp_path, "os.kill(os.getpid(), 9)")
    assert not (tmp_path / "run_state.json").exists()
    (tmp_path / "metrics.jsonl").write_text('{"step": 90, "attempt": 7}\n')  # of an earlier one
    run = begun(tmp_path)
    assert run.attempt == 1
    assert [(each["attempt"], each["state"], each["step"]) for each in attempts(tmp_path)] == [
        (0, "failed", 0),
        (1, "running", 0),
    ]


@pytest.mark.parametrize(
    ("then", "state", "why", "code"),
    [
        ("", "finished", "the script ended without training", 0),
        ("raise KeyError('reward')", "failed", "KeyError: 'reward'", 1),
        ("folder.update(state='finished')", "finished", "", 0),
        ("folder.update(state='finished'); raise KeyError('x')", "finished", "", 1),
        ("os.fork() == 0 and sys.exit()\nos.wait()\nfolder.update(state='finished')", "finished", "", 0),
        ("try:\n  raise KeyError('x')\nfinally:\n  folder.release()", "failed", "KeyError: 'x'", 1),
    ],
)
def test_run_history_at_script_exit_closes_attempt(tmp_path: Path, then: str, state: str, why: str, code: int) -> None:
    assert in_another_process(tmp_path, then).returncode == code
    (entry,) = attempts(tmp_path)
    assert (entry["state"], entry["why"], entry["ended"] is None) == (state, why, False)


def test_run_history_after_exit_of_forked_child_stays_running(tmp_path: Path) -> None:
    then = "child = os.fork()\nif not child: sys.exit()\nos.wait()\nprint(open(folder.path / 'run.json').read())"
    reported = in_another_process(tmp_path, then)
    assert json.loads(reported.stdout)["attempts"][0]["state"] == "running"


def test_run_history_with_failure_before_trainer_records_attempt(tmp_path: Path) -> None:
    record_early_failure(tmp_path, ENV, "ImportError: no module named rewards", FailureKind.USER)
    (entry,) = attempts(tmp_path)
    assert (entry["state"], entry["kind"], entry["why"]) == (
        "failed",
        "user",
        "ImportError: no module named rewards",
    )
    assert entry["ended"] is not None


def test_run_history_with_failure_before_training_updates_same_attempt(tmp_path: Path) -> None:
    run = begun(tmp_path)
    record_early_failure(tmp_path, ENV, "NameError: trainr", FailureKind.USER)
    run.release()
    (entry,) = attempts(tmp_path)
    assert (entry["state"], entry["why"], entry["arguments"]) == ("failed", "NameError: trainr", {"max_steps": 5})


def test_run_history_with_several_trainers_keeps_one_entry_each(tmp_path: Path) -> None:
    first = begun(tmp_path)
    first.release()  # it has not trained, but ended
    second = begun(tmp_path)
    second.update(state="finished")
    second.release()
    third = begun(tmp_path)
    assert [each["state"] for each in attempts(tmp_path)] == ["finished", "finished", "running"]
    fourth = begun(tmp_path)
    third.release()
    assert [each["state"] for each in attempts(tmp_path)] == ["finished", "finished", "finished", "running"]
    del fourth  # nobody holds it: it has ended
    assert attempts(tmp_path)[-1]["state"] == "finished"


def test_run_history_with_repeated_attempt_number_keeps_entries_apart(tmp_path: Path) -> None:
    """A second trainer of a process, or a rank that torchrun has started again within an attempt."""
    env = {"GRPO_ATTEMPT": "3", "GRPO_STARTED": "5.5"}
    for why in ("one", "two"):
        run = begun(tmp_path, **env)
        run.update(state="failed", why=why)
        run.release()
    assert [(each["attempt"], each["why"]) for each in attempts(tmp_path)] == [(3, "one"), (3, "two")]
    begun(tmp_path, GRPO_STARTED="5.5").release()  # by a launcher that counts no attempts
    starts = [each["started"] for each in attempts(tmp_path)]
    assert len(set(starts)) == 3, "by which spans are distinguished"


@pytest.mark.parametrize(
    "content", ["", '{"attempts": [{"att', "[]", '{"attempts": [{"attempt": 0}]}', '{"attempts": 3}']
)
def test_run_history_with_damaged_file_quarantines_it(tmp_path: Path, content: str) -> None:
    (tmp_path / "run.damaged-1.json").write_text("an earlier one")
    (tmp_path / "run.json").write_text(content)
    with pytest.warns(UserWarning, match=r"run\.json is damaged .*begun anew; it is now .*run\.damaged-2\.json"):
        begun(tmp_path)
    assert (tmp_path / "run.damaged-2.json").read_text() == content
    assert (tmp_path / "run.damaged-1.json").read_text() == "an earlier one"
    assert len(attempts(tmp_path)) == 1


def test_run_history_with_unreadable_file_keeps_it(tmp_path: Path) -> None:
    (tmp_path / "run.json").mkdir()
    with pytest.warns(UserWarning, match=r"cannot read .*run\.json: .*; this attempt is not in it"):
        run = begun(tmp_path)
    run.update(state="finished")
    assert (tmp_path / "run.json").is_dir()


def test_run_history_on_full_disk_warns_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    run = begun(tmp_path)
    monkeypatch.setattr("grpo.record.history.write_atomically", full)
    with pytest.warns(UserWarning, match=r"cannot write .*run\.json: .*No space left"):
        run.update(step=1)
    with warnings.catch_warnings(action="error"):
        run.update(state="failed", why="the cause")
    assert run.state.why == "the cause"  # which stands in run_state.json
    monkeypatch.undo()
    run.update(state="failed", failure=RECORD)  # there is space again: nothing was lost
    assert (attempts(tmp_path)[0]["why"], attempts(tmp_path)[0]["failure"]) == ("the cause", RECORD.as_dict())


def test_run_history_with_unwritable_run_state_records_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    run = begun(tmp_path)
    monkeypatch.setattr("grpo.record.folder.write_atomically", full)
    with pytest.raises(OSError, match="No space left"):
        run.update(state="failed", why="the cause")
    assert attempts(tmp_path)[0]["why"] == "the cause"


def test_run_history_before_attempt_writes_nothing(tmp_path: Path) -> None:
    history = RunHistory(tmp_path)
    assert history.next_attempt() == 0
    history.follow({"state": "running"})
    history.close()
    assert not list(tmp_path.iterdir())
