"""What a user says of a reward function: that it scores a completion, or a group of them, by itself."""

import functools
from collections.abc import Callable
from typing import Any, Literal, TypeVar

Unit = Literal["completion", "group"]
Function = TypeVar("Function", bound=Callable[..., Any])
_MARK = "_grpo_scores_each"


def scores_each(unit: Unit) -> Callable[[Function], Function]:
    """Declares that what a reward function gives a completion depends on nothing but that completion, or its group.

    It then starts while others are still sampled, and is called with as many completions as there are: lists of one, of
    some, or of whole groups, instead of a rank's batch.

        @scores_each("completion")
        def judge(prompts, completions, **columns): ...

    Nobody guesses it: a reward that looks at the whole batch, to normalise, say, would silently become another one.

    Args:
        unit: "completion", or "group" for the completions of one prompt; where a group lies on several ranks, those
            that the rank has, as in TRL.

    Raises:
        ValueError: for another word.
    """
    if unit not in ("completion", "group"):
        raise ValueError(f'scores_each({unit!r}): a function scores each "completion" or each "group" by itself')

    def declare(func: Function) -> Function:
        setattr(func, _MARK, unit)
        return func

    return declare


def unit_of(func: Any) -> Unit | None:
    """What was declared; None: the function may look at the whole batch."""
    while isinstance(func, functools.partial) and not hasattr(func, _MARK):
        func = func.func
    return getattr(func, _MARK, None)
