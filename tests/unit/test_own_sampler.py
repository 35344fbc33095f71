"""A subclass with a sampler of its own, and a stream: read ahead, read again after a resume, or refused by name."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import RandomSampler, Sampler
from trl.trainer.utils import RepeatSampler

from grpo import GRPOTrainer
from grpo.weights import delivery
from tests.support.engines import Script
from tests.support.scripted_trainer import of_kind, train, use_scripted_engines


class Shuffled(Sampler):
    """Orders of its own, with the numbers that everybody draws: each epoch's rows are shuffled by Python."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows

    def order(self) -> list[int]:
        return random.sample(range(self.num_rows), self.num_rows)

    def __iter__(self) -> Iterator[int]:
        rows = self.order()
        for first in range(0, self.num_rows - 1, 2):
            yield from (row for row in rows[first : first + 2] for _ in range(4))

    def __len__(self) -> int:
        return self.num_rows // 2 * 8


class Harder(Shuffled):
    """An epoch after the other begins further behind."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def order(self) -> list[int]:
        return [(row + self.epoch) % self.num_rows for row in range(self.num_rows)]


class ByReward(Shuffled):
    """Looks at how training goes."""

    trainer: GRPOTrainer

    def order(self) -> list[int]:
        steps = self.trainer.state.global_step
        return [(row + steps) % self.num_rows for row in range(self.num_rows)]


class Reversed(Sampler):
    """Around the trainer's own."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[int]:
        return (self.inner.num_prompts - 1 - row for row in self.inner)

    def __len__(self) -> int:
        return len(self.inner)


SAMPLERS: dict[str, Callable[[Any, Callable[[], Any]], Any]] = {
    "a generator": lambda trainer, own: RepeatSampler(trainer.train_dataset, 4, 2, 1, shuffle=True, seed=7),
    "random numbers": lambda trainer, own: Shuffled(len(trainer.train_dataset)),
    "torch's": lambda trainer, own: Reversed(own()),
    "set_epoch": lambda trainer, own: Harder(len(trainer.train_dataset)),
}


def subclass(sampler: Callable[[Any, Callable[[], Any]], Any]) -> type[GRPOTrainer]:
    class Own(GRPOTrainer):
        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return sampler(self, super()._get_train_sampler)

    return Own


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    monkeypatch.setattr(delivery, "is_due", lambda sync: False)
    return use_scripted_engines(monkeypatch)


def stop_and_go_on(tiny_model: Path, output_dir: Path, story: list[tuple], **settings: Any) -> GRPOTrainer:
    """What goes on after step 3."""
    with pytest.raises(SystemExit):
        train(tiny_model, output_dir, story, stop_at=3, **settings)
    (output_dir / "stop").unlink(missing_ok=True)
    return train(tiny_model, output_dir, story, resume_from_checkpoint="auto", **settings)


def weights(trainer: GRPOTrainer) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]


@pytest.mark.parametrize("name", SAMPLERS)
def test_resume_with_own_sampler_matches_uninterrupted_run(
    name: str, tiny_model: Path, tmp_path: Path, script: Script
) -> None:
    """Epochs of two batches, and a stop in the middle of the second one: what is read ahead is what comes, and what
    came. Without lookahead, in one case, the weights are the same too."""
    settings = {"kind": subclass(SAMPLERS[name]), "num_prompts": 5, "max_steps": 6}
    whole = train(tiny_model, tmp_path / "whole", story := [], **settings)
    in_one = of_kind(story, "score")
    assert len({*in_one}) > 2, "each epoch has its own order"
    ahead = {} if name == "random numbers" else {"generation_lookahead": 1}
    resumed = stop_and_go_on(tiny_model, tmp_path / "parts", story := [], **settings, **ahead)
    assert of_kind(story, "score") == in_one
    assert of_kind(story, "step") == [1, 2, 3, 4, 5, 6]
    if not ahead:
        assert all(map(torch.equal, weights(resumed), weights(whole)))


def test_resume_of_stream_in_second_pass_keeps_order(tiny_model: Path, tmp_path: Path, script: Script) -> None:
    """Stopped in the middle of its second pass, each of which has an order of its own."""
    settings = {"is_stream": True, "num_prompts": 5, "max_steps": 6}
    train(tiny_model, tmp_path / "whole", story := [], **settings)
    in_one = of_kind(story, "score")
    stop_and_go_on(tiny_model, tmp_path / "parts", story := [], **settings)
    assert of_kind(story, "score") == in_one


def test_own_sampler_leaves_random_state_of_training_unchanged(
    tiny_model: Path, tmp_path: Path, script: Script
) -> None:
    def last(kind: type[GRPOTrainer]) -> float:
        train(tiny_model, tmp_path / kind.__name__, [], kind=kind, max_steps=2)
        return random.random()

    assert last(subclass(SAMPLERS["random numbers"])) == last(GRPOTrainer)


def test_own_sampler_without_groups_raises(tiny_model: Path, tmp_path: Path, script: Script) -> None:
    kind = subclass(lambda trainer, own: RandomSampler(trainer.train_dataset))
    with pytest.raises(ValueError, match=r"_get_train_sampler.*RandomSampler.*num_generations \(4\)"):
        train(tiny_model, tmp_path, story := [], kind=kind)
    assert story == []
    assert script.samples == []


def test_resume_with_sampler_reading_trainer_state_raises(tiny_model: Path, tmp_path: Path, script: Script) -> None:
    """It may be read ahead: a batch is drawn once."""

    def sampler(trainer: Any, own: Any) -> Any:
        made = ByReward(len(trainer.train_dataset))
        made.trainer = trainer
        return made

    settings = {"kind": subclass(sampler), "num_prompts": 5, "max_steps": 4, "generation_lookahead": 1}
    with pytest.raises(ValueError, match=r"ByReward.*\[GRPO-213\]"):
        stop_and_go_on(tiny_model, tmp_path, story := [], **settings)
    assert of_kind(story, "step") == [1, 2, 3]
