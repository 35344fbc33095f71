"""Functions that are declared to need one completion, or one group, begin with what is there."""

import functools
import threading
from typing import Any

import pytest

from grpo import scores_each
from grpo.rewards.declared import declared_of
from tests.support.reward_batches import PATIENCE_S, TEXTS, MakeBatch, Scorer, length, length_later


@pytest.mark.parametrize("is_async", [False, True])
def test_declared_reward_scores_completions_on_arrival(batch_of: MakeBatch, is_async: bool) -> None:
    seen, called = [], threading.Semaphore(0)

    def now(completions: list[str], answer: list[int], trainer_state: str, **_: Any) -> list[float]:
        assert trainer_state == "state"
        seen.append([*completions])
        called.release()
        return [float(10 * value) for value in answer]

    async def later(**arguments: Any) -> list[float]:
        return now(**arguments)

    batch = batch_of(scores_each("completion")(later if is_async else now))
    batch.add(2)
    assert called.acquire(timeout=PATIENCE_S)
    batch.add(0)
    assert called.acquire(timeout=PATIENCE_S)
    batch.start()
    assert batch.rewards() == [[0, 10, 20, 30]]
    assert seen[:2] == [["ccc"], ["a"]]
    assert seen[2:] == ([["bb"], ["dddd"]] if is_async else [["bb", "dddd"]])


def test_declared_reward_while_busy_collects_completions_into_one_call(batch_of: MakeBatch) -> None:
    goes_on, begun, seen = threading.Event(), threading.Event(), []

    @scores_each("completion")
    def slow(completions: list[str], **_: Any) -> list[float]:
        seen.append([*completions])
        begun.set()
        assert goes_on.wait(PATIENCE_S)
        return [float(len(text)) for text in completions]

    batch = batch_of(slow)
    batch.add(1)
    assert begun.wait(PATIENCE_S)
    batch.add(3, 0)
    batch.start()
    goes_on.set()
    assert batch.rewards() == [[1, 2, 3, 4]]
    assert seen == [["bb"], ["a", "ccc", "dddd"]]


def test_declared_group_reward_waits_for_whole_group(batch_of: MakeBatch) -> None:
    seen, called = [], threading.Semaphore(0)

    @scores_each("group")
    def best(completions: list[str], **_: Any) -> list[float]:
        seen.append([*completions])
        called.release()
        return [float(len(text)) for text in completions]

    batch = batch_of(best)
    batch.add(3, 0, 2)
    assert called.acquire(timeout=PATIENCE_S)
    batch.start(refused=[False, True, False, False])
    assert batch.rewards() == [[1.0, None, 3.0, 4.0]]
    assert seen == [["ccc", "dddd"], ["a"]]


def test_declared_reward_with_changed_completion_scores_again(batch_of: MakeBatch) -> None:
    batch = batch_of(scores_each("completion")(functools.partial(length)), scores_each("group")(length_later))
    batch.add(0, 1, 2, 3)
    batch.start(["a", "bb", "ccc", "a longer one"])
    assert batch.rewards() == [[1, 2, 3, 12]] * 2


def test_declared_reward_of_dropped_batch_is_ignored(batch_of: MakeBatch) -> None:
    goes_on, begun, seen = threading.Event(), threading.Event(), []

    @scores_each("completion")
    def slow(completions: list[str], **_: Any) -> list[float]:
        seen.append([*completions])
        begun.set()
        assert goes_on.wait(PATIENCE_S)
        return [float(len(seen))] * len(completions)

    batch = batch_of(slow)
    batch.add(0)
    assert begun.wait(PATIENCE_S)
    batch.add(1)
    batch.begin()
    batch.start()
    goes_on.set()
    assert batch.rewards() == [[2.0] * 4]
    assert seen == [["a"], TEXTS]


def test_declared_of_returns_declared_unit() -> None:
    assert declared_of(scores_each("group")(functools.partial(length))) == ("group", False)
    assert declared_of(functools.partial(scores_each("completion")(Scorer()))) == ("completion", False)
    assert declared_of(length) == (None, False)

    class Judge:
        @scores_each("completion")
        def __call__(self, completions: list[str], **_: Any) -> list[float]:
            return length(completions)

        @scores_each("group")
        def best(self, completions: list[str], **_: Any) -> list[float]:
            return length(completions)

    judge = scores_each("completion")(functools.partial(length))

    @functools.wraps(judge)
    def normalised(completions: list[str], **_: Any) -> list[float]:
        return [each - 1 for each in judge(completions)]

    assert (declared_of(Judge())[0], declared_of(Judge().best)[0], declared_of(normalised)[0]) == (
        "completion",
        "group",
        None,
    )
    with pytest.raises(TypeError, match="mark the function that it is made of"):
        scores_each("group")(Judge().best)
    with pytest.raises(ValueError, match="scores_each\\('batch'\\)"):
        scores_each("batch")  # type: ignore[arg-type]
