"""The guard on real tokens, by numbers worked out by hand and by those of recorded runs."""

import json
from pathlib import Path

import pytest

from grpo.weights.guard import IN_A_ROW, REFERENCE_BATCHES, Drift, LogprobGuard, gaps_by_node

RECORDED = json.loads(Path(__file__).with_name("demo_gaps.json").read_text())


def drifts_of(gaps: list[float], guard: LogprobGuard | None = None) -> list[tuple[int, Drift]]:
    """With the batch, counted from 1, in which each was noticed."""
    guard = guard or LogprobGuard()
    return [(batch, drift) for batch, gap in enumerate(gaps, 1) for drift in guard.judge({0: gap})]


def test_gaps_by_node_averages_over_tokens_of_all_ranks() -> None:
    ranks = [{0: (0.5, 10), 1: (1.0, 2)}, {1: (2.0, 8)}, {2: (0.0, 0)}]
    assert gaps_by_node(ranks) == {0: 0.05, 1: 0.3}
    assert gaps_by_node([{}, {}]) == {}


def test_guard_with_three_high_batches_in_row_reports_drift() -> None:
    usual = [0.012] * REFERENCE_BATCHES
    assert drifts_of([*usual, 0.037, 0.037, 0.035, 0.037, 0.037]) == []
    ((batch, drift),) = drifts_of([*usual, 0.037, 0.038, 0.039])
    assert batch == REFERENCE_BATCHES + IN_A_ROW
    assert drift == Drift(node=0, gap=pytest.approx(0.038), reference=0.012, limit=pytest.approx(0.036))


def test_guard_with_gap_below_one_hundredth_reports_none() -> None:
    usual = [1e-6] * REFERENCE_BATCHES
    assert drifts_of([*usual, *[0.0099] * 9]) == []
    assert [batch for batch, _ in drifts_of([*usual, *[0.0101] * 3])] == [REFERENCE_BATCHES + 3]


def test_guard_reference_stays_fixed_during_slow_rise() -> None:
    """A rolling one would be carried along."""
    slowly = [0.01 * 1.03**batch for batch in range(100)]
    first, *_ = [batch for batch, _ in drifts_of(slowly)]
    assert first == 45  # the reference is 0.01 x 1.03^4.25; three times that is passed in the 43rd


def test_guard_reference_with_faulty_batches_is_not_raised() -> None:
    gaps = [0.005] * 10 + [0.05] * 13
    assert [batch for batch, _ in drifts_of(gaps)] == [23]


def test_guard_compares_each_node_with_its_own_reference() -> None:
    guard = LogprobGuard()
    for _ in range(REFERENCE_BATCHES):
        assert guard.judge({0: 0.001, 1: 0.05}) == []
    for _ in range(IN_A_ROW - 1):
        assert guard.judge({0: 0.02, 1: 0.05}) == []
    assert guard.judge({1: 0.05}) == [], "of the other it has no tokens in this batch"
    assert [drift.node for drift in guard.judge({0: 0.02, 1: 0.05})] == [0]
    assert guard.num_alarms == 1
    again = guard.restarted()
    assert again.num_alarms == 1
    assert drifts_of([0.02] * 100, again) == []


@pytest.mark.parametrize("run", RECORDED["healthy"])
def test_guard_on_healthy_demo_runs_reports_no_drift(run: str) -> None:
    gaps = RECORDED["healthy"][run]
    assert len(gaps) == 150
    assert drifts_of(gaps) == []


STALE = RECORDED["layer 1 stays as it was after step 10"]


@pytest.mark.parametrize("run", STALE)
def test_guard_with_stale_layer_reports_drift_within_20_batches(run: str) -> None:
    (noticed, _), *_ = drifts_of(STALE[run])
    assert 10 < noticed <= 30
