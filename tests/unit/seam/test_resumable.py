"""What of stopping and saving needs no training."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainerControl

from grpo.checkpoints.checkpoints import CompleteRecord
from grpo.faults.failure import FailureKind, FailureRecord, JobFailed
from grpo.faults.signals import StopLead
from grpo.seam.ordering import PromptOrder
from grpo.seam.resuming import Resuming, changed_sampling, ends_generation_batch
from grpo.seam.run import JobRun
from tests.support.made_up_checkpoints import make
from tests.support.scripted_trainer import make_trainer, of_kind, use_scripted_engines


def run_of(view: Any = None, **folder: Any) -> JobRun:
    """Of a trainer that has done no step."""
    run = JobRun(view or SimpleNamespace(steps_done=0))
    run.folder = SimpleNamespace(**folder)  # type: ignore[assignment]
    return run


def resuming(**parts: Any) -> Resuming:
    parts = {"view": None, "run": None, "order": None, "saving": None, "cut": None} | parts
    return Resuming(**parts)


@pytest.mark.parametrize(("lead", "warned"), [("200", False), ("199", True), (None, False)])
def test_stop_lead_too_short_warns(lead: str | None, warned: bool) -> None:
    said: list[str] = []
    judge = StopLead(lead, said.append)
    for now in (1000.0, 1100.0):
        judge.batch_ended(now)
    judge.saved(1100.0, 1140.0)
    judge.batch_ended(1200.0)  # 60 s after the save: not the longest
    assert (judge.longest_batch_s, judge.save_s) == (100.0, 40.0)
    assert len(said) == warned
    if warned:
        assert "comes 199 s before the end" in said[0]
        assert "[GRPO-709]" in said[0]
        assert "--signal=B:USR1@200" in said[0]


@pytest.mark.parametrize(
    ("micro_batches", "per_batch", "ends"),
    [((0, 4), 4, True), ((0, 2), 4, False), ((2, 4), 4, True), ((0, 8), 4, True), ((8, 16), 3, True)],
)
def test_ends_generation_batch_matches_table(micro_batches: tuple[int, int], per_batch: int, ends: bool) -> None:
    """Also where batches and optimizer steps do not end together: at the first step after it."""
    assert ends_generation_batch(*micro_batches, per_batch) == ends


def test_stop_in_generation_batch_waits_for_its_end_and_skips_evaluation(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked after the first of a batch's two steps, where the second would be evaluated: the time may be short."""
    story = use_scripted_engines(monkeypatch).story
    settings = {"gradient_accumulation_steps": 1, "steps_per_generation": 2, "max_steps": 6}
    settings |= {"eval_strategy": "steps", "eval_steps": 2, "vllm_max_logprob_gap": 1e9}
    stopping = make_trainer(tiny_model, tmp_path, story, stop_at=1, **settings)
    try:
        with pytest.raises(SystemExit):
            stopping.train()
    finally:
        stopping.close()
    assert of_kind(story, "step") == [1, 2]
    assert of_kind(story, "evaluate") == []
    assert (tmp_path / "checkpoint-2" / "complete.json").exists()


def test_recording_failures_on_full_disk_raises_original_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def update(**_: Any) -> None:
        raise OSError("No space left on device")

    failing = run_of(update=update, path=tmp_path)
    with pytest.raises(ZeroDivisionError), failing.recording_failures("unused"):
        raise ZeroDivisionError
    assert f"cannot write {tmp_path / 'run_state.json'}: No space left on device" in capsys.readouterr().out


def test_record_failure_passes_step_and_record_on() -> None:
    reported: list[dict[str, Any]] = []
    where: dict[str, Any] = {"node": 1, "rank": 8, "host": "n1", "phase": "sync"}
    record = FailureRecord(**where, cause="EngineDied: it was killed", kind=FailureKind.ENGINE, nodes=(1,))
    view = SimpleNamespace(steps_done=0)
    failing = run_of(view, update=lambda **changes: reported.append(changes))
    with pytest.raises(JobFailed), failing.recording_failures("unused"):
        raise JobFailed(record)
    view.steps_done = 4
    failing.record_failure(str(record), FailureKind.USER, record=record)
    assert [(each["failure"], each["kind"], each["nodes"], each.get("step")) for each in reported] == [
        (record, FailureKind.ENGINE, (1,), None),  # there was no step yet: the state's own stays
        (record, FailureKind.USER, (1,), 4),
    ]


@pytest.mark.parametrize(("code", "reported"), [(0, []), (3, ["SystemExit: 3"])])
def test_recording_failures_of_script_exit_records_nonzero_code(code: int, reported: list[str]) -> None:
    causes: list[str] = []
    ending = run_of(update=lambda *, why, **_: causes.append(why))
    with pytest.raises(SystemExit), ending.recording_failures("unused"):
        raise SystemExit(code)
    assert causes == reported


def test_run_epoch_of_finished_run_trains_no_step() -> None:
    control = TrainerControl()
    view: Any = SimpleNamespace(state=SimpleNamespace(global_step=6, max_steps=6), control=control)
    PromptOrder(view, None).run_epoch(lambda **_: pytest.fail("it has run"), epoch=2)
    assert control.should_training_stop


@pytest.mark.parametrize(("at_step_end", "saved_step"), [(None, 0), ({}, 4)])
def test_save_last_step_of_saved_step_does_nothing(at_step_end: dict[str, Any] | None, saved_step: int) -> None:
    saved: list[int] = []
    view = SimpleNamespace(state=SimpleNamespace(global_step=4), save_checkpoint=lambda: saved.append(1))
    ending = resuming(view=view, saving=SimpleNamespace(saved_step=saved_step))
    ending._at_step_end = at_step_end
    ending._save_last_step()
    assert saved == []


RECORD = CompleteRecord(step=3, world_size=2, files={}, versions={}, sampling={"seed": 1, "num_generations": 4})


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (RECORD, "resuming with other settings than the checkpoint's is not exact: seed was 1, is 2"),
        (replace(RECORD, sampling={"seed": 2, "num_generations": 4}), None),
        (replace(RECORD, reshaped_from=3), "was written by 3 training processes and made for 2: weights, moments"),
    ],
)
def test_resume_with_changed_settings_warns(record: CompleteRecord, said: str | None) -> None:
    reported = changed_sampling(record, {"seed": 2, "num_generations": 4})
    assert len(reported) == (said is not None)
    assert said is None or said in reported[0]


def test_clear_away_after_attempts_quarantines_later_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (3, 6, 7, 8):
        make(tmp_path, step)
    make(tmp_path, 9, complete=False)
    said: list[str] = []
    run: Any = SimpleNamespace(path=tmp_path, previous_attempt=0)
    monkeypatch.setattr("grpo.seam.resuming.say", said.append)
    resuming()._clear_away(run, 3, by_itself=True)
    assert said[0] == f"{tmp_path / 'checkpoint-9'} was not finished by an earlier attempt: deleted"
    aside = tmp_path / "abandoned.attempt-0"
    assert [line.partition(":")[0] for line in said[1:4]] == [
        f"checkpoint-{step} is quarantined as {aside / f'checkpoint-{step}'}" for step in (8, 7, 6)
    ]
    assert said[4].endswith("was quarantined, and 2 later ones are: deleted")
    assert len(said) == 5


@pytest.mark.parametrize(("by_itself", "first_step"), [(True, 0), (False, 3)])
def test_clear_away_on_start_by_user_quarantines_without_deleting(
    by_itself: bool, first_step: int, tmp_path: Path
) -> None:
    """A line without --resume, or with an older checkpoint's name: all that was there is quarantined."""
    for step in (3, 6, 7, 8, 9):
        make(tmp_path, step)
    run: Any = SimpleNamespace(path=tmp_path, previous_attempt=0)
    resuming()._clear_away(run, first_step, by_itself=by_itself)
    aside = tmp_path / "abandoned.attempt-0"
    left = {f"checkpoint-{step}" for step in (3, 6, 7, 8, 9) if step > first_step}
    assert {folder.name for folder in aside.iterdir()} == left
