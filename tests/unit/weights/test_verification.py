"""Weight syncs that are verified: the real trainer over an engine whose log-probabilities are off by a given amount."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import TrainerCallback

from grpo import GRPOTrainer
from grpo.weights.proof import trainer_logprobs
from tests.support.engines import Script, agree
from tests.support.scripted_trainer import make_trainer, use_scripted_engines


class OffBy:
    """Answers of an engine that computes what the trainer does, but for what a test adds to a verification."""

    def __init__(self, script: Script) -> None:
        self.trainer: GRPOTrainer
        self.off: Callable[[int], np.ndarray | float] = lambda verification: 0.0
        """Of the n-th verification, counted from 1; [P, L-1] or one number for all."""
        self.num_verifications = 0
        script.control = self

    def __call__(self, method: str, kwargs: dict[str, Any]) -> Any:
        if method != "prompt_logprobs":
            return agree(method, kwargs)
        self.num_verifications += 1
        own = trainer_logprobs(self.trainer.model, kwargs["prompts"], contextlib.nullcontext())
        return (own + self.off(self.num_verifications)).tolist()


class AfterStep(TrainerCallback):
    def __init__(self, step: int, act: Callable[[], None]) -> None:
        self.step, self.act = step, act

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.act()


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    return use_scripted_engines(monkeypatch)


@pytest.fixture
def engine(script: Script) -> OffBy:
    return OffBy(script)


def make(tiny_model: Path, folder: Path, script: Script, engine: OffBy, **settings: Any) -> GRPOTrainer:
    trainer = engine.trainer = make_trainer(tiny_model, folder, script.story, num_prompts=4, **settings)
    return trainer


def names_sent(script: Script, push: int) -> set[str]:
    """Of the `push`-th weight sync, counted from 1, to the first engine."""
    syncs: list[set[str]] = []
    for method, kwargs in script.started[0].calls:
        if method == "start_weight_update":
            syncs.append(set())
        elif method == "update_weights":
            syncs[-1].update(kwargs["update_info"]["names"])
    return syncs[push - 1]


def test_a_full_sync_that_is_required_is_whole_and_verified(
    tiny_model: Path, tmp_path: Path, script: Script, engine: OffBy
) -> None:
    trainer = make(tiny_model, tmp_path, script, engine, max_steps=12)
    trainer.model.model.layers[0].requires_grad_(False)
    frozen = {f"model.layers.0.{name}" for name, _ in trainer.model.model.layers[0].named_parameters()}
    delivery = lambda: trainer._local._serving.delivery  # noqa: E731
    trainer.add_callback(AfterStep(11, lambda: delivery().require_full_sync()))
    try:
        trainer.train()
        found = delivery().verification
    finally:
        trainer.close()
    assert frozen <= names_sent(script, 1)
    assert not frozen & names_sent(script, 11)
    assert frozen <= names_sent(script, 12)
    assert engine.num_verifications == 11, "the first ten, and the one that was required"
    assert (found.number, found.policy_version, found.gap.mean) == (12, 11, 0.0)
