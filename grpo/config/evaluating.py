"""How evaluation samples, and what it counts: fields of `GRPOConfig`, and their checks."""

from dataclasses import dataclass
from typing import Any

from grpo.config.documented import documented
from grpo.place.spelling import did_you_mean

_OF_A_SET = {"temperature": "temperature", "top_p": "top_p", "max_completion_length": "max_tokens"}
"""What one evaluation set may have of its own, and what vLLM calls it."""


@documented
@dataclass
class EvaluationConfig:
    """Fields of evaluation, beside transformers' `eval_strategy`, `eval_steps` and TRL's `num_generations_eval`."""

    eval_temperature: float | None = None
    """Temperature of evaluation; 0 is greedy. None: temperature."""
    eval_top_p: float | None = None
    """top_p of evaluation. None: top_p."""
    eval_max_completion_length: int | None = None
    """Tokens of a completion in evaluation, at most; all turns together where there are tools. None:
    max_completion_length."""
    eval_sets: dict[str, Any] | str | None = None
    """Of evaluation sets by name (eval_dataset is a dict then), what they have of their own, of temperature, top_p and
    max_completion_length (a JSON object on the command line), for example '{"math": {"temperature": 0}}'."""
    eval_pass_at: list[int] | None = None
    """Which k of eval_pass@k are logged, each at most num_generations_eval. None: 1, 2, 4, 8, ... up to it."""
    eval_pass_reward: float | None = None
    """Reward from which on a completion counts as right in eval_pass@k. None: rewards count as they are, and
    eval_pass@k is the best of k in the mean, which is the same for rewards of 0 and 1."""


def check_evaluating(args: Any) -> None:
    """Raises ValueError: names the value, and what may stand there."""
    of_sets = args.eval_sets or {}
    if not isinstance(of_sets, dict) or not all(isinstance(own, dict) for own in of_sets.values()):
        raise ValueError(
            f"eval_sets is {of_sets!r}; it is an object by set, as in {{'math': {{'temperature': 0}}}}, of "
            f"{', '.join(_OF_A_SET)}"
        )
    for name, own in of_sets.items():
        for key, value in own.items():
            if key not in _OF_A_SET:
                raise ValueError(
                    f"eval_sets has {key!r} for {name!r}{did_you_mean(key, _OF_A_SET)}: a set has "
                    f"{', '.join(_OF_A_SET)} of its own"
                )
            _check(f"eval_sets {name}.{key}", key, value, args)
    for key in _OF_A_SET:
        _check(f"eval_{key}", key, getattr(args, f"eval_{key}"), args)
    num_generations = args.num_generations_eval or args.num_generations
    wrong = [k for k in args.eval_pass_at or [] if not 1 <= k <= num_generations]
    if wrong:
        raise ValueError(
            f"eval_pass_at has {', '.join(map(str, wrong))}; each is at least 1, and at most the completions of a "
            f"prompt, num_generations_eval, of which there are {num_generations}"
        )


def _check(name: str, key: str, value: Any, args: Any) -> None:
    if value is None:
        return
    if key == "max_completion_length":
        limit = args.vllm_max_model_length
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value!r}; it is a number of tokens, 1 or more")
        if limit is not None and value >= limit:
            raise ValueError(
                f"{name} is {value}, but an engine holds {limit} tokens of prompt and completion together: lower it, "
                f"or raise vllm_max_model_length"
            )
    elif not isinstance(value, int | float) or not (value >= 0 if key == "temperature" else 0 < value <= 1):
        raise ValueError(f"{name} is {value!r}; it is {'0 or more' if key == 'temperature' else 'in (0, 1]'}")


def evaluation_sampling(args: Any, of_set: str | None) -> dict[str, Any]:
    """vLLM's sampling arguments that an evaluation has in place of training's.

    Args:
        of_set: the set's name; None: there is one, without a name.
    """
    own = {key: value for key in _OF_A_SET if (value := getattr(args, f"eval_{key}")) is not None}
    own |= (args.eval_sets or {}).get(of_set, {})
    return {_OF_A_SET[key]: value for key, value in own.items()}


def passes_at(args: Any) -> list[int]:
    """The k of `eval_pass@k`, ascending."""
    num_generations = args.num_generations_eval or args.num_generations
    if args.eval_pass_at is not None:
        return sorted(set(args.eval_pass_at))
    return [2**power for power in range(num_generations.bit_length())]
