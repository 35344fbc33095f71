"""Attempts that share an output folder: who is in it, who wants it to stop, which metrics count."""

import errno
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from grpo.faults.failure import FailureKind
from grpo.ops.mistakes import reporting_mistakes
from grpo.place.timeouts import Timeouts
from grpo.record.files import read_run_state
from grpo.record.folder import RunFolder, record_early_failure

JOB = {"GRPO_JOB": "17", "GRPO_ATTEMPT": "2"}


def test_run_folder_takes_attempt_from_env_or_counts_it(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, JOB)
    assert (folder.job, folder.attempt) == ("17", 2)
    folder.update(state="stopped", step=3)
    folder.release()
    # without a scheduler that counts, we count
    again = RunFolder(tmp_path, {})
    assert again.attempt == 3
    assert str(os.getpid()) in again.job
    assert RunFolder(tmp_path / "fresh", {}).attempt == 0
    assert RunFolder(tmp_path / "slurm", {"SLURM_JOB_ID": "5", "SLURM_RESTART_COUNT": "1"}).attempt == 1


def test_run_folder_held_by_other_job_names_its_job(tmp_path: Path) -> None:
    holder = (
        "import sys; from pathlib import Path; from grpo.record.folder import RunFolder\n"
        "folder = RunFolder(Path(sys.argv[1]), {'GRPO_JOB': '17'}); print('in', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", holder, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "in\n"
        with pytest.raises(ValueError, match=rf"job 17 \(pid {other.pid} on .*GRPO-207.*set another output_dir"):
            RunFolder(tmp_path, {})
    finally:
        other.kill()
        other.communicate()
    RunFolder(tmp_path, {}).release()  # its end, however it came, lets the next one in


def test_run_lock_of_dead_node_is_awaited_until_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network's file system lets go of it in its own time."""
    answers = [False, False, True]
    monkeypatch.setattr("grpo.record.folder._is_taken", lambda lock: answers.pop(0))
    (tmp_path / "_run.lock").write_text("17 (pid 5 on a-node-that-is-off)")
    RunFolder(tmp_path, JOB).release()
    assert not answers
    answers += [False] * 9
    (tmp_path / "_run.lock").write_text("17 (pid 5 on a-node-that-is-off)")
    with pytest.raises(TimeoutError, match=r"held by this job's attempt before: 17 \(pid 5 on a-node"):
        RunFolder(tmp_path, JOB, Timeouts(run_lock_s=0.6))


def test_stop_request_drops_older_ones_and_prefers_person(tmp_path: Path) -> None:
    began = time.time() - 60
    for name in ("stop", "stop.17.1"):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (began - 60, began - 60))
    folder = RunFolder(tmp_path, {**JOB, "GRPO_STARTED": str(began)})
    notes = folder.drop_old_requests()
    assert len(notes) == 2
    assert all("earlier attempt" in note for note in notes)
    assert folder.stop_request() is None
    (tmp_path / "stop.17.2").touch()
    request = folder.stop_request()
    assert request is not None
    assert request.requeue
    (tmp_path / "stop").touch()
    request = folder.stop_request()
    assert request is not None
    assert not request.requeue  # a person's word counts more
    assert folder.a_person_asks
    assert folder.drop_old_requests() == []
    folder.answer_requests()
    assert not list(tmp_path.glob("stop*"))
    # written after the batch script has begun, before the trainer looks: it counts
    (tmp_path / "stop").touch()
    folder.release()
    assert RunFolder(tmp_path, {**JOB, "GRPO_STARTED": str(time.time() - 60)}).drop_old_requests() == []


def test_stop_request_during_rendezvous_is_kept(tmp_path: Path) -> None:
    (tmp_path / "stop").touch()
    made = (tmp_path / "stop").stat().st_mtime
    named = {**JOB, "GRPO_STARTED": str(made + 60)}
    folder = RunFolder(tmp_path, {**named, "GRPO_LAUNCHED": str(made - 60)})
    assert (folder.drop_old_requests(), folder.a_person_asks, folder.state.started) == ([], True, made + 60)
    folder.release()
    folder = RunFolder(tmp_path, {**named, "GRPO_LAUNCHED": str(made + 1)})
    assert (len(folder.drop_old_requests()), folder.a_person_asks) == (1, False)


def test_stop_request_on_failing_file_system_returns_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path, {})
    monkeypatch.setattr(Path, "exists", lambda path: os.stat("/proc/self/mem/stale"))
    assert folder.stop_request() is None
    monkeypatch.undo()
    folder.release()


def test_record_early_failure_of_next_attempt_replaces_older(tmp_path: Path) -> None:
    """A scheduler's job keeps its name."""
    first = RunFolder(tmp_path, {"GRPO_JOB": "17", "GRPO_ATTEMPT": "0", "GRPO_STARTED": "1.5"})
    first.update(state="failed", why="the network")
    first.release()
    for env in ({"GRPO_ATTEMPT": "1"}, {"GRPO_STARTED": "9.5"}):
        record_early_failure(tmp_path, {"GRPO_JOB": "17", **env}, "ValueError: a typo", FailureKind.USER)
        state = read_run_state(tmp_path)
        assert state is not None
        assert (state.why, state.kind) == ("ValueError: a typo", "user")
        first.update(state="running")
        first.update(state="failed", why="the network")


def test_run_state_keeps_first_failure(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, JOB)
    folder.update(state="failed", why="the cause", kind=FailureKind.USER)
    folder.update(state="failed", why="an echo", kind=FailureKind.MACHINE)
    folder.release()
    record_early_failure(tmp_path, JOB, "ValueError: later", FailureKind.USER)
    state = read_run_state(tmp_path)
    assert state is not None
    assert (state.why, state.kind, state.job, state.attempt) == ("the cause", "user", "17", 2)


def test_run_state_after_stop_ignores_failure(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, JOB)
    folder.update(state="stopped", requeue=True)
    folder.update(state="failed", why="the store is gone with its launcher")
    assert folder.state.state == "stopped"
    folder.update(state="running")  # another `train` in the same process
    folder.update(state="failed", why="now really")
    assert folder.state.state == "failed"


def test_run_folder_update_from_threads_is_consistent(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, JOB)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda step: folder.update(step=step), range(50)))
    assert json.loads((tmp_path / "run_state.json").read_text())["step"] == folder.state.step
    assert not list(tmp_path.glob(".run_state*"))


def test_record_early_failure_without_trainer_writes_run_state(tmp_path: Path) -> None:
    record_early_failure(tmp_path / "new", JOB, "ImportError: no module named rewards", FailureKind.USER)
    state = read_run_state(tmp_path / "new")
    assert state is not None
    assert (state.state, state.kind) == ("failed", "user")
    assert "ImportError: no module named rewards" in state.why
    assert read_run_state(tmp_path) is None
    (tmp_path / "run_state.json").write_text("{")
    assert read_run_state(tmp_path) is None


def test_cut_metrics_moves_later_steps_to_attempt_file(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "reward": step}) + "\n" for step in (1, 2, 3, 4)]
    metrics.write_text("".join(lines) + '{"step": 5, "rew')
    RunFolder(tmp_path, {"GRPO_ATTEMPT": "0"}).update(state="failed")
    folder = RunFolder(tmp_path, {"GRPO_ATTEMPT": "1"})
    folder.cut_metrics(2)
    assert metrics.read_text() == "".join(lines[:2])
    assert (tmp_path / "metrics.attempt-0.jsonl").read_text() == "".join(lines[2:]) + '{"step": 5, "rew'
    folder.cut_metrics(0)  # a fresh start in a used folder loses nothing either
    assert metrics.read_text() == ""
    assert (tmp_path / "metrics.attempt-0.jsonl").read_text().endswith("".join(lines[:2]))


def test_tracker_run_after_resume_stays_same(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, {})
    first = folder.tracker_run(resumed=False)
    folder.update()
    folder.release()
    assert RunFolder(tmp_path, {}).tracker_run(resumed=True) == first
    assert RunFolder(tmp_path, {}).tracker_run(resumed=False) != first


def test_run_folder_without_file_locks_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lockf(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.lockf", lockf)
    with pytest.warns(UserWarning, match="GRPO-209"):
        RunFolder(tmp_path, JOB)


def test_reporting_mistakes_with_unusable_folder_raises_original(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("where the folder should be")
    with pytest.raises(ImportError, match="no module named rewards"), reporting_mistakes(tmp_path / "file"):
        raise ImportError("no module named rewards")
    assert (tmp_path / "file").read_text() == "where the folder should be"


def test_reporting_mistakes_on_full_disk_warns_and_raises_original(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("grpo.record.folder.write_atomically", full)
    with (
        pytest.warns(UserWarning, match=r"cannot write .*run_state\.json: .*No space left on device"),
        pytest.raises(ImportError, match="no module named rewards"),
        reporting_mistakes(tmp_path),
    ):
        raise ImportError("no module named rewards")
    monkeypatch.undo()
    RunFolder(tmp_path, {"GRPO_JOB": "another"}).release()
