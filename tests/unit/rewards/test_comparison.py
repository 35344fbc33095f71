"""Functions that answer otherwise beside the main thread than in it are found, others are left where they are."""

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest

from grpo import scores_each
from grpo.place.timeouts import Timeouts
from tests.support.reward_batches import MakeBatch, Scorer, length, length_later


def in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def hides_it(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text)) if in_main_thread() else 0.0 for text in completions]


def counts() -> Callable[..., list[float]]:
    calls: list[int] = []

    def count(completions: list[str], **_: Any) -> list[float]:
        calls.append(1)
        return [float(len(calls))] * len(completions)

    return count


def needs_it_for_groups(completions: list[str], **_: Any) -> list[float]:
    if len(completions) < 4 and not in_main_thread():
        raise ValueError("signal only works in main thread of the main interpreter")
    return [1.0] * len(completions)


def gives_none(completions: list[str], **_: Any) -> list[float | None]:
    return [None if in_main_thread() else math.nan for _ in completions]


def rounds_otherwise(completions: list[str], **_: Any) -> list[float]:
    return [1.0 + 1e-6 * in_main_thread() for _ in completions]


def takes_groups_for_batches(completions: list[str], **_: Any) -> list[float]:
    return [float(len(completions))] * len(completions)


def needs_the_batch(completions: list[str], **_: Any) -> list[float]:
    if len(completions) < 4:
        raise IndexError(f"no row 3 of {completions}")
    return [0.0] * 4


def each(unit: Any, func: Callable[..., Any]) -> Any:
    return scores_each(unit)(lambda **arguments: func(**arguments))


@pytest.mark.parametrize(
    ("func", "differs"),
    [
        (length, False),
        (hides_it, True),
        (each("completion", hides_it), True),
        (each("group", hides_it), True),
        (needs_it_for_groups, True),
        (counts(), False),
        (gives_none, False),
        (rounds_otherwise, False),
        (takes_groups_for_batches, False),
        (needs_the_batch, False),
        (length_later, False),
    ],
)
def test_compare_finds_functions_differing_beside_main_thread(batch_of: MakeBatch, func: Any, differs: bool) -> None:
    batch = batch_of(func)
    batch.start()
    assert batch.scoring.compare() == [differs]
    batch.scoring.move([0] * differs, "is wrong there")
    rewards = batch.rewards()
    if differs:
        assert rewards == [[1, 2, 3, 4] if func is not needs_it_for_groups else [1] * 4]
        assert batch.said == [f"WARNING: {func.__name__} is wrong there; from now on rewards of {func.__name__} are "
                              "computed in it, and nothing beside them"]  # fmt: skip
    else:
        assert batch.said == []


def test_move_of_function_takes_later_functions_along(batch_of: MakeBatch) -> None:
    batch = batch_of(Scorer(), hides_it, length, length_later)
    batch.start()
    assert batch.scoring.compare() == [False, True, False, False]
    batch.scoring.move([1], None)
    assert batch.rewards() == [[0, 1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]]
    assert batch.said == []
    batch.begin()
    batch.start()
    assert batch.scoring.compare() == [False, True, True, False]  # as it is now


def test_compare_logs_extra_and_metrics_once(batch_of: MakeBatch) -> None:
    def logs(completions: list[str], log_extra: Any, log_metric: Any, **_: Any) -> list[float]:
        log_extra("text", completions)
        log_metric("calls", 1)
        return [0.0] * len(completions)

    batch = batch_of(logs)
    batch.start()
    batch.scoring.compare()
    batch.rewards()
    assert batch.extra == [("text", ["a", "bb", "ccc", "dddd"])]
    assert batch.metrics == [("calls", 1)]


def test_compare_over_time_limit_gives_up_after_one_call(batch_of: MakeBatch) -> None:
    calls: list[int] = []

    def slow(completions: list[str], **_: Any) -> list[float]:
        calls.append(len(completions))
        return hides_it(completions)

    batch = batch_of(slow)
    batch.scoring.timeouts = Timeouts(compare_s=-1.0)
    batch.start()
    assert batch.scoring.compare() == [False]
    assert calls == [4, 2]
    assert batch.said == ["slow is slow: its rewards in the main thread were not compared"]


def test_compare_with_all_completions_refused_finds_nothing(batch_of: MakeBatch) -> None:
    batch = batch_of(hides_it)
    batch.start(refused=[True] * 4)
    assert batch.scoring.compare() == [False]
    batch.begin()
    batch.start(refused=[True, True, True, False])
    assert batch.scoring.compare() == [True]
