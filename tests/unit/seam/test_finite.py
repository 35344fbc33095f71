"""Weights and gradients that are no numbers."""

import logging
from math import nan
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from grpo.checkpoints.checkpoints import newest_complete
from grpo.checkpoints.rank_state import first_not_finite
from grpo.faults.failure import FailureKind, GrpoError, JobFailed
from tests.support.scripted_trainer import make_trainer, use_scripted_engines


class Spoils(TrainerCallback):
    """Makes one weight a NaN in the second step."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            weight = kwargs["model"].model.layers[1].mlp.up_proj.weight
            with torch.no_grad():
                weight[3, 4] = float("nan")


def test_save_with_nan_weights_raises_and_writes_no_checkpoint(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_scripted_engines(monkeypatch)
    folder = tmp_path / "run"
    trainer = make_trainer(tiny_model, folder, [], save_strategy="steps", save_steps=1, vllm_max_logprob_gap=1e9)
    trainer.add_callback(Spoils())
    try:
        with pytest.raises(
            (GrpoError, JobFailed), match=r"after step 2 .*up_proj\.weight on rank 0.*\[GRPO-711\]"
        ) as reported:
            trainer.train()
    finally:
        trainer.close()
    assert reported.value.kind == FailureKind.USER
    assert newest_complete(folder) == folder / "checkpoint-1"
    assert not (folder / "checkpoint-2").exists()


def test_nonfinite_gradients_three_times_in_row_warn(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use_scripted_engines(monkeypatch)
    trainer = make_trainer(tiny_model, tmp_path / "run", [])
    trainer.close()

    def reported(*norms: float) -> int:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            for norm in norms:
                trainer.state.global_step += 1
                trainer._parts.saving.look_at_norm(torch.tensor(norm))
                trainer._parts.saving.look_at_norm(torch.tensor(norm))  # as at the end of an epoch
        return sum("[GRPO-712]" in record.getMessage() for record in caplog.records)

    nan, inf = float("nan"), float("inf")
    assert reported(1.0, nan, nan, 1.0, inf, nan) == 0
    assert reported(nan) == 1
    assert "the gradients of the last 3 steps" in caplog.text
    assert reported(nan, nan) == 0
    assert reported(nan) == 1
    assert reported(0.5, nan) == 0


@pytest.mark.parametrize(
    ("rank", "shard", "odd"), [(0, [1.0, nan], True), (1, [1.0, 2.0], False), (2, [1.0, nan], False)]
)
def test_first_not_finite_ignores_shard_padding(
    rank: int, shard: list[float], odd: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five numbers on three ranks of two each: the last one's second is whatever the memory had."""
    model = torch.nn.Linear(1, 1, bias=False)
    model.weight.ds_tensor, model.weight.ds_numel = torch.tensor(shard), 5  # type: ignore[attr-defined]
    model.weight.ds_process_group = None  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: rank)
    assert first_not_finite(model) == ("weight" if odd else "")
