"""Batches that sample spare groups, in the real trainer over an engine that says what is written down."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from datasets import Dataset

from grpo import GRPOTrainer
from grpo.faults.failure import JobFailed
from grpo.rollout.spares import chosen_groups
from tests.support.made_up_tools import times
from tests.support.speaking_engine import Make, calculates, right, steps_of
from tests.support.speaking_trainers import make, model, script

__all__ = ["make", "model", "script"]

REPLIES = ("1", "22", "333")
SPARE = {"spare_groups": 2, "max_steps": 1}  # beside two groups that are trained on


def numbers(count: int = 12) -> Dataset:
    """Prompts of which those with an even first number are flat."""
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": f"{row}*7"}] for row in range(count)]})


def is_flat(text: str) -> bool:
    found = re.search(r"(\d+)\*7", text)
    assert found
    return int(found[1]) % 2 == 0


def replies(text: str, seed: int) -> str:
    return ("1" if is_flat(text) else REPLIES[seed % 3]) + "<e>"


def length(completions: list[Any], prompts: list[Any], log_extra: Callable[..., None], **_: Any) -> list[float]:
    log_extra("asked", [prompt[-1]["content"] for prompt in prompts])
    return [float(len(said[-1]["content"])) for said in completions]


def asked(trainer: GRPOTrainer) -> list[str]:
    """Of each row that was trained on last, what its prompt says."""
    return [prompt[-1]["content"] for prompt in trainer._logs["prompt"]]


@pytest.mark.parametrize("seed", range(4))
def test_spare_groups_batch_trains_on_first_groups_with_spread(seed: int, make: Make) -> None:
    trainer = make(replies, length, train_dataset=numbers(), config={**SPARE, "seed": seed})
    (line,) = steps_of(trainer)
    assert trainer._parts.order.sampler is not None
    sampled = [f"{row}*7" for row in trainer._parts.order.sampler.sampled_batch(0, 0)[::4]]
    flat = [is_flat(text) for text in sampled]
    chosen = [sampled[number] for number in chosen_groups(np.array(flat), 2)]
    assert asked(trainer) == [text for text in chosen for _ in range(4)]
    said = [completion[-1]["content"] for completion in trainer._logs["completion"]]
    assert [*trainer._logs["rewards"]["length"]] == [float(len(text)) for text in said]
    assert [*trainer._logs["extra"]["asked"]] == asked(trainer)
    assert line["spare_groups/frac_zero_std_sampled"] == sum(flat) / 4
    assert line["frac_reward_zero_std"] == line["spare_groups/frac_zero_std_trained"] == sum(map(is_flat, chosen)) / 2
    assert line["spare_groups/extra_completions"] == 8
    assert line["spare_groups/used"] == sum(text in sampled[2:] for text in chosen)


def test_sampled_batch_after_training_covers_each_prompt_once(make: Make) -> None:
    config = {**SPARE, "max_steps": 3}
    trainer = make(replies, length, train_dataset=numbers(), config=config)
    steps_of(trainer)
    assert trainer._parts.order.sampler is not None
    assert trainer._parts.order.sampler.num_batches == 3
    rows = [row for index in range(3) for row in trainer._parts.order.sampler.sampled_batch(0, index)[::4]]
    assert sorted(rows) == [*range(12)]


def test_spare_groups_with_lookahead_match_on_policy_curve(make: Make) -> None:
    def curve(**config: Any) -> list[tuple[float, ...]]:
        names = "reward", "reward_std", "spare_groups/used", "completions/mean_length"
        trainer = make(replies, length, train_dataset=numbers(24), config={**SPARE, "max_steps": 4, **config})
        return [tuple(step[name] for name in names) for step in steps_of(trainer)]

    assert curve() == curve(generation_lookahead=1)


def test_spare_groups_of_zero_match_default_curve(make: Make) -> None:
    names = "reward", "loss", "grad_norm", "completions/mean_length"

    def curve(**config: Any) -> list[tuple[float, ...]]:
        trainer = make(replies, length, train_dataset=numbers(), config=config)
        return [tuple(step[name] for name in names) for step in steps_of(trainer)]

    assert curve() == curve(spare_groups=0, max_flat_batches=1)


def test_spare_groups_with_tools_keep_messages_and_rewards_in_rows(make: Make) -> None:
    """Messages, masks and rewards stay with their rows."""
    trainer = make(calculates, right, tools=[times], config={**SPARE, "max_steps": 2})
    assert [line["loss"] == line["loss"] for line in steps_of(trainer)] == [True, True]
    said = [completion[-1]["content"] for completion in trainer._logs["completion"]]
    products = [int(text.split("*")[0]) * int(text.split("*")[1]) for text in asked(trainer)]
    pairs = zip(said, products, strict=True)
    assert [*trainer._logs["rewards"]["right"]] == [float(text == str(product)) for text, product in pairs]
    assert {len(completion) for completion in trainer._logs["completion"]} == {1, 3}


def test_max_flat_batches_when_reached_ends_job(make: Make) -> None:
    config = {**SPARE, "max_steps": 9, "max_flat_batches": 2}
    trainer = make(lambda text, seed: "1<e>", length, train_dataset=numbers(), config=config)
    with pytest.raises(JobFailed, match=r"2 generation batches in a row \(max_flat_batches\).*GRPO-618"):
        trainer.train()
    assert trainer.state.global_step == 1


def test_flat_groups_over_20_batches_warn_once(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    config = {**SPARE, "max_steps": 24, "num_train_epochs": 50, "max_flat_batches": 0}
    trainer = make(lambda text, seed: "1<e>", length, train_dataset=numbers(), config=config)
    with caplog.at_level("WARNING"):
        trainer.train()
    reported = [record.getMessage() for record in caplog.records if "teach nothing" in record.getMessage()]
    assert len(reported) == 1
    assert "in 20 batches 100 % of the sampled groups" in reported[0]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"rollout_func": lambda prompts, trainer: {}}, "spare_groups is 2 with rollout_func"),
        ({"train_dataset": numbers().to_iterable_dataset()}, "set dataset_streaming to False, or spare_groups to 0"),
        ({"config": {"spare_groups": -1}}, "spare_groups is -1; it is a whole number, 0 or more"),
        ({"config": {"spare_groups": 30}}, "train_dataset has 12 rows, but a generation batch takes 32 prompts"),
        ({"config": {**SPARE, "accelerator_config": {"split_batches": True}}}, "accelerator_config has split_batches"),
    ],
)
def test_spare_groups_with_unsupported_setting_raises(more: dict[str, Any], said: str, make: Make) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        make(replies, length, **{"train_dataset": numbers(), "config": SPARE, **more})


def test_spare_groups_with_own_sampler_raises(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from trl.trainer.utils import RepeatSampler

    def sampler(self: Any, dataset: Any = None) -> RepeatSampler:
        return RepeatSampler(self.train_dataset, mini_repeat_count=4, batch_size=2, seed=1)

    monkeypatch.setattr(GRPOTrainer, "_get_train_sampler", sampler)
    trainer = make(replies, length, train_dataset=numbers(), config=SPARE)
    with pytest.raises(ValueError, match="spare_groups is 2 with a sampler of _get_train_sampler"):
        trainer.train()


# -- a curriculum -----------------------------------------------------------------------------------------------------


def test_prompt_order_per_epoch_sets_prompt_sequence(make: Make) -> None:
    """Of a part of the rows, another one in each epoch."""
    orders = {0: [7, 5, 3, 1], 1: [1, 3, 9, 11]}
    seen: list[str] = []

    def noted(completions: list[Any], prompts: list[Any], **_: Any) -> list[float]:
        seen.extend(dict.fromkeys(prompt[-1]["content"] for prompt in prompts))
        return [0.0] * len(completions)

    config = {"max_steps": 4, "num_train_epochs": 2}
    trainer = make(replies, noted, train_dataset=numbers(), config=config, prompt_order=orders.__getitem__)
    trainer.train()
    assert seen == [f"{row}*7" for epoch in (0, 1) for row in orders[epoch]]


@pytest.mark.parametrize(
    ("orders", "said"),
    [
        ({0: [0, 1, 2, 99]}, "prompt_order gives row 99 in epoch 0, but the data set has 12"),
        ({0: [0, 1, 2, 3], 1: [0, 1]}, "prompt_order gives 2 rows in epoch 1, and 4 before"),
    ],
)
def test_prompt_order_with_wrong_rows_raises(orders: dict[int, list[int]], said: str, make: Make) -> None:
    config = {"max_steps": 4, "num_train_epochs": 2}
    trainer = make(replies, length, train_dataset=numbers(), config=config, prompt_order=orders.__getitem__)
    with pytest.raises(ValueError, match=said):
        trainer.train()
