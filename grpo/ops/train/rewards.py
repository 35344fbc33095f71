"""Reward functions by name: TRL's, ours, and any dotted path."""

import importlib
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from grpo.ops.train.code_reward import code_reward
from grpo.ops.train.completion import Completion, text_of
from grpo.ops.train.reasoning import reasoning_gym_answer
from grpo.place.spelling import did_you_mean

RewardFunc = Callable[..., Any]

TRL_REWARDS = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward", "get_soft_overlong_punishment")


def exact_match(completions: Sequence[Completion], answer: Sequence[str], **_: Any) -> list[float]:
    """Return 1.0 if a completion equals its row's `answer` except for surrounding spaces, else 0.0.

    A conversational completion (a list of messages) counts by the content of its last message.
    """
    return [
        float(text_of(completion).strip() == str(a).strip()) for completion, a in zip(completions, answer, strict=True)
    ]


def agent_reward(completions: Sequence[Any], reward: Sequence[float | None] | None = None, **_: Any) -> list[Any]:
    """Return the column `reward` of each row's agent (see `grpo.agents`); None leaves a row unscored.

    Raises:
        ValueError: no agent has returned it, and the data set has no such column either.
    """
    if reward is None:
        raise ValueError(
            "agent_reward reads the column 'reward' of what agents return, and none has returned one: return "
            "{'reward': ...} from the agent, or write it into a command's last line"
        )
    assert len(reward) == len(completions)
    return [*reward]


_OWN: dict[str, RewardFunc] = {f.__name__: f for f in (exact_match, code_reward, agent_reward, reasoning_gym_answer)}
REWARD_NAMES = (*_OWN, *TRL_REWARDS)


def load_reward_funcs(names: Iterable[str]) -> list[RewardFunc]:
    """Load reward functions by name: `REWARD_NAMES`, or dotted paths with the working directory importable.

    An error inside an imported module is raised unchanged.

    Raises:
        ValueError: a name is unknown.
    """
    return [_load(name) for name in names]


def _load(name: str) -> RewardFunc:
    if name in _OWN:
        return _OWN[name]
    if name in TRL_REWARDS:
        import trl.rewards

        if name == "get_soft_overlong_punishment":  # a factory; these values are those of TRL's own script
            return trl.rewards.get_soft_overlong_punishment(max_completion_len=1280, soft_punish_cache=256)
        return getattr(trl.rewards, name)
    if "." in name:
        return _import(name)
    raise ValueError(f"there is no reward function {name!r}{did_you_mean(name, REWARD_NAMES)}: {_choices()}")


def _import(path: str) -> RewardFunc:
    module_name, function_name = path.rsplit(".", 1)
    working_directory = str(Path.cwd())
    if working_directory not in sys.path:  # launchers put the script's folder there instead
        sys.path.insert(0, working_directory)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # A missing module imported by the user's module is the user's own error, not a wrong path.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ValueError(
            f"reward function {path!r}: there is no module {error.name!r} in {working_directory} or on sys.path; "
            f"otherwise, {_choices()}"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        callables = sorted(k for k, v in vars(module).items() if callable(v) and not k.startswith("_"))
        what = "is not callable" if hasattr(module, function_name) else "does not exist"
        raise ValueError(
            f"reward function {path!r}: {function_name!r} {what} in {module.__file__}, which has "
            f"{', '.join(callables) or 'no functions'}"
        )
    return function


def _choices() -> str:
    return f"write one of {', '.join(REWARD_NAMES)}, or a dotted path such as my_rewards.my_function"
