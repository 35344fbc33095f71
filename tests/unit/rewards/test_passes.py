"""pass@k and avg@n of an evaluation, held to all choices of k completions, one by one."""

from itertools import combinations
from math import comb

import numpy as np
import pytest

from grpo.rewards.passes import Passes, best_of

RANDOM = np.random.default_rng(3)


def passes(rewards: np.ndarray, **options: object) -> dict[str, float]:
    """Of one function's rewards, [prompts, n], in two batches."""
    given = {"names": ["f"], "weights": np.ones(1), "num_generations": rewards.shape[1], "at": [1, 2], **options}
    counted = Passes(**given)  # type: ignore[arg-type]
    rows = rewards.reshape(-1, 1)
    counted.add(rows[: len(rows) // 2])
    counted.add(rows[len(rows) // 2 :])
    return dict(counted.metrics())


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_best_of_rewards_is_mean_over_all_choices(k: int) -> None:
    rewards = RANDOM.normal(size=(4, 5)).round(1)  # some are equal
    by_hand = [np.mean([max(chosen) for chosen in combinations(row, k)]) for row in rewards]
    assert best_of(rewards, k) == pytest.approx(by_hand, abs=1e-12)


@pytest.mark.parametrize("k", [1, 2, 8])
def test_best_of_binary_rewards_is_unbiased_pass_at_k(k: int) -> None:
    rewards = RANDOM.integers(0, 2, size=(6, 8)).astype(float)
    right = rewards.sum(1).astype(int)
    assert best_of(rewards, k) == pytest.approx([1 - comb(8 - c, k) / comb(8, k) for c in right], abs=1e-12)


def test_passes_with_padded_last_batch_ignore_filler_rows() -> None:
    rewards = np.array([[0.0, 1.0], [0.0, 0.0], [1.0, 1.0]])
    assert passes(rewards, num_rows=4) == {"pass@1": 0.25, "pass@2": 0.5, "avg@2": 0.25}
    assert passes(rewards)["avg@2"] == 0.5


def test_passes_with_pass_reward_count_by_threshold() -> None:
    rewards = np.array([[0.2, 1.2], [0.2, 0.0]])  # 1 for the answer, 0.2 for its form
    assert passes(rewards, pass_reward=1.0) == {"pass@1": 0.25, "pass@2": 0.5, "avg@2": pytest.approx(0.4)}
    assert passes(rewards)["pass@2"] == pytest.approx(0.7)


def test_passes_of_several_functions_report_total_and_each() -> None:
    counted = Passes(names=["a", "b"], weights=np.array([1.0, 0.5]), num_generations=2, at=[2])
    counted.add(np.array([[1.0, 0.0], [0.0, 1.0]]))
    assert counted.metrics() == {
        "pass@2": 1.0,
        "avg@2": 0.75,
        "rewards/a/pass@2": 1.0,
        "rewards/a/avg@2": 0.5,
        "rewards/b/pass@2": 1.0,
        "rewards/b/avg@2": 0.5,
    }


def test_passes_count_nan_as_zero_and_empty_as_nothing() -> None:
    assert passes(np.array([[np.nan, 1.0]])) == {"pass@1": 0.5, "pass@2": 1.0, "avg@2": 0.5}
    assert Passes(names=["f"], weights=np.ones(1), num_generations=2, at=[1]).metrics() == {}
