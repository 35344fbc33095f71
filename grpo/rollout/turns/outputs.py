"""Results of a rollout function's rows, checked for TRL."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """Result of one of the rank's prompts."""

    token_ids: Sequence[int]
    """[T], tool results included."""
    logprobs: Sequence[float] | np.ndarray
    """[T]"""
    refusal: str | None = None
    """Reason why its prompt was refused."""
    failure: str | None = None
    """Reason why its rollout function has nothing to train on."""


def rows_of(output: Any, num_rows: int, refused: dict[int, str]) -> list[Row]:
    """Check the output of a rollout function, and return its rows."""
    if not isinstance(output, dict):
        raise ValueError(f"rollout_func returned {type(output).__name__}: it has to return a dict of lists")
    for name in ("prompt_ids", "completion_ids", "logprobs"):
        if name not in output:
            raise ValueError(f"rollout_func returned no {name!r}, but {', '.join(map(repr, output)) or 'nothing'}")
        values = output[name]
        if (name != "logprobs" or values is not None) and len(values) != num_rows:
            raise ValueError(f"rollout_func returned {len(values)} {name} for {num_rows} prompts: give one for each")
    failed = {row: why for row, why in enumerate(output.get("failed") or []) if why is not None}
    left_out = {**failed, **refused}
    empty = [row for row, ids in enumerate(output["completion_ids"]) if not len(ids) and row not in left_out]
    if empty:
        raise ValueError(f"rollout_func returned no tokens for row {empty[0]}: give at least the end token")
    wanted = [len(ids) for ids in output["completion_ids"]]
    for name in ("logprobs", "env_mask"):
        if output.get(name) is not None and (found := [len(row) for row in output[name]]) != wanted:
            raise ValueError(
                f"rollout_func returned {name} of {found[:8]} tokens for completion_ids of {wanted[:8]} (the first "
                "rows): give one for each token"
            )
    rows = [Row(ids, np.zeros(len(ids))) for ids in output["completion_ids"]]
    return [
        Row([], [], refusal=refused.get(number), failure=failed.get(number)) if number in left_out else row
        for number, row in enumerate(rows)
    ]
