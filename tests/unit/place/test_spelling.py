"""Which name was probably meant."""

import pytest

from grpo.place.spelling import did_you_mean

FLAGS = ["--delta", "--help", "--model_name_or_path", "--learning_rate", "--max_steps", "--warmup_steps"]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("--model", "--model_name_or_path"),  # begins with it, however much longer it is
        ("--learning_rat", "--learning_rate"),
        ("--lerning_rate", "--learning_rate"),
        ("--max-steps", "--max_steps"),
        ("--modle", None),
        ("", None),
    ],
)
def test_did_you_mean_prefers_prefix_matches(name: str, meant: str | None) -> None:
    assert did_you_mean(name, FLAGS) == (f" (did you mean {meant}?)" if meant else "")
