"""Which run W&B and Trackio get, and for how long."""

import os
from pathlib import Path

import pytest
from transformers import TrainingArguments

from grpo.record.trackers import naming_run


def test_naming_run_with_two_trainers_gives_separate_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    monkeypatch.delenv("WANDB_RESUME", raising=False)
    for name in ("one", "two"):
        args = TrainingArguments(output_dir=str(tmp_path / name))
        with naming_run(args, f"id-{name}"):
            assert (os.environ["WANDB_RUN_ID"], os.environ["WANDB_RESUME"]) == (f"id-{name}", "allow")
            assert args.run_name == f"{name}-id-{name}"
        assert args.run_name is None
        assert not {"WANDB_RUN_ID", "WANDB_RESUME"} & os.environ.keys()


def test_naming_run_keeps_names_of_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    monkeypatch.delenv("WANDB_RESUME", raising=False)
    args = TrainingArguments(output_dir=str(tmp_path), run_name="seen")
    with naming_run(args, "id"):
        assert (os.environ["WANDB_RUN_ID"], args.run_name) == ("mine", "seen")
    assert (os.environ["WANDB_RUN_ID"], args.run_name) == ("mine", "seen")
    assert "WANDB_RESUME" not in os.environ
