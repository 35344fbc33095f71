"""Fixtures: trainers whose engine says what is written down."""

import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo import GRPOTrainer
from grpo.weights import delivery
from tests.support.scripted_trainer import use_scripted_engines
from tests.support.speaking_engine import Make, SpeakingEngine, make_trainer, right, save_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("speaking") / "model")


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path) -> Iterator[Make]:
    """A trainer whose engine has this `reply`; closed afterwards."""
    use_scripted_engines(monkeypatch)
    monkeypatch.setattr(GRPOTrainer, "start_engine", SpeakingEngine)
    monkeypatch.setattr(SpeakingEngine, "asked_for", [], raising=False)
    monkeypatch.setattr(delivery, "is_due", lambda push: False)
    made: weakref.WeakSet[GRPOTrainer] = weakref.WeakSet()  # those that their test holds no more go by themselves

    def trainer(reply: Callable[[str, int], str], reward: Any = right, **more: Any) -> GRPOTrainer:
        monkeypatch.setattr(SpeakingEngine, "reply", staticmethod(reply), raising=False)
        new = make_trainer(model, tmp_path / "run", reward, **more)
        made.add(new)
        return new

    yield trainer
    for each in made:
        each.close()
