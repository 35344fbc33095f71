"""Engines that are scripted, and pools over them."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from grpo.engine.client import EngineDied, EngineError
from grpo.engine.messages import Sample, Sampled
from grpo.rollout.packing import Request
from grpo.rollout.pool import EnginePool

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
                    self._hear(EngineDied(f"{self.name} was killed by signal 9"))
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
                nothing = replace(sampled, token_ids=np.empty(0), engine_logprobs=np.empty(0))
                refusal = replace(nothing, error="ValueError: too odd", is_refusal=True)
                self._hear(refusal if self.refuses(owed) else sampled)

    def die(self) -> None:
        """As a kill from outside, whatever it does."""
        self._ended.set()
        self._thread.join(DEADLINE_S)
        self._hear(EngineDied(f"{self.name} was killed by signal 9"))

    def end(self) -> None:
        self.reads.set()
        self._ended.set()
        self._thread.join(DEADLINE_S)


class Node:
    """A pool over fake engines, ended together."""

    def __init__(self) -> None:
        self.engines: list[FakeEngine] = []
        self.pools: list[EnginePool] = []

    def pool(self, *engines: FakeEngine, windows: list[int] | None = None, **more: Any) -> EnginePool:
        self.engines += engines
        pool = EnginePool(
            engines,  # type: ignore[arg-type]
            max_num_seqs=windows or [engine.num_slots for engine in engines],
            max_tokens=50,
            **more,
        )
        self.pools.append(pool)
        return pool

    def end(self) -> None:
        for pool in self.pools:
            pool.close()
        for engine in self.engines:
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


def wait_until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)
