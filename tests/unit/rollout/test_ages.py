"""How old the weights were that have sampled a batch, token by token."""

import pytest

from grpo.rollout.ages import Ages, Moment
from grpo.rollout.batch import Batch
from grpo.rollout.report import GenerationReport, Newer, PolicyLag, generation_metrics
from tests.support.engines import answer


def batch_of(ages: Ages, lengths: dict[int, int]) -> Batch:
    """Of completions that are under way, which end now with so many tokens."""
    batch = Batch(ids=range(min(lengths), max(lengths) + 1), name="a batch", submitted=Moment(step=10))
    for completion, num_tokens in lengths.items():
        batch.add(answer(completion, [5] * num_tokens), engine=0, age=ages.end(completion, num_tokens))
    return batch


def test_ages_over_weight_syncs_match_hand_count() -> None:
    ages = Ages()
    ages.now = Moment(step=10)
    ages.begin(0)
    ages.sync(12, [{0: 30}, {}])
    ages.sync(12, [{0: 35}, {}])  # the same weights once more, around an evaluation
    ages.begin(1)
    ages.sync(14, [{0: 80}, {1: 4}])
    batch = batch_of(ages, {0: 100, 1: 10})
    # 30 tokens of weight sync 0, 50 of weight sync 1, 20 of weight sync 2; and 4 of weight sync 1, 6 of weight sync 2
    assert batch.newer == Newer(versions=0 + 1, steps=0 + 2, token_versions=50 + 40 + 4 + 12, least=0)
    assert batch.policy_versions == {0: 10, 1: 12}
    report = GenerationReport(
        generate_s=1.0, wait_s=0.0, idle_s=0.0, period_s=None, num_tokens=110, num_completions=2, newer=batch.newer
    )
    lag = PolicyLag.of([report], versions=3, steps=6)  # it is used after one more weight sync
    assert (lag.versions, lag.steps, lag.most) == (2.5, 5.0, 3)
    assert lag.token_versions == pytest.approx(3 - 106 / 110)
    metrics = generation_metrics([report], lag)
    assert metrics["rollout/staleness_mean"] == lag.token_versions
    assert metrics["rollout/staleness_max"] == 3


def test_ages_after_engine_death_count_from_new_begin() -> None:
    ages = Ages()
    ages.begin(0)
    ages.sync(1, [{0: 7}])
    ages.begin(0)  # its engine has died
    assert ages.end(0, 20).token_syncs == 20
    assert ages.end(0, 20).first == ages.now  # nothing is kept of one that has ended


def test_ages_of_completion_with_kept_adapter_stay_unchanged() -> None:
    ages = Ages()
    ages.sync(3)
    ages.begin(0, Moment(step=1, syncs=0))
    assert ages.end(0, 20).token_syncs == 0
