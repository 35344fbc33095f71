"""A rank's batch, as passed to reward functions: all of it, or some of its rows."""

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_OWN = ("prompt", "completion", "completion_ids")


class Rows:
    """Arguments of reward functions as in TRL (1.16, `_calculate_rewards`), row by row.

    Args:
        inputs: the rank's rows of the data set.
        environments: one for each row; None without.
        state: the trainer's.
    """

    def __init__(
        self,
        inputs: Sequence[Mapping[str, Any]],
        prompts: Sequence[Any],
        environments: Sequence[Any] | None,
        state: Any,
    ) -> None:
        self.completions: list[Any] = [None] * len(prompts)
        """Completions known so far; None for the others."""
        self.completion_ids: list[list[int]] = [[] for _ in prompts]
        self._columns: dict[str, Sequence[Any]] = {
            name: [row[name] for row in inputs] for name in inputs[0] if name not in _OWN
        }
        self._columns |= {"prompts": prompts, "completions": self.completions, "completion_ids": self.completion_ids}
        if environments is not None:
            self._columns["environments"] = environments
        self._state = state

    def __len__(self) -> int:
        return len(self.completions)

    def hold(self, completions: Sequence[Any], completion_ids: Sequence[Any]) -> bool:
        """True if these are the completions."""
        return self.completions == [*completions] and self.completion_ids == [[*ids] for ids in completion_ids]

    def has_columns_of(self, other: "Rows") -> bool:
        """True if functions would receive the same arguments for both, apart from the completions."""
        said = ("completions", "completion_ids")
        mine, others = (
            {name: values for name, values in rows._columns.items() if name not in said} for rows in (self, other)
        )
        try:
            return mine == others
        except Exception:  # noqa: BLE001  arrays that differ: their truth value is ambiguous
            return False

    def of(self, rows: Sequence[int], notes: "Notes") -> dict[str, Any]:
        """Return the arguments of a call to score `rows`. Prompts and completions are copied: TRL may later convert its
        own to tensors."""
        columns = {name: [values[row] for row in rows] for name, values in self._columns.items()}
        columns |= {name: copy.deepcopy(columns[name]) for name in ("prompts", "completions")}
        columns["completion_ids"] = [[*ids] for ids in columns["completion_ids"]]
        return {
            **columns,
            "trainer_state": self._state,
            "log_extra": notes.log_extra,
            "log_metric": notes.log_metric,
        }


@dataclass(slots=True, eq=False)
class Notes:
    """Logs of a call, in addition to its rewards, held until they are written."""

    extra: list[tuple[str, list[Any]]] = field(default_factory=list)
    metrics: list[tuple[str, float]] = field(default_factory=list)

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        self.extra.append((column, [*values]))

    def log_metric(self, name: str, value: float) -> None:
        self.metrics.append((name, value))


def log_all(
    calls: Sequence[tuple[Sequence[int], Notes]],
    num_rows: int,
    log_extra: Callable[[str, list[Any]], None],
    log_metric: Callable[[str, float], None],
) -> None:
    """Log the notes of all calls, each column once and in the order of rows, whichever call ended first.

    Values that do not match a call's rows are concatenated, as in TRL.
    """
    columns: defaultdict[str, list[tuple[Sequence[int], list[Any]]]] = defaultdict(list)
    for rows, notes in sorted(calls, key=lambda call: tuple(call[0])):
        own: defaultdict[str, list[Any]] = defaultdict(list)
        for column, values in notes.extra:
            own[column] += values
        for column, values in own.items():
            columns[column].append((rows, values))
        for name, value in notes.metrics:
            log_metric(name, value)
    for column, parts in columns.items():
        if any(len(values) != len(rows) for rows, values in parts):
            log_extra(column, [value for _, values in parts for value in values])
            continue
        in_rows: list[Any] = [None] * num_rows
        for rows, values in parts:
            for row, value in zip(rows, values, strict=True):
                in_rows[row] = value
        log_extra(column, in_rows)
