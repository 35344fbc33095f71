"""Rewards without the rows whose prompts no engine has taken."""

from collections.abc import Callable, Sequence
from typing import Any

from trl.trainer.utils import is_async_callable

RewardFunction = Callable[..., Any]


def leaving_out(func: RewardFunction, kept: Sequence[bool]) -> RewardFunction:
    """`func` called on the rows that are kept alone; None, which TRL takes for "no reward", for each of the others.

    Args:
        func: as TRL calls it, asynchronous or not: with lists of one value a row, and what is no such list.
        kept: of each row.
    """

    def of_kept(arguments: dict[str, Any]) -> dict[str, Any]:
        chosen = {name: _chosen(value, kept) for name, value in arguments.items()}
        if log_extra := chosen.get("log_extra"):
            chosen["log_extra"] = lambda column, values: log_extra(column, _spread(values, kept))
        return chosen

    if is_async_callable(func):

        async def later(**arguments: Any) -> Sequence[Any]:
            return _spread(await func(**of_kept(arguments)), kept) if any(kept) else [None] * len(kept)

        return later

    def now(**arguments: Any) -> Sequence[Any]:
        return _spread(func(**of_kept(arguments)), kept) if any(kept) else [None] * len(kept)

    return now


def _chosen(value: Any, kept: Sequence[bool]) -> Any:
    if not isinstance(value, list) or len(value) != len(kept):
        return value
    return [each for each, is_kept in zip(value, kept, strict=True) if is_kept]


def _spread(values: Sequence[Any], kept: Sequence[bool]) -> Sequence[Any]:
    """One value for each row; as they are where there are not as many as rows are kept, which TRL says."""
    if len(values) != sum(kept):
        return values
    left = iter(values)
    return [next(left) if is_kept else None for is_kept in kept]
