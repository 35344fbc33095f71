"""A rank's batch, as reward functions see it: all of it, or some of its rows."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_OWN = ("prompt", "completion", "completion_ids")


class Rows:
    """The arguments that TRL gives a reward function (1.16, `_calculate_rewards`), row by row.

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
        """Those that are known."""
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

    def of(self, rows: Sequence[int], notes: "Notes") -> dict[str, Any]:
        """For a call that scores `rows`."""
        columns = {name: [values[row] for row in rows] for name, values in self._columns.items()}
        return {
            **columns,
            "trainer_state": self._state,
            "log_extra": notes.log_extra,
            "log_metric": notes.log_metric,
        }


@dataclass(slots=True, eq=False)
class Notes:
    """What a call logs beside its rewards, until it is its turn."""

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
    """Log what calls have noted, each column once and in the order of rows, whoever came first."""
    columns: defaultdict[str, list[Any]] = defaultdict(lambda: [None] * num_rows)
    for rows, notes in sorted(calls, key=lambda call: tuple(call[0])):
        for column, values in notes.extra:
            if len(values) != len(rows):
                raise ValueError(
                    f"log_extra({column!r}, ...) was given {len(values)} values for {len(rows)} completions: give one "
                    "for each"
                )
            for row, value in zip(rows, values, strict=True):
                columns[column][row] = value
        for name, value in notes.metrics:
            log_metric(name, value)
    for column, in_rows in columns.items():
        log_extra(column, in_rows)
