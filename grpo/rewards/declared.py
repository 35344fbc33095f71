"""Declarations of users: a reward function scores each completion, or each group, independently."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, Literal, TypeVar

Unit = Literal["completion", "group"]
Function = TypeVar("Function", bound=Callable[..., Any])
_MARK = "_grpo_scores_each"


def scores_each(unit: Unit, *, ahead: bool = False) -> Callable[[Function], Function]:
    """Declare that a reward function scores each completion, or each group, independently of all others.

    It then starts while other completions are still sampled, and is called with as many completions as there are: lists
    of one, of some, or of whole groups, instead of a rank's batch.

        @scores_each("completion")
        def judge(prompts, completions, **columns): ...

    This is opt-in: a reward that normalises over the batch would give different values.

    Args:
        unit: "completion", or "group" for the completions of one prompt; if a group is spread over several ranks, only
            the rank's own, as in TRL.
        ahead: with `generation_lookahead`, score completions of later batches as well, while the ranks train.
            `trainer_state` is then a copy, whose `global_step` is that of the step that will train on them.

    Raises:
        ValueError: for another word.
        TypeError: the function cannot be marked, such as a method of an object: mark it where its class defines it.
    """
    if unit not in ("completion", "group"):
        raise ValueError(f'scores_each({unit!r}): a function scores each "completion" or each "group" by itself')

    def declare(func: Function) -> Function:
        try:
            setattr(func, _MARK, (unit, ahead, func))
        except AttributeError as error:
            raise TypeError(f"scores_each cannot mark {func!r}: mark the function that it is made of") from error
        return func

    return declare


def declared_of(func: Any) -> tuple[Unit | None, bool]:
    """Return the declared unit, None if the function may look at the whole batch, and whether it scores batches ahead.

    Only a declaration of this very function counts: `functools.wraps` copies the mark to a wrapper, which may
    normalise.
    """
    while isinstance(func, functools.partial) and _MARK not in vars(func):
        func = func.func
    for marked in (func, getattr(func, "__func__", None), inspect.getattr_static(type(func), "__call__", None)):
        unit, ahead, owner = getattr(marked, _MARK, (None, False, None))
        if owner is marked and marked is not None:
            return unit, ahead
    return None, False
