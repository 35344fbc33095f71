"""How evaluation samples: what a set has of its own, and what is refused."""

from typing import Any

import pytest

from grpo import GRPOConfig
from grpo.config.options import evaluation_sampling, passes_at


def config(**options: Any) -> GRPOConfig:
    return GRPOConfig(use_cpu=True, bf16=False, report_to="none", num_generations=8, **options)


def test_evaluation_sampling_of_set_overrides_common_settings() -> None:
    args = config(
        eval_temperature=0.6,
        eval_top_p=0.9,
        eval_max_completion_length=512,
        eval_sets='{"greedy": {"temperature": 0, "top_p": 1.0}, "long": {"max_completion_length": 2048}}',
    )
    assert evaluation_sampling(args, None) == {"temperature": 0.6, "top_p": 0.9, "max_tokens": 512}
    assert evaluation_sampling(args, "greedy") == {"temperature": 0, "top_p": 1.0, "max_tokens": 512}
    assert evaluation_sampling(args, "long") == {"temperature": 0.6, "top_p": 0.9, "max_tokens": 2048}
    assert evaluation_sampling(config(), "any") == {}


@pytest.mark.parametrize(
    ("options", "at"),
    [({}, [1, 2, 4, 8]), ({"num_generations_eval": 6}, [1, 2, 4]), ({"eval_pass_at": [5, 1, 5]}, [1, 5])],
)
def test_passes_at_defaults_to_powers_of_two(options: dict[str, Any], at: list[int]) -> None:
    assert passes_at(config(**options)) == at


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"eval_temperature": -1.0}, "eval_temperature is -1.0; it is 0 or more"),
        ({"eval_top_p": 0.0}, r"eval_top_p is 0.0; it is in \(0, 1\]"),
        ({"eval_max_completion_length": 0}, "eval_max_completion_length is 0; it is a number of tokens"),
        ({"eval_max_completion_length": 64, "vllm_max_model_length": 64}, "raise vllm_max_model_length"),
        ({"eval_sets": {"math": {"temprature": 0}}}, r"'temprature' for 'math' \(did you mean temperature\?\)"),
        ({"eval_sets": {"math": 0}}, "eval_sets is {'math': 0}; it is an object by set"),
        ({"eval_sets": {"math": {"top_p": 2}}}, "eval_sets math.top_p is 2"),
        ({"eval_pass_at": [1, 16]}, "eval_pass_at has 16; .* of which there are 8"),
    ],
)
def test_evaluation_options_with_invalid_values_raise(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        config(**options)
