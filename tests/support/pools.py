"""Pools over engines with threads, and what they are to answer."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from grpo.rollout.packing import Request
from grpo.rollout.pool import EnginePool
from tests.support.engines import DEADLINE_S, ThreadedEngine, answer_to


class Node:
    """A pool over such engines, ended together."""

    def __init__(self) -> None:
        self.engines: list[ThreadedEngine] = []
        self.pools: list[EnginePool] = []

    def pool(self, *engines: ThreadedEngine, windows: list[int] | None = None, **more: Any) -> EnginePool:
        self.engines += engines
        pool = EnginePool(
            engines,
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
            engine.close()


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
