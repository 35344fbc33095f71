"""`bench.scale` with lengths: engines and steps by hand."""

import random

import pytest

from bench.scale_lengths import (
    LAYOUTS,
    SHORT,
    TAIL,
    Layout,
    Lengths,
    colocated,
    simulate,
    step_of,
)
from bench.scale_model import Cluster, Node
from bench.scale_sites import SEQUENCE_S, STEP_S, Site

NODE = Node(
    name="by hand",
    gpus=4,
    parameters=10**9,
    completions=32,
    completion_tokens=1000,
    sample_s=0.1,
    train_s=0.1,
)
EVEN = Cluster(network_gbps=160.0, nvlink_gbps=1600.0, host_gbps=320.0, spread=0.0)
UNEVEN = Cluster(network_gbps=160.0, nvlink_gbps=1600.0, host_gbps=320.0, spread=0.15)


def decoding_s(sequences: int) -> float:
    return STEP_S + SEQUENCE_S * sequences


def test_site_sequence_after_others_end_is_faster() -> None:
    site = Site([1.0], places=8)
    site.add(0, [100, 300])
    assert site.finish(0) == pytest.approx(100 * decoding_s(2) + 200 * decoding_s(1))
    assert (site.tokens, site.owed) == (400, 0)


def test_site_with_full_engine_queues_next_sequence() -> None:
    site = Site([2.0], places=1)
    site.add(0, [100, 100])
    site.add(1, [50])
    assert site.finish(1) == pytest.approx(250 * decoding_s(1) / 2)
    assert site.ends_s[0] == pytest.approx(200 * decoding_s(1) / 2)


def test_site_deals_sequences_by_engine_speed() -> None:
    site = Site([2.0, 1.0], places=8)
    site.add(0, [60] * 6)
    assert [len(engine.running) for engine in site.engines] == [4, 2]


def test_site_pause_delays_sequences() -> None:
    site = Site([1.0], places=8)
    site.add(0, [100])
    site.run_to(0.5)
    site.pause(2.0)
    site.run_to(2.5)
    assert site.finish(0) == pytest.approx(100 * decoding_s(1) + 2.0)
    assert site.busy_s == pytest.approx(100 * decoding_s(1))
    site.pause(1.0)  # at rest: what comes now waits as well
    end_s = site.now
    site.add(1, [100])
    assert site.finish(1) == pytest.approx(end_s + 1.0 + 100 * decoding_s(1))


@pytest.mark.parametrize(("lengths", "mean"), [(SHORT, 1020), (TAIL, 5200)], ids=["answers", "reasoning"])
def test_lengths_match_mean_and_longest(lengths: Lengths, mean: float) -> None:
    rng = random.Random(0)
    found = [length for _ in range(4000) for length in lengths.group(rng)]
    assert max(found) == lengths.longest
    assert sum(found) / len(found) == pytest.approx(mean, rel=0.06)


EQUAL = Lengths(name="equal", median=1000, sigma=0.0, longest=2000, places=8)


def test_step_of_one_node_matches_hand_calculation() -> None:
    """32 completions of 1,000 tokens on 2 engines of 8 places: two waves; 2 ranks train on them for 1.6 s."""
    wave_s, train_s, sync_s = 999 * decoding_s(8), 32 * 0.999 * 0.1 / 2, 0.01
    at = {
        lookahead: step_of(NODE, EVEN, EQUAL, Layout(lookahead=lookahead), nodes=1, reserved=2, steps=4)
        for lookahead in (0, 1, 2, 4)
    }
    assert at[0].step_s == pytest.approx(2 * wave_s + train_s + sync_s, rel=1e-3)
    assert at[1].step_s == pytest.approx(2 * wave_s + sync_s, rel=1e-3)
    assert at[1].training_idle == pytest.approx(1 - train_s / at[1].step_s, rel=1e-3)
    for lookahead in (2, 4):  # engines are never without work, and there is no tail
        assert at[lookahead].step_s == pytest.approx(2 * wave_s + sync_s, rel=0.02)
        assert at[lookahead].engine_idle < 0.02


def test_step_of_long_tail_with_lookahead_4_is_shorter() -> None:
    one, four = (
        step_of(NODE, EVEN, TAIL, Layout(lookahead=lookahead), nodes=1, reserved=2, steps=10) for lookahead in (1, 4)
    )
    assert four.step_s < 0.5 * one.step_s
    assert four.engine_idle < one.engine_idle


def test_step_of_uneven_nodes_is_near_central_queue() -> None:
    local, central = (
        step_of(NODE, UNEVEN, SHORT, Layout(lookahead=4, central=central), nodes=8, reserved=2, steps=20)
        for central in (False, True)
    )
    assert local.step_s < 1.05 * central.step_s


def test_colocated_step_with_equal_lengths_matches_hand_calculation() -> None:
    step = colocated(NODE, EVEN, EQUAL, nodes=1, steps=2)
    assert step.generate_s == pytest.approx(999 * decoding_s(8), rel=1e-3)
    assert step.step_s == pytest.approx(step.generate_s + 32 * 0.999 * 0.1 / 4 + step.sync_s, rel=1e-3)


def test_simulate_with_lengths_covers_layouts_and_is_reproducible() -> None:
    steps = simulate(NODE, UNEVEN, SHORT, node_counts=(1, 2), reserved=2, steps=2)
    assert len(steps) == 2 * (len(LAYOUTS) + 1)
    assert all(0 <= share < 1 for step in steps for share in (step.training_idle, step.engine_idle))
    assert steps == simulate(NODE, UNEVEN, SHORT, node_counts=(1, 2), reserved=2, steps=2)
