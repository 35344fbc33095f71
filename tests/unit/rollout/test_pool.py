"""The pool's threads, over scripted engines."""

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from grpo.engine.client import EngineError
from grpo.rollout.accounts import IdleClock
from grpo.rollout.packing import REFUSED, Request, to_lists
from tests.support.engines import DEADLINE_S, ThreadedEngine
from tests.support.pools import Node, expected_of, requests_of, wait_until


@pytest.mark.parametrize("num_spare", [0, 1])
@pytest.mark.parametrize("trial", range(20))
def test_pool_on_random_loads_returns_completions_in_place(trial: int, num_spare: int, node: Node) -> None:
    """For any lengths, engines, speeds, windows and numbers of samples; several batches at once."""
    rng = np.random.default_rng(trial)
    engines = [
        ThreadedEngine(
            f"engine {number}", num_slots=int(rng.integers(1, 6)), token_s=float(rng.choice([0, 0, 2e-5, 2e-4]))
        )
        for number in range(rng.integers(1, 5))
    ]
    windows = (rng.integers(1, 9, size=len(engines)) + num_spare).tolist()
    pool = node.pool(*engines, windows=windows, num_spare=num_spare)
    batches = [requests_of(rng, int(rng.integers(0, 14)), first_seed=1000 * number) for number in range(3)]
    submitted = [pool.submit(requests) for requests in batches]
    for number in rng.permutation(3):
        completions = pool.collect(submitted[number], DEADLINE_S)
        assert to_lists(completions) == expected_of(batches[number])


def test_pool_with_slow_engine_gives_queued_work_to_idle_one(node: Node) -> None:
    slow, fast = ThreadedEngine("slow", num_slots=2), ThreadedEngine("fast", num_slots=2)
    slow.works.clear()
    pool = node.pool(slow, fast)
    requests = requests_of(np.random.default_rng(0), 20)
    batch = pool.submit(requests)
    wait_until(lambda: len(batch.answers) == len(batch.ids) - sum(len(ids) for _, ids in slow.reported))
    assert len(slow.reported) == 1  # one chunk, which was all that it had space for
    slow.works.set()
    assert to_lists(pool.collect(batch, DEADLINE_S)) == expected_of(requests)


def test_pool_with_zero_temperature_asks_one_completion_per_request(node: Node) -> None:
    """vLLM takes no other number of them in a request (0.31)."""
    engine = ThreadedEngine("engine", num_slots=8)
    pool = node.pool(engine)
    prompt = np.arange(3, dtype=np.int32)
    requests = [Request(token_ids=prompt, n=4, seed=7, overrides={"temperature": 0, "max_tokens": 5})]
    assert to_lists(pool.collect(pool.submit(requests), DEADLINE_S)) == expected_of(requests)
    assert [len(sample.ids) for sample in engine.samples] == [1] * 4
    assert {sample.overrides["max_tokens"] for sample in engine.samples} == {5}


def test_pool_with_one_group_splits_it_between_engines(node: Node) -> None:
    first, second = ThreadedEngine("engine 0", num_slots=64), ThreadedEngine("engine 1", num_slots=64)
    pool = node.pool(first, second)
    requests = [Request(token_ids=np.array([7, 8], np.int32), n=13, seed=5)]
    assert to_lists(pool.collect(pool.submit(requests), DEADLINE_S)) == expected_of(requests)
    assert [len(ids) for engine in (first, second) for _, ids in engine.reported] == [7, 6]


@pytest.mark.parametrize(("num_slots", "together"), [(4, {True, False}), (64, {True})])
def test_pool_asks_single_answers_only_while_requests_wait(num_slots: int, together: set[bool], node: Node) -> None:
    engines = [ThreadedEngine(f"engine {number}", num_slots=num_slots) for number in range(2)]
    requests = requests_of(np.random.default_rng(8), 12)
    assert to_lists(node.pool(*engines).collect(node.pools[0].submit(requests), DEADLINE_S)) == expected_of(requests)
    assert {sample.together for engine in engines for sample in engine.samples} == together


def test_pool_with_spare_slots_queues_nothing_in_engines(node: Node) -> None:
    first, second = ThreadedEngine("engine 0", num_slots=5), ThreadedEngine("engine 1", num_slots=4)
    for engine in (first, second):
        engine.works.clear()
    pool = node.pool(first, second, num_spare=1)
    requests = [Request(token_ids=np.array([7, row], np.int32), n=11, seed=20 * row) for row in range(2)]
    batch = pool.submit(requests)
    wait_until(lambda: sum(len(ids) for engine in (first, second) for _, ids in engine.reported) == 7)
    assert [sum(len(ids) for _, ids in engine.reported) for engine in (first, second)] == [4, 3]
    for engine in (first, second):
        engine.works.set()
    assert to_lists(pool.collect(batch, DEADLINE_S)) == expected_of(requests)
    assert sorted(each for engine in (first, second) for _, ids in engine.reported for each in ids) == [*range(22)]


def test_pool_submit_with_blocked_engine_returns_at_once(node: Node) -> None:
    engine = ThreadedEngine("engine 0")
    engine.reads.clear()
    pool = node.pool(engine)
    began = time.monotonic()
    batch = pool.submit(requests_of(np.random.default_rng(0), 3))
    pool.drop(batch)
    assert time.monotonic() - began < 1.0
    engine.reads.set()
    wait_until(lambda: len(engine.reported) > 1)
    assert [word for word, _ in engine.reported][-1] == "abort"  # after what it takes back


def test_pool_with_refused_requests_completes_others(node: Node) -> None:
    """By the engine, and by the pool for want of space, which asks no engine."""
    engine = ThreadedEngine("engine 0")
    engine.refuses = lambda owed: owed.seed == 5
    pool = node.pool(engine, max_model_len=3)
    requests = requests_of(np.random.default_rng(2), 9)
    rows, _ = expected_of(requests)
    lengths = [len(request.token_ids) for request in requests for _ in range(request.n)]
    assert max(lengths) == 3
    batch = pool.submit(requests)
    completions = pool.collect(batch, DEADLINE_S)
    assert completions is not None
    refused = [length >= 3 or row == 5 for row, length in enumerate(lengths)]
    assert (completions.policy_versions == REFUSED).tolist() == refused
    assert to_lists(completions)[0] == [
        [] if is_refused else row for row, is_refused in zip(rows, refused, strict=True)
    ]
    assert {*batch.refusals} == {
        "ValueError: too odd",
        "a prompt has 3 tokens; the engine holds 3 with the completion (vllm_max_model_length)",
    }
    assert len(batch.refusals) == sum(refused)
    assert all(len(sample.token_ids) < 3 for sample in engine.samples)


def test_pool_collect_after_thread_error_raises_it(node: Node) -> None:
    engine = ThreadedEngine("engine 0")
    engine.submit = lambda sample: 1 / 0  # type: ignore[assignment,return-value]
    pool = node.pool(engine)
    with pytest.raises(ZeroDivisionError):
        pool.collect(pool.submit(requests_of(np.random.default_rng(2), 9)), DEADLINE_S)


def test_pool_collect_timeout_counts_from_submit_and_names_engine(node: Node) -> None:
    stuck = ThreadedEngine("engine 1")
    stuck.works.clear()
    pool = node.pool(stuck)
    batch = pool.submit(requests_of(np.random.default_rng(3), 4))
    time.sleep(0.3)
    began = time.monotonic()
    with pytest.raises(EngineError, match=r"engine 1 .* \d+ of \d+ completions after 0\.4 s .*GRPO-411"):
        pool.collect(batch, 0.4)
    assert time.monotonic() - began < 0.3


def test_pool_collect_with_failing_check_raises(node: Node) -> None:
    stuck = ThreadedEngine("engine 0")
    stuck.works.clear()
    pool = node.pool(stuck)

    def check() -> None:
        raise ZeroDivisionError("elsewhere")

    with pytest.raises(ZeroDivisionError):
        pool.collect(pool.submit(requests_of(np.random.default_rng(4), 2)), DEADLINE_S, check)


def test_pool_drop_aborts_batch_and_frees_its_slots(node: Node) -> None:
    engine = ThreadedEngine("engine 0", num_slots=4)
    engine.works.clear()
    pool = node.pool(engine)
    dropped = pool.submit(requests_of(np.random.default_rng(5), 12))
    requests = requests_of(np.random.default_rng(6), 12, first_seed=500)
    kept = pool.submit(requests)
    pool.drop(dropped)
    engine.works.set()
    assert to_lists(pool.collect(kept, DEADLINE_S)) == expected_of(requests)
    asked_to_drop = {i for word, ids in engine.reported if word == "abort" for i in ids}
    assert asked_to_drop
    assert asked_to_drop <= set(dropped.ids)
    pool.drop(kept)  # of a finished one nothing is left to drop
    assert not any(set(kept.ids) & set(ids) for word, ids in engine.reported if word == "abort")


def test_pool_collect_without_requests_returns_empty(node: Node) -> None:
    pool = node.pool(ThreadedEngine("engine 0"))
    completions = pool.collect(pool.submit([]), DEADLINE_S)
    assert to_lists(completions) == ([], [])


def test_pool_close_leaves_no_threads(node: Node) -> None:
    before = threading.active_count()
    pool = node.pool(ThreadedEngine("engine 0"), ThreadedEngine("engine 1"))
    for engine in node.engines:
        engine.close()
    assert threading.active_count() == before + 2
    pool.close()
    assert threading.active_count() == before


# -- idle engines ---------------------------------------------------------------------------------------------------


def test_idle_clock_matches_worked_example(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    clock = IdleClock()

    def after(seconds: float, what: Callable[[], Any]) -> Any:
        now[0] += seconds
        return what()

    after(2, lambda: clock.set(False))
    assert after(10, clock.take_s) == 2  # idle from the start on
    after(1, lambda: clock.set(True))
    assert after(3, clock.take_s) == 3
    after(4, clock.pause)  # a weight sync
    after(50, clock.resume)
    after(5, lambda: clock.set(True))
    assert clock.take_s() == 9
    after(1, clock.pause)
    after(7, lambda: clock.set(False))  # something is submitted during the weight sync
    after(7, clock.resume)
    assert clock.take_s() == 1
    after(7, clock.pause)
    after(7, lambda: clock.set(True))  # the last answer comes during the weight sync
    after(7, clock.resume)
    after(6, clock.pause)
    assert clock.take_s() == 6


def test_idle_seconds_average_over_engines(node: Node) -> None:
    engines = [ThreadedEngine("engine 0"), ThreadedEngine("engine 1")]
    for engine in engines:
        engine.works.clear()
    pool = node.pool(*engines)
    pool.accounts.take_idle_s()
    pool.submit([Request(token_ids=np.array([1], np.int32), n=1, seed=0)])  # on one of two
    begun = time.monotonic()
    time.sleep(0.2)
    with pool.accounts.busy_otherwise():
        time.sleep(0.3)
    idle_s = pool.accounts.take_idle_s()
    assert 0.1 <= idle_s <= (time.monotonic() - begun - 0.3) / 2 + 0.05
