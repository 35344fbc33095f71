"""Rewards that run beside the main thread come out as TRL would have had them."""

import functools
import threading
from typing import Any

import pytest
from torch import nn

from grpo import scores_each
from grpo.faults.failure import JobFailed
from grpo.faults.watch import FailureWatch
from tests.support.reward_batches import IDS, PATIENCE_S, TEXTS, MakeBatch, Scorer, length, length_later


@pytest.mark.parametrize("beside", [True, False])
def test_scoring_of_mixed_functions_keeps_order(batch_of: MakeBatch, beside: bool) -> None:
    threads = []

    def where(completion_ids: list[list[int]], factor: int, **_: Any) -> list[float]:
        threads.append(threading.current_thread() is threading.main_thread())
        return [float(factor * len(ids)) for ids in completion_ids]

    model = nn.Linear(1, 1)
    batch = batch_of(length, functools.partial(where, factor=2), Scorer(), length_later, beside=beside)
    batch.start()
    assert batch.rewards() == [[1, 2, 3, 4], [2, 4, 6, 8], [0, 1, 2, 3], [1, 2, 3, 4]]
    assert threads == [not beside]
    assert batch_of(model).scoring.stand_ins() == [model]


def test_scoring_runs_while_main_thread_is_busy(batch_of: MakeBatch) -> None:
    goes_on, done = threading.Event(), threading.Event()

    def waits(completions: list[str], **_: Any) -> list[float]:
        assert goes_on.wait(PATIENCE_S)
        done.set()
        return [1.0] * len(completions)

    batch = batch_of(waits, length_later)
    batch.start()
    goes_on.set()
    assert done.wait(PATIENCE_S)
    assert batch.rewards() == [[1.0] * 4, [1, 2, 3, 4]]


def test_scoring_of_sync_functions_never_overlaps(batch_of: MakeBatch) -> None:
    running = threading.Lock()

    def alone(completions: list[str], **_: Any) -> list[float]:
        assert running.acquire(blocking=False)
        threading.Event().wait(0.01)
        running.release()
        return [0.0] * len(completions)

    batch = batch_of(*[scores_each("completion")(functools.partial(alone)) for _ in range(3)])
    batch.add(0, 1, 2)
    batch.start()
    assert batch.rewards() == [[0.0] * 4] * 3


def test_scoring_skips_refused_completions(batch_of: MakeBatch) -> None:
    seen = []

    def sees(completions: list[str], log_extra: Any, **_: Any) -> list[float]:
        seen.append([*completions])
        log_extra("text", completions)
        return [0.0] * len(completions)

    for beside in (True, False):
        batch = batch_of(sees, length_later, beside=beside)
        batch.start(refused=[True, False, True, False])
        assert batch.rewards() == [[None, 0.0, None, 0.0], [None, 2.0, None, 4.0]]
        assert batch.extra == [("text", [None, "bb", None, "dddd"])]
        batch.begin()
        batch.start(refused=[True] * 4)
        assert batch.rewards() == [[None] * 4] * 2
    assert seen == [["bb", "dddd"]] * 2


def test_scoring_logs_in_row_order(batch_of: MakeBatch) -> None:
    called = threading.Semaphore(0)

    @scores_each("completion")
    def logs(completions: list[str], log_extra: Any, log_metric: Any, **_: Any) -> list[float]:
        log_extra("text", completions)
        log_metric("length", sum(map(len, completions)))
        called.release()
        return [0.0] * len(completions)

    batch = batch_of(logs)
    for number in (2, 0, 3):
        batch.add(number)
        assert called.acquire(timeout=PATIENCE_S)
    assert batch.extra == []
    batch.start()
    batch.rewards()
    assert batch.extra == [("text", TEXTS)]
    assert batch.metrics == [("length", 1), ("length", 2), ("length", 3), ("length", 4)]


def test_scoring_with_partial_log_extra_keeps_values(batch_of: MakeBatch) -> None:
    def logs(completions: list[str], log_extra: Any, **_: Any) -> list[float]:
        for text in completions:
            log_extra("text", [text])
        log_extra("first", completions[:1])
        return [0.0] * len(completions)

    batch = batch_of(logs)
    batch.start()
    batch.rewards()
    assert batch.extra == [("text", TEXTS), ("first", TEXTS[:1])]


def test_scoring_of_main_thread_function_moves_it_for_good(batch_of: MakeBatch) -> None:
    threads = []

    def only_there(completions: list[str], **_: Any) -> list[float]:
        threads.append(threading.current_thread() is threading.main_thread())
        if not threads[-1]:
            raise ValueError("signal only works in main thread of the main interpreter")
        return [1.0] * len(completions)

    batch = batch_of(only_there)
    for _ in range(2):
        batch.begin()
        batch.start()
        assert batch.rewards() == [[1.0] * 4]
    assert threads == [False, True, True]
    assert len(batch.said) == 1
    assert "only_there cannot run beside the main thread: ValueError: signal only works" in batch.said[0]


@pytest.mark.parametrize("unit", [None, "completion"])
def test_scoring_moves_later_functions_with_main_thread_function(
    batch_of: MakeBatch, watch: FailureWatch, unit: Any
) -> None:
    """They may rely on what it leaves, and none runs twice at a time."""
    left: list[str] = []
    running = threading.Lock()

    def first(completions: list[str], **_: Any) -> list[float]:
        assert running.acquire(timeout=PATIENCE_S)
        running.release()
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("signal only works in main thread of the main interpreter")
        left.extend(completions)
        return [0.0] * len(completions)

    def second(completions: list[str], **_: Any) -> list[float]:
        with running:
            return [float(text in left) for text in completions]

    functions = [scores_each(unit)(func) if unit else func for func in (first, second)]
    batch = batch_of(length, *functions, length_later)
    for _ in range(2):
        left.clear()
        batch.begin()
        if unit:
            batch.add(0, 2)
        batch.start()
        with watch.during("train"):
            assert batch.rewards() == [[1, 2, 3, 4], [0.0] * 4, [1.0] * 4, [1, 2, 3, 4]]
            assert watch.phase == "train"
    assert len(batch.said) == 1
    assert "rewards of first and second are computed in it" in batch.said[0]


@pytest.mark.parametrize("beside", [True, False])
def test_scoring_error_is_raised_at_rewards_call(batch_of: MakeBatch, watch: FailureWatch, beside: bool) -> None:
    def fails(completions: list[str], **_: Any) -> list[float]:
        raise KeyError("answer")

    async def leaves(completions: list[str], **_: Any) -> list[float]:
        raise SystemExit(3)

    for func, error in ((fails, KeyError), (leaves, RuntimeError)):
        batch = batch_of(func, beside=beside)
        batch.start()
        with pytest.raises(error):
            batch.rewards()
    assert beside is False or watch.phase == "reward"


def test_scoring_protects_arguments_from_mutation(batch_of: MakeBatch) -> None:
    def spoils(completion_ids: list[list[int]], prompts: list[str], **_: Any) -> list[float]:
        for ids in completion_ids:
            ids.clear()
        prompts.clear()
        return [0.0] * len(completion_ids)

    batch = batch_of(scores_each("completion")(spoils), length)
    batch.add(0, 1, 2, 3)
    batch.start()
    assert batch.rewards() == [[0.0] * 4, [1, 2, 3, 4]]
    assert IDS == [[1], [2, 2], [3, 3, 3], [4, 4, 4, 4]]


@pytest.mark.parametrize("beside", [True, False])
def test_scoring_with_too_few_rewards_raises(batch_of: MakeBatch, beside: bool) -> None:
    batch = batch_of(lambda completions, **_: [1.0], beside=beside)
    batch.start()
    with pytest.raises(ValueError, match="returned 1 rewards for 4 completions: give one for each"):
        batch.rewards()


def test_scoring_wait_after_job_failure_raises(batch_of: MakeBatch, watch: FailureWatch) -> None:
    goes_on = threading.Event()

    def waits(completions: list[str], **_: Any) -> list[float]:
        watch.fail("elsewhere")
        goes_on.wait(PATIENCE_S)
        return []

    batch = batch_of(waits)
    batch.start()
    with pytest.raises(JobFailed, match="elsewhere"):
        batch.rewards()
    goes_on.set()
