"""Which weights the real trainer brings to its engines, and which it refuses; with engines that keep nothing."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from grpo.weights.wire_format import WireFormat
from tests.support.engines import Script, agree
from tests.support.scripted_trainer import make_trainer, use_scripted_engines

NORM = "model.norm.weight"


@pytest.mark.parametrize("is_trained", [True, False])
def test_train_with_unplaced_weight_raises_only_if_trained(
    is_trained: bool,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def passes_over(method: str, arguments: dict[str, Any]) -> Any:
        return [WireFormat(unplaced=(NORM,)).dumps()] if method == "wire_format" else agree(method, arguments)

    script = use_scripted_engines(monkeypatch, control=passes_over)
    trainer = make_trainer(tiny_model, tmp_path / "run", script.story, vllm_max_logprob_gap=1e9, max_steps=1)
    trainer.model.get_parameter(NORM).requires_grad_(is_trained)
    try:
        with pytest.raises(ValueError, match=rf"{NORM} \[GRPO-505\]") if is_trained else contextlib.nullcontext():
            trainer.train()
    finally:
        trainer.close()
    assert capsys.readouterr().out.count(f"the engines have no place for {NORM}, and sample without") == 1
    assert [method for method, _ in script.started[0].calls].count("finish_weight_update") == (0 if is_trained else 1)


class AfterStep2(TrainerCallback):
    def __init__(self, act: Callable[[], Any]) -> None:
        self._act = act

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            self._act()


def syncs(script: Script) -> list[tuple[bool, bool]]:
    """Of each: whether the frozen norm was in it, and whether its bits were checked."""
    found: list[tuple[bool, bool]] = []
    for method, kwargs in script.started[0].calls:
        if method == "start_weight_update":
            found.append((False, False))
        elif method == "update_weights" and NORM in kwargs["update_info"]["names"]:
            found[-1] = (True, found[-1][1])
        elif method == "check_bits":
            assert kwargs["sent"]
            found[-1] = (found[-1][0], True)
    return found


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    return use_scripted_engines(monkeypatch)


def train_twice(tiny_model: Path, tmp_path: Path, script: Script, act: Callable[[torch.nn.Parameter], Any]) -> None:
    """Three syncs each time, with the last norm frozen."""
    trainer = make_trainer(tiny_model, tmp_path / "run", script.story, vllm_max_logprob_gap=1e9)
    norm = trainer.model.get_parameter(NORM)
    norm.requires_grad_(False)
    trainer.add_callback(AfterStep2(lambda: act(norm)))
    try:
        trainer.train()
        trainer.train()
    finally:
        trainer.close()


def test_frozen_weights_after_write_or_new_training_are_resent(
    tiny_model: Path, tmp_path: Path, script: Script
) -> None:
    train_twice(tiny_model, tmp_path, script, lambda norm: norm.data.add_(1))  # torch counts no write to it
    assert syncs(script) == [(True, True), (False, True), (True, True)] * 2
