"""Rewards that run beside the main thread come out as TRL would have had them; declared ones begin early."""

import asyncio
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch import nn
from trl.trainer.utils import is_async_callable

from grpo import scores_each
from grpo.job.failure import JobFailed
from grpo.job.watch import FailureWatch
from grpo.rewards.batch import Rows
from grpo.rewards.declared import unit_of
from grpo.rewards.scoring import Scoring

PATIENCE_S = 60.0
TEXTS = ["a", "bb", "ccc", "dddd"]
IDS = [[1], [2, 2], [3, 3, 3], [4, 4, 4, 4]]
GROUPS = [[0, 1], [2, 3]]


@pytest.fixture
def watch() -> FailureWatch:
    return FailureWatch(None, node=0, rank=0, host="a")


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join(PATIENCE_S)
    loop.close()


class Batch:
    """A batch of four completions, scored by these functions."""

    def __init__(self, watch: FailureWatch, loop: asyncio.AbstractEventLoop, *funcs: Any, beside: bool = True) -> None:
        self.said: list[str] = []
        self.extra: list[tuple[str, list[Any]]] = []
        self.metrics: list[tuple[str, float]] = []
        self.scoring = Scoring(
            funcs, watch, timeout_s=PATIENCE_S, beside=beside, loop=lambda: loop, say=self.said.append
        )
        self.loop = loop
        self.begin()

    def begin(self) -> None:
        self.scoring.begin(rows(), GROUPS)

    def add(self, *numbers: int) -> None:
        for number in numbers:
            self.scoring.add(number, TEXTS[number], IDS[number])

    def start(self, texts: list[str] = TEXTS, refused: list[bool] | None = None) -> None:
        self.scoring.start(rows(), texts, IDS, GROUPS, refused=refused)

    def rewards(self) -> list[Any]:
        """As TRL calls the functions."""
        found = []
        for stand_in in self.scoring.stand_ins():
            given = {
                "prompts": [],
                "completions": [],
                "log_extra": lambda column, values: self.extra.append((column, values)),
                "log_metric": lambda name, value: self.metrics.append((name, value)),
            }
            if is_async_callable(stand_in):
                found.append(asyncio.run_coroutine_threadsafe(stand_in(**given), self.loop).result(PATIENCE_S))
            else:
                found.append(stand_in(**given))
        return found


def rows() -> Rows:
    inputs = [{"prompt": f"p{number // 2}", "answer": number} for number in range(4)]
    return Rows(inputs, [row["prompt"] for row in inputs], None, "state")


Make = Callable[..., Batch]


@pytest.fixture
def batch_of(watch: FailureWatch, loop: asyncio.AbstractEventLoop) -> Make:
    return functools.partial(Batch, watch, loop)


def length(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text)) for text in completions]


async def length_later(completions: list[str], **_: Any) -> list[float]:
    await asyncio.sleep(0)
    return [float(len(text)) for text in completions]


class Scorer:
    def __call__(self, answer: list[int], **_: Any) -> list[float]:
        return [float(value) for value in answer]


@pytest.mark.parametrize("beside", [True, False])
def test_all_kinds_in_their_order(batch_of: Make, beside: bool) -> None:
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


def test_they_run_while_the_main_thread_does_something_else(batch_of: Make) -> None:
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


def test_synchronous_ones_never_run_side_by_side(batch_of: Make) -> None:
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


@pytest.mark.parametrize("is_async", [False, True])
def test_a_declared_one_begins_with_what_is_there(batch_of: Make, is_async: bool) -> None:
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


def test_completions_that_come_while_it_is_busy_are_one_call(batch_of: Make) -> None:
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


def test_one_for_groups_waits_for_whole_ones(batch_of: Make) -> None:
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


def test_nobody_sees_what_was_refused(batch_of: Make) -> None:
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


def test_what_is_another_in_the_end_is_scored_again(batch_of: Make) -> None:
    batch = batch_of(scores_each("completion")(functools.partial(length)), scores_each("group")(length_later))
    batch.add(0, 1, 2, 3)
    batch.start(["a", "bb", "ccc", "a longer one"])
    assert batch.rewards() == [[1, 2, 3, 12]] * 2


def test_what_they_log_is_in_the_order_of_rows(batch_of: Make) -> None:
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


def test_values_that_are_not_one_for_each_are_logged_as_trl_does(batch_of: Make) -> None:
    def logs(completions: list[str], log_extra: Any, **_: Any) -> list[float]:
        for text in completions:
            log_extra("text", [text])
        log_extra("first", completions[:1])
        return [0.0] * len(completions)

    batch = batch_of(logs)
    batch.start()
    batch.rewards()
    assert batch.extra == [("text", TEXTS), ("first", TEXTS[:1])]


def test_one_of_the_main_thread_runs_there_from_then_on(batch_of: Make) -> None:
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
def test_those_behind_it_come_along(batch_of: Make, watch: FailureWatch, unit: Any) -> None:
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
def test_what_it_raises_is_raised_where_trl_calls_it(batch_of: Make, watch: FailureWatch, beside: bool) -> None:
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


def test_what_functions_do_to_their_arguments_is_theirs(batch_of: Make) -> None:
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
def test_too_few_are_told(batch_of: Make, beside: bool) -> None:
    batch = batch_of(lambda completions, **_: [1.0], beside=beside)
    batch.start()
    with pytest.raises(ValueError, match="returned 1 rewards for 4 completions: give one for each"):
        batch.rewards()


def test_whoever_waits_hears_that_the_job_has_failed(batch_of: Make, watch: FailureWatch) -> None:
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


def test_what_a_dropped_batch_brings_counts_for_nothing(batch_of: Make) -> None:
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


def test_what_can_be_declared() -> None:
    assert unit_of(scores_each("group")(functools.partial(length))) == "group"
    assert unit_of(functools.partial(scores_each("completion")(Scorer()))) == "completion"
    assert unit_of(length) is None

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

    assert (unit_of(Judge()), unit_of(Judge().best), unit_of(normalised)) == ("completion", "group", None)
    with pytest.raises(TypeError, match="mark the function that it is made of"):
        scores_each("group")(Judge().best)
    with pytest.raises(ValueError, match="scores_each\\('batch'\\)"):
        scores_each("batch")  # type: ignore[arg-type]
