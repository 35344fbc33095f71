"""Callbacks of a user's: what they add to a checkpoint is part of it, and what they raise is recorded."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import TrainerCallback

from grpo import GRPOConfig, GRPOTrainer
from grpo.checkpoints.checkpoints import read_complete, verify
from grpo.faults.failure import FailureRecord, JobFailed
from tests.support.speaking_engine import Make, calculates


class Merges(TrainerCallback):
    """Writes a file into the checkpoint, as TRL's `MergeModelCallback` does (1.16), and changes one that is there."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        assert not (folder / "files-0.json").exists(), "what is in it is being written already"
        (folder / "merged").mkdir()
        (folder / "merged" / "weights").write_bytes(bytes(10_000))
        with (folder / "trainer_state.json").open("a") as file:
            file.write("\n")


def test_checkpoint_includes_files_added_by_callbacks(tiny_model: Path, tmp_path: Path) -> None:
    settings = {"use_vllm": False, "use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True}
    steps = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "max_completion_length": 4}
    batch = {"per_device_train_batch_size": 2, "num_generations": 2, "gradient_checkpointing": False}
    trainer = GRPOTrainer(
        model=str(tiny_model),
        reward_funcs=lambda completions, **columns: [0.0] * len(completions),
        args=GRPOConfig(output_dir=str(tmp_path / "run"), **settings, **steps, **batch),
        train_dataset=Dataset.from_dict({"prompt": ["1+1="] * 8}),
        callbacks=[Merges()],
    )
    try:
        trainer.train()
    finally:
        trainer.close()
    for step in (1, 2):
        folder = tmp_path / "run" / f"checkpoint-{step}"
        record = read_complete(folder)
        assert record.files["merged/weights"] == 10_000
        verify(folder, record, record.files)
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700, "in TRL's modes, too"


def test_run_state_after_remote_failure_records_its_cause(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch raises the job's record in place of an error that another rank's death has caused here."""
    record = FailureRecord(node=0, rank=1, host="a", phase="train", cause="the process of rank 1 was killed")

    class Broken(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            raise RuntimeError("Connection closed by peer")

    @contextlib.contextmanager
    def guard() -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise JobFailed(record) from error

    trainer = make(calculates, config={"max_steps": 1}, callbacks=[Broken()])
    monkeypatch.setattr(trainer._parts.run.watch, "guard", guard)
    with pytest.raises(JobFailed, match="rank 1 was killed"):
        trainer.train()
    state = json.loads((Path(trainer.args.output_dir) / "run_state.json").read_text())
    assert state["why"].endswith(str(record)), state
