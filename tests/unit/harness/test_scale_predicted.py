"""What the simulation says of the steps of `bench.overlap --ragged`, where it can be worked out by hand."""

import math

import pytest

from bench.scale_predicted import predict, rate_of

ENGINE = {"engine: a decoding step": 5e-3, "engine: more for each sequence": 1e-4}


def of_one_length(lookahead: int, *, train_s: float, sampling_beside: float = 1.0) -> tuple[float, float]:
    """All of 64 tokens: cut where their mean is."""
    measured = ENGINE | {
        "sampling beside training / alone": sampling_beside,
        f"lookahead {lookahead}: step": 9.0,
        f"lookahead {lookahead}: weight sync": 0.1,
        f"lookahead {lookahead}: waiting for completions": 9.0 - 0.1 - train_s,
        f"lookahead {lookahead}: tokens of a completion": 64.0,
    }
    figures = [{"name": name, "median": value} for name, value in measured.items()]
    predicted = predict({"figures": figures, "settings": {"cut at": 64, "completions": 32}})
    return predicted[lookahead]


SAMPLE_S = 64 * (5e-3 + 32 * 1e-4)


@pytest.mark.parametrize(
    ("lookahead", "train_s", "step_s"),
    [
        (0, 0.3, SAMPLE_S + 0.1 + 0.3),
        (1, 0.3, SAMPLE_S + 0.1),
        (1, 0.8, 0.8 + 0.1),
        (4, 1.5, 1.5 + 0.1),  # engines that wait for ranks
    ],
)
def test_predict_for_equal_lengths_matches_hand_calculation(lookahead: int, train_s: float, step_s: float) -> None:
    assert of_one_length(lookahead, train_s=train_s) == (pytest.approx(step_s, rel=0.01), 9.0)


def test_predict_with_training_beside_sampling_adds_slowdown() -> None:
    ahead, _ = of_one_length(1, train_s=0.3, sampling_beside=1.25)
    assert ahead == pytest.approx(0.3 + (SAMPLE_S - 0.3 / 1.25) + 0.1, rel=0.01)
    on_policy, _ = of_one_length(0, train_s=0.2, sampling_beside=1.25)
    assert on_policy == pytest.approx(0.2 + SAMPLE_S + 0.1, rel=0.01)


def test_predict_with_lookahead_4_shares_engine_steps() -> None:
    step_s, _ = of_one_length(4, train_s=0.1)
    assert 64 * 32 * 1e-4 + 0.1 < step_s < SAMPLE_S + 0.1


@pytest.mark.parametrize("tokens", [10.0, 60.0, 150.0])
def test_rate_of_truncated_lengths_keeps_mean(tokens: float) -> None:
    rate = rate_of(tokens, 256)
    assert (1 - math.exp(-rate * 256)) / rate == pytest.approx(tokens)


def test_predict_without_result_is_empty() -> None:
    assert predict(None) == {}
