"""Fixtures: trainers whose engine says what is written down."""

import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo import GRPOTrainer
from grpo.weights import delivery
from tests.support.engines import Script
from tests.support.scripted_trainer import use_scripted_engines
from tests.support.speaking_engine import Make, make_trainer, right, save_model, speaks


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("speaking") / "model")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    """Of the engines that `make`'s trainers start."""
    return use_scripted_engines(monkeypatch)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, script: Script, model: Path, tmp_path: Path) -> Iterator[Make]:
    """A trainer whose engine has this `reply`; closed afterwards."""
    monkeypatch.setattr(delivery, "is_due", lambda sync: False)
    made: weakref.WeakSet[GRPOTrainer] = weakref.WeakSet()  # those that their test holds no more go by themselves

    def trainer(reply: Callable[[str, int], str], reward: Any = right, **more: Any) -> GRPOTrainer:
        script.tokens_of = speaks(reply)
        new = make_trainer(model, tmp_path / "run", reward, **more)
        made.add(new)
        return new

    yield trainer
    for each in made:
        each.close()
