"""Which prompts come when."""

from typing import Any

import pytest
from torch.utils.data import RandomSampler
from trl.trainer.utils import RepeatSampler

from grpo.checkpoints.prompt_order import DrawnSampler, GenerationSampler


def sampler(num_prompts: int = 10, *, shuffle: bool = True, seed: int = 3) -> GenerationSampler:
    return GenerationSampler(
        range(num_prompts), prompts_per_batch=4, num_generations=2, repeats=3, shuffle=shuffle, seed=seed
    )


def test_generation_sampler_in_first_epoch_matches_trl() -> None:
    theirs = RepeatSampler(range(10), mini_repeat_count=2, batch_size=4, repeat_count=3, seed=3)
    assert list(sampler()) == list(theirs)
    assert len(sampler()) == len(theirs) == len(list(theirs)) == 2 * 4 * 2 * 3


def test_generation_sampler_order_depends_on_epoch_and_seed_only() -> None:
    once, twice = sampler(), sampler()
    first = list(twice)
    for one in (once, twice):
        one.set_epoch(1)
    assert list(once) == list(twice) != first
    assert sorted(once.permutation(7)) == list(range(10))
    assert sampler(seed=4).permutation(0) != sampler(seed=3).permutation(0)


def test_generation_batch_by_index_matches_iteration() -> None:
    ordered = sampler(shuffle=False)
    assert list(ordered)[:24] == [0, 0, 1, 1, 2, 2, 3, 3] * 3
    assert ordered.generation_batch(0, 1) == [4, 4, 5, 5, 6, 6, 7, 7]  # rows 8 and 9 fill no batch
    shuffled = sampler()
    shuffled.set_epoch(5)
    rows = list(shuffled)
    assert [shuffled.generation_batch(5, k) for k in (0, 1)] == [rows[0:8], rows[24:32]]
    with pytest.raises(IndexError, match="generation batch 2 of 2"):
        shuffled.generation_batch(5, 2)


def drawn(other: Any, inside: GenerationSampler | None = None) -> DrawnSampler:
    return DrawnSampler(other, prompts_per_batch=4, num_generations=2, repeats=3, seed=3, inside=inside)


def shuffled() -> RepeatSampler:
    return RepeatSampler(range(10), mini_repeat_count=2, batch_size=4, repeat_count=3, seed=3)


def test_drawn_sampler_reads_ahead_and_resumes_in_same_order() -> None:
    theirs, ours = shuffled(), drawn(shuffled())
    epochs = [list(theirs) for _ in range(3)]
    assert len(ours) == len(theirs)
    assert ours.generation_batch(1, 0) == epochs[1][:8]  # before training has come there
    for epoch, rows in enumerate(epochs):
        ours.set_epoch(epoch)
        assert list(ours) == rows
    resumed = drawn(shuffled())
    resumed.check(5, ours.digest(5))
    resumed.set_epoch(2)
    assert list(resumed) == epochs[2]
    with pytest.raises(ValueError, match=r"RepeatSampler.*\[GRPO-213\]"):
        drawn(RepeatSampler(range(10), mini_repeat_count=2, batch_size=4, repeat_count=3)).check(5, ours.digest(5))


def test_drawn_sampler_around_generation_sampler_passes_epoch_on() -> None:
    inside, ours = sampler(), sampler()
    around = drawn(iter_anew(inside), inside)
    for epoch in (0, 1):
        for each in (around, ours):
            each.set_epoch(epoch)
        assert list(around) == list(ours)


def iter_anew(inner: GenerationSampler) -> Any:
    """Without `set_epoch`."""
    return type("Around", (), {"__iter__": lambda self: iter(inner), "__len__": lambda self: len(inner)})()


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (RandomSampler(range(48)), "gives the rows"),
        (RepeatSampler(range(48), mini_repeat_count=1, batch_size=8, repeat_count=1), "gives the rows"),
        (RepeatSampler(range(4), mini_repeat_count=2, batch_size=4, repeat_count=2), "16 rows"),
        (iter([0, 0, 1, 1]), "no length"),
        (None, "no length"),
    ],
    ids=["each row once", "other groups", "no whole batch", "no length", "none"],
)
def test_drawn_sampler_without_groups_raises(other: Any, why: str) -> None:
    with pytest.raises(ValueError, match=rf"_get_train_sampler, .*{why}.*num_generations \(2\) times"):
        drawn(other)


def test_sampled_batch_with_spare_groups_appends_its_own_rows() -> None:
    """Each batch owns its rows: what is trained on of them says nothing of the next one's."""
    spared = GenerationSampler(
        range(20), prompts_per_batch=2, num_generations=2, repeats=1, shuffle=True, seed=3, spare_groups=3
    )
    order = spared.permutation(0)
    assert spared.num_batches == 4
    for index in range(4):
        own = order[5 * index : 5 * (index + 1)]
        assert spared.sampled_batch(0, index) == [row for row in own for _ in range(2)]
        assert spared.generation_batch(0, index) == [row for row in own[:2] for _ in range(2)]
    assert len(list(spared)) == len(spared) == 4 * 2 * 2


def test_prompt_order_with_rows_changed_since_checkpoint_raises() -> None:
    def with_order(orders: dict[int, list[int]]) -> GenerationSampler:
        return GenerationSampler(
            range(10),
            prompts_per_batch=2,
            num_generations=2,
            repeats=1,
            shuffle=True,
            seed=3,
            order=orders.__getitem__,
        )

    before = with_order({0: [9, 8, 7, 6], 1: [1, 2, 3, 3]})
    assert before.is_drawn
    assert not sampler().is_drawn
    assert before.num_batches == 2
    digest = before.digest(3)  # the first of the second epoch is the last
    with_order({0: [9, 8, 7, 6], 1: [1, 2, 0, 0]}).check(3, digest)
    with pytest.raises(ValueError, match=r"prompt_order gives other rows than before the checkpoint.*GRPO-213"):
        with_order({0: [9, 8, 7, 6], 1: [2, 1, 3, 3]}).check(3, digest)
