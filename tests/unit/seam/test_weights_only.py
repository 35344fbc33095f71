"""While a checkpoint is loaded, nobody's `torch.load` runs code of a pickle: DeepSpeed asks for it to."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo import GRPOTrainer
from tests.support.scripted_trainer import make_trainer, use_scripted_engines


class Code:
    def __reduce__(self) -> tuple:
        return print, ("code of the checkpoint runs",)


def test_torch_load_during_resume_refuses_pickled_code(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    use_scripted_engines(monkeypatch)
    refused: list[str] = []
    torch.save(Code(), tmp_path / "code.pt")

    class Loads(GRPOTrainer):
        def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
            if checkpoint is not None:
                with pytest.raises(pickle.UnpicklingError, match="print"):
                    torch.load(tmp_path / "code.pt", weights_only=False)
                refused.append(checkpoint)
            super()._load_optimizer_and_scheduler(checkpoint)

    def run(max_steps: int, **more: Any) -> GRPOTrainer:
        saves = {"save_strategy": "steps", "save_steps": 1, "vllm_max_logprob_gap": 1e9}
        trainer = make_trainer(tiny_model, tmp_path / "run", [], kind=Loads, max_steps=max_steps, **saves, **more)
        try:
            trainer.train()
        finally:
            trainer.close()
        return trainer

    run(1)
    assert refused == []
    trainer = run(2, resume_from_checkpoint="auto")
    assert refused == [str(tmp_path / "run" / "checkpoint-1")]
    assert trainer.state.global_step == 2
    assert "code of the checkpoint runs" not in capsys.readouterr().out
    torch.load(tmp_path / "code.pt", weights_only=False)  # afterwards it is the user's again
    assert "code of the checkpoint runs" in capsys.readouterr().out
