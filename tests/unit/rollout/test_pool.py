"""The pool's threads, over scripted engines."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

from grpo.engine.client import EngineError
from grpo.engine.messages import Sample, Sampled
from grpo.rollout import pool as engine_pool
from grpo.rollout.packing import Request, to_lists
from grpo.rollout.pool import EnginePool, IdleClock

DEADLINE_S = 20.0


def answer_to(token_ids: np.ndarray, seed: int) -> list[int]:
    """What any engine samples for a prompt and a seed."""
    rng = np.random.default_rng(seed)
    return [*token_ids.tolist(), *rng.integers(0, 100, size=rng.integers(0, 40)).tolist()]


class Owed(NamedTuple):
    """A completion that an engine has not answered."""

    completion_id: int
    token_ids: np.ndarray
    seed: int


class FakeEngine:
    """Runs `num_slots` sequences at a time, one token each in `token_s`, from a thread of its own."""

    def __init__(self, name: str, *, num_slots: int = 4, token_s: float = 0.0) -> None:
        self.name = name
        self.num_slots, self.token_s = num_slots, token_s
        self.told: list[tuple[str, tuple[int, ...]]] = []
        self.samples: list[Sample] = []
        self.dies_after: int | None = None
        self.refuses: Callable[[Owed], bool] = lambda owed: False
        self.reads = threading.Event()
        self.reads.set()
        self.works = threading.Event()
        self.works.set()
        self._waiting: list[Owed] = []
        self._lock = threading.Lock()
        self._hear: Callable[[Sampled | EngineError], None] = lambda answer: None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    # as EngineClient

    def listen(self, hear: Callable[[Sampled | EngineError], None]) -> None:
        self._hear = hear

    def submit(self, sample: Sample) -> None:
        assert self.reads.wait(DEADLINE_S)
        with self._lock:
            self.samples.append(sample)
            self.told.append(("sample", tuple(sample.ids)))
            self._waiting += [Owed(ident, sample.token_ids, sample.seed + i) for i, ident in enumerate(sample.ids)]

    def abort(self, ids: tuple[int, ...]) -> None:
        assert self.reads.wait(DEADLINE_S)
        with self._lock:
            self.told.append(("abort", tuple(ids)))
            self._waiting = [owed for owed in self._waiting if owed.completion_id not in ids]

    def error(self, what: str) -> EngineError:
        return EngineError(f"{self.name} {what}")

    # its own thread

    def _run(self) -> None:
        answered = 0
        while not self._ended.wait(self.token_s or 0.0001):
            if not self.works.is_set():
                continue
            with self._lock:
                running = self._waiting[: self.num_slots]
            for owed in running:
                tokens = answer_to(owed.token_ids, owed.seed)
                self._ended.wait(self.token_s * len(tokens) / self.num_slots)
                if answered == self.dies_after:
                    self._hear(self.error("was killed by signal 9"))
                    return
                with self._lock:
                    left = [other for other in self._waiting if other.completion_id != owed.completion_id]
                    if len(left) == len(self._waiting):
                        continue  # aborted
                    self._waiting = left
                answered += 1
                sampled = Sampled(
                    completion_id=owed.completion_id,
                    token_ids=np.array(tokens, np.int32),
                    engine_logprobs=-np.array(tokens, np.float32),
                )
                self._hear(self.error("refused a request: too long") if self.refuses(owed) else sampled)

    def end(self) -> None:
        self.reads.set()
        self._ended.set()
        self._thread.join(DEADLINE_S)


class Node:
    """A pool over fake engines, ended together."""

    def __init__(self) -> None:
        self.engines: list[FakeEngine] = []
        self.pools: list[EnginePool] = []

    def pool(self, *engines: FakeEngine, windows: list[int] | None = None) -> EnginePool:
        self.engines += engines
        pool = EnginePool(
            engines,  # type: ignore[arg-type]
            max_num_seqs=windows or [engine.num_slots for engine in engines],
            max_tokens=50,
        )
        self.pools.append(pool)
        return pool


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setattr(engine_pool, "POLL_S", 0.02)
    node = Node()
    yield node
    for pool in node.pools:
        pool.close()
    for engine in node.engines:
        engine.end()


def requests_of(rng: np.random.Generator, num_requests: int, *, first_seed: int = 0) -> list[Request]:
    requests, row = [], 0
    for _ in range(num_requests):
        n = int(rng.integers(1, 6))
        prompt = rng.integers(0, 9, size=rng.integers(0, 5)).astype(np.int32)
        requests.append(Request(token_ids=prompt, n=n, seed=first_seed + row))
        row += n
    return requests


def expected_of(requests: list[Request]) -> tuple[list[list[int]], list[list[float]]]:
    rows = [answer_to(request.token_ids, request.seed + number) for request in requests for number in range(request.n)]
    return rows, [[-float(token) for token in row] for row in rows]


@pytest.mark.parametrize("trial", range(20))
def test_every_completion_comes_back_to_its_place(trial: int, node: Node) -> None:
    """For any lengths, engines, speeds, windows and numbers of samples; several batches at once."""
    rng = np.random.default_rng(trial)
    engines = [
        FakeEngine(f"engine {number}", num_slots=int(rng.integers(1, 6)), token_s=float(rng.choice([0, 0, 2e-5, 2e-4])))
        for number in range(rng.integers(1, 5))
    ]
    pool = node.pool(*engines, windows=rng.integers(1, 9, size=len(engines)).tolist())
    batches = [requests_of(rng, int(rng.integers(0, 14)), first_seed=1000 * number) for number in range(3)]
    submitted = [pool.submit(requests) for requests in batches]
    for number in rng.permutation(3):
        completions = pool.collect(submitted[number], DEADLINE_S)
        assert to_lists(completions) == expected_of(batches[number])


def test_an_engine_that_is_done_takes_what_another_has_not_begun(node: Node) -> None:
    slow, fast = FakeEngine("slow", num_slots=2), FakeEngine("fast", num_slots=2)
    slow.works.clear()
    pool = node.pool(slow, fast)
    requests = requests_of(np.random.default_rng(0), 20)
    batch = pool.submit(requests)
    wait_until(lambda: len(batch.answers) == len(batch.ids) - sum(len(ids) for _, ids in slow.told))
    assert len(slow.told) == 1  # one chunk, which was all that it had room for
    slow.works.set()
    assert to_lists(pool.collect(batch, DEADLINE_S)) == expected_of(requests)


def test_no_engine_is_without_work_while_another_has_more_than_its_share(node: Node) -> None:
    first, second = FakeEngine("engine 0", num_slots=64), FakeEngine("engine 1", num_slots=64)
    pool = node.pool(first, second)
    requests = [Request(token_ids=np.array([7, 8], np.int32), n=13, seed=5)]
    assert to_lists(pool.collect(pool.submit(requests), DEADLINE_S)) == expected_of(requests)
    assert [len(ids) for engine in (first, second) for _, ids in engine.told] == [7, 6]


@pytest.mark.parametrize(("num_slots", "together"), [(4, {True, False}), (64, {True})])
def test_answers_come_one_by_one_only_while_something_waits(num_slots: int, together: set[bool], node: Node) -> None:
    engines = [FakeEngine(f"engine {number}", num_slots=num_slots) for number in range(2)]
    requests = requests_of(np.random.default_rng(8), 12)
    assert to_lists(node.pool(*engines).collect(node.pools[0].submit(requests), DEADLINE_S)) == expected_of(requests)
    assert {sample.together for engine in engines for sample in engine.samples} == together


def test_submitting_waits_for_no_engine(node: Node) -> None:
    engine = FakeEngine("engine 0")
    engine.reads.clear()
    pool = node.pool(engine)
    began = time.monotonic()
    batch = pool.submit(requests_of(np.random.default_rng(0), 3))
    pool.drop(batch)
    assert time.monotonic() - began < 1.0
    engine.reads.set()
    wait_until(lambda: len(engine.told) > 1)
    assert [word for word, _ in engine.told][-1] == "abort"  # after what it takes back


def wait_until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.parametrize("num_engines", [1, 2])
def test_a_dead_engine_ends_the_wait_with_its_words(num_engines: int, node: Node) -> None:
    engines = [FakeEngine(f"engine {number}", token_s=1e-5) for number in range(num_engines)]
    engines[0].dies_after = 2
    pool = node.pool(*engines)
    batch = pool.submit(requests_of(np.random.default_rng(1), 30))
    with pytest.raises(EngineError, match="engine 0 was killed by signal 9"):
        pool.collect(batch, DEADLINE_S)
    with pytest.raises(EngineError, match="engine 0 was killed by signal 9"):
        pool.collect(pool.submit(requests_of(np.random.default_rng(1), 2)), DEADLINE_S)
    wait_until(lambda: not any(thread.is_alive() for thread in pool._threads))


def test_a_refused_request_ends_the_wait(node: Node) -> None:
    engine = FakeEngine("engine 0")
    engine.refuses = lambda owed: owed.seed == 5
    pool = node.pool(engine)
    with pytest.raises(EngineError, match="engine 0 refused a request: too long"):
        pool.collect(pool.submit(requests_of(np.random.default_rng(2), 9)), DEADLINE_S)


def test_whatever_a_thread_meets_is_raised_by_the_wait(node: Node) -> None:
    engine = FakeEngine("engine 0")
    engine.submit = lambda sample: 1 / 0  # type: ignore[assignment,return-value]
    pool = node.pool(engine)
    with pytest.raises(ZeroDivisionError):
        pool.collect(pool.submit(requests_of(np.random.default_rng(2), 9)), DEADLINE_S)


def test_the_deadline_counts_from_the_submission_and_names_an_engine(node: Node) -> None:
    stuck = FakeEngine("engine 1")
    stuck.works.clear()
    pool = node.pool(stuck)
    batch = pool.submit(requests_of(np.random.default_rng(3), 4))
    time.sleep(0.3)
    began = time.monotonic()
    with pytest.raises(EngineError, match=r"engine 1 .* have not answered \d+ of \d+ completions after 0\.4 s"):
        pool.collect(batch, 0.4)
    assert time.monotonic() - began < 0.3


def test_what_a_check_raises_ends_the_wait(node: Node) -> None:
    stuck = FakeEngine("engine 0")
    stuck.works.clear()
    pool = node.pool(stuck)

    def check() -> None:
        raise ZeroDivisionError("elsewhere")

    with pytest.raises(ZeroDivisionError):
        pool.collect(pool.submit(requests_of(np.random.default_rng(4), 2)), DEADLINE_S, check)


def test_a_dropped_batch_gives_its_places_to_the_next(node: Node) -> None:
    engine = FakeEngine("engine 0", num_slots=4)
    engine.works.clear()
    pool = node.pool(engine)
    dropped = pool.submit(requests_of(np.random.default_rng(5), 12))
    requests = requests_of(np.random.default_rng(6), 12, first_seed=500)
    kept = pool.submit(requests)
    pool.drop(dropped)
    engine.works.set()
    assert to_lists(pool.collect(kept, DEADLINE_S)) == expected_of(requests)
    told_to_drop = {i for word, ids in engine.told if word == "abort" for i in ids}
    assert told_to_drop
    assert told_to_drop <= set(dropped.ids)
    pool.drop(kept)  # of a finished one nothing is left to drop
    assert not any(set(kept.ids) & set(ids) for word, ids in engine.told if word == "abort")


def test_no_requests_are_answered_at_once(node: Node) -> None:
    pool = node.pool(FakeEngine("engine 0"))
    completions = pool.collect(pool.submit([]), DEADLINE_S)
    assert to_lists(completions) == ([], [])


def test_a_closed_pool_leaves_no_threads(node: Node) -> None:
    before = threading.active_count()
    pool = node.pool(FakeEngine("engine 0"), FakeEngine("engine 1"))
    for engine in node.engines:
        engine.end()
    assert threading.active_count() == before + 2
    pool.close()
    assert threading.active_count() == before


# -- idle engines ---------------------------------------------------------------------------------------------------


def test_the_idle_clock_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
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
    after(4, clock.pause)  # a push
    after(50, clock.resume)
    after(5, lambda: clock.set(True))
    assert clock.take_s() == 9
    after(1, clock.pause)
    after(7, lambda: clock.set(False))  # something is submitted during the push
    after(7, clock.resume)
    assert clock.take_s() == 1
    after(7, clock.pause)
    after(7, lambda: clock.set(True))  # the last answer comes during the push
    after(7, clock.resume)
    after(6, clock.pause)
    assert clock.take_s() == 6


def test_idle_seconds_are_a_mean_over_engines(node: Node) -> None:
    engines = [FakeEngine("engine 0"), FakeEngine("engine 1")]
    for engine in engines:
        engine.works.clear()
    pool = node.pool(*engines)
    pool.take_idle_s()
    pool.submit([Request(token_ids=np.array([1], np.int32), n=1, seed=0)])  # on one of two
    begun = time.monotonic()
    time.sleep(0.2)
    with pool.busy_otherwise():
        time.sleep(0.3)
    idle_s = pool.take_idle_s()
    assert 0.1 <= idle_s <= (time.monotonic() - begun - 0.3) / 2 + 0.05
