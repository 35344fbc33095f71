"""`report_every_s`: pages while a run trains, and how the last one comes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainerCallback

from grpo.ops.train.arguments import GRPOScriptArguments
from grpo.ops.train.training import train
from grpo.record.folder import RunFolder


class Trainer:
    """Logs once, and raises `ends` if there is one."""

    def __init__(self, folder: Path, ends: BaseException | None) -> None:
        self.args = SimpleNamespace(output_dir=str(folder))
        self.run = RunFolder(folder, {})
        self.run.begin_attempt()
        self.ends = ends
        self.pages: Any = None

    def is_world_process_zero(self) -> bool:
        return True

    def add_callback(self, callback: TrainerCallback) -> None:
        self.pages = callback

    def train(self, resume_from_checkpoint: Any) -> None:
        if self.pages is not None:
            self.pages.on_log(self.args, None, None)
        if self.ends is not None:
            raise self.ends
        self.run.update(state="finished", step=1)


def run(folder: Path, every_s: float, ends: BaseException | None = None) -> Trainer:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 1, "time": 1.0, "attempt": 0, "reward": 0.5}\n')
    trainer: Any = Trainer(folder, ends)
    script = GRPOScriptArguments(report_every_s=every_s)
    training = SimpleNamespace(output_dir=str(folder), resume_from_checkpoint=None)
    arguments: Any = SimpleNamespace(script=script, training=training)
    try:
        train(trainer, arguments)
    finally:
        trainer.run.release()
    return trainer


def test_report_every_s_writes_page_in_training_and_at_end(tmp_path: Path) -> None:
    run(tmp_path / "run", 1e-9)
    assert (tmp_path / "run" / "logs" / "report.log").read_text().count("report.html") == 2
    assert ">finished<" in (tmp_path / "run" / "report.html").read_text()


def test_report_every_s_on_system_exit_writes_no_page(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        run(tmp_path / "run", 1e-9, SystemExit(85))
    assert not (tmp_path / "run" / "report.html").exists()


def test_report_every_s_of_zero_writes_no_page(tmp_path: Path) -> None:
    assert run(tmp_path / "run", 0.0).pages is None
    assert not (tmp_path / "run" / "report.html").exists()


def test_report_every_s_below_zero_raises() -> None:
    with pytest.raises(ValueError, match=r"report_every_s is -1.0; it must be 0 or more"):
        GRPOScriptArguments(report_every_s=-1.0)
