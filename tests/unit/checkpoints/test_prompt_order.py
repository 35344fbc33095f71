"""Which prompts come when."""

import pytest
from trl.trainer.utils import RepeatSampler

from grpo.checkpoints.prompt_order import GenerationSampler


def sampler(num_prompts: int = 10, *, shuffle: bool = True, seed: int = 3) -> GenerationSampler:
    return GenerationSampler(
        range(num_prompts), prompts_per_batch=4, num_generations=2, repeats=3, shuffle=shuffle, seed=seed
    )


def test_the_first_epoch_is_trls() -> None:
    theirs = RepeatSampler(range(10), mini_repeat_count=2, batch_size=4, repeat_count=3, seed=3)
    assert list(sampler()) == list(theirs)
    assert len(sampler()) == len(theirs) == len(list(theirs)) == 2 * 4 * 2 * 3


def test_an_epochs_order_does_not_depend_on_what_was_drawn_before() -> None:
    once, twice = sampler(), sampler()
    first = list(twice)
    for one in (once, twice):
        one.set_epoch(1)
    assert list(once) == list(twice) != first
    assert sorted(once.permutation(7)) == list(range(10))
    assert sampler(seed=4).permutation(0) != sampler(seed=3).permutation(0)


def test_a_generation_batch_can_be_asked_for() -> None:
    ordered = sampler(shuffle=False)
    assert list(ordered)[:24] == [0, 0, 1, 1, 2, 2, 3, 3] * 3
    assert ordered.generation_batch(0, 1) == [4, 4, 5, 5, 6, 6, 7, 7]  # rows 8 and 9 fill no batch
    shuffled = sampler()
    shuffled.set_epoch(5)
    rows = list(shuffled)
    assert [shuffled.generation_batch(5, k) for k in (0, 1)] == [rows[0:8], rows[24:32]]
    with pytest.raises(IndexError, match="generation batch 2 of 2"):
        shuffled.generation_batch(5, 2)
