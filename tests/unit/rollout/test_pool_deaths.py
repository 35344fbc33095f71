"""A pool whose engines die and come back."""

import numpy as np
import pytest

from grpo.rollout import pool as engine_pool
from grpo.rollout.batch import Batch
from grpo.rollout.packing import Request, to_lists
from grpo.rollout.pool import EnginePool
from grpo.rollout.search import DeadlyRequests
from tests.support.engines import DEADLINE_S, ThreadedEngine
from tests.support.pools import Node, expected_of, requests_of, wait_until


def come_back(node: Node, pool: EnginePool, *places: int, policy_version: int = 0) -> None:
    """New engines in these places, as after a weight sync."""
    clients = [*pool._clients]
    for place in places:
        clients[place] = ThreadedEngine(f"engine {place}, again")
        node.engines.append(clients[place])
    pool.take_up(clients, policy_version=policy_version)


@pytest.mark.parametrize("trial", range(10))
def test_pool_after_engine_death_completes_on_others(trial: int, node: Node) -> None:
    """Whatever it had answered, and under the seeds that each completion has anyway."""
    rng = np.random.default_rng(trial)
    engines = [ThreadedEngine(f"engine {number}", num_slots=3, token_s=1e-5) for number in range(3)]
    engines[0].dies_after = int(rng.integers(0, 8))
    pool = node.pool(*engines)
    batches = [requests_of(rng, 12, first_seed=1000 * number) for number in range(2)]
    submitted = [pool.submit(requests) for requests in batches]
    for requests, batch in zip(batches, submitted, strict=True):
        completions = pool.collect(batch, DEADLINE_S)
        assert completions is not None
        assert to_lists(completions) == expected_of(requests)
    later = requests_of(rng, 5)
    completions = pool.collect(pool.submit(later), DEADLINE_S)
    assert completions is not None
    assert to_lists(completions) == expected_of(later)


@pytest.mark.parametrize("num_engines", [1, 2])
@pytest.mark.parametrize("trial", range(5))
def test_pool_collect_without_engines_returns_none_until_restart(
    trial: int, num_engines: int, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_pool, "MAX_DEATHS", num_engines + 1)  # the second may take what the first had
    rng = np.random.default_rng(trial)
    engines = [ThreadedEngine(f"engine {number}", token_s=1e-5) for number in range(num_engines)]
    for engine in engines:
        engine.dies_after = int(rng.integers(0, 6))
    pool = node.pool(*engines)
    requests = requests_of(rng, 20)
    batch = pool.submit(requests)
    assert pool.collect(batch, DEADLINE_S) is None
    ahead = requests_of(rng, 3)
    waiting = pool.submit(ahead)  # nobody is there to take it
    num_left = len(batch.ids) - len(batch.answers)
    come_back(node, pool, *range(num_engines), policy_version=7)
    completions = pool.collect(batch, DEADLINE_S)
    assert completions is not None
    assert to_lists(completions) == expected_of(requests)
    assert (completions.policy_versions == 7).sum() == num_left
    assert (completions.policy_versions == 0).sum() == len(batch.ids) - num_left
    assert 0 < pool.take_num_reissued() <= num_left + num_engines
    assert pool.take_num_reissued() == 0
    completions = pool.collect(waiting, DEADLINE_S)
    assert completions is not None
    assert to_lists(completions) == expected_of(ahead)


def test_pool_after_idle_engine_death_reissues_nothing(node: Node) -> None:
    engine = ThreadedEngine("engine 0")
    pool = node.pool(engine)
    engine.die()
    come_back(node, pool, 0)
    requests = requests_of(np.random.default_rng(0), 5)
    completions = pool.collect(pool.submit(requests), DEADLINE_S)
    assert completions is not None
    assert to_lists(completions) == expected_of(requests)
    assert pool.take_num_reissued() == 0


def test_pool_after_three_engine_deaths_raises_and_names_rows(node: Node) -> None:
    engine = ThreadedEngine("engine 0")
    engine.works.clear()
    pool = node.pool(engine)
    done = pool.submit([])
    batch = pool.submit(requests_of(np.random.default_rng(1), 2))
    for _ in range(3):
        at_work = node.engines[-1]
        wait_until(lambda at_work=at_work: at_work.samples)
        at_work.die()
        if node.engines[-1] is at_work and len(node.engines) < 3:
            assert pool.collect(batch, DEADLINE_S) is None
            node.engines.append(ThreadedEngine("engine 0, again"))
            node.engines[-1].works.clear()
            pool.take_up([node.engines[-1]], policy_version=0)
    rows = [*range(len(batch.ids))]
    with pytest.raises(DeadlyRequests) as raised:
        pool.collect(batch, DEADLINE_S)
    assert f"rows {rows} of this node's generation batch" in str(raised.value)
    assert "[GRPO-410]" in str(raised.value)
    assert "again was killed by signal 9" in str(raised.value)
    assert pool.collect(done, DEADLINE_S) is not None


def test_pool_after_engine_deaths_blames_no_queued_rows(node: Node) -> None:
    """By a lone engine, too: each of 12 is one completion, and it has places for 4."""
    engine = ThreadedEngine("engine 0", num_slots=4)
    engine.works.clear()
    pool = node.pool(engine)
    requests = [Request(token_ids=np.array([row], np.int32), n=1, seed=row) for row in range(12)]
    batch = pool.submit(requests)
    for num_asked in (4, 4, 1):  # the last one is tried with what was answered before
        at_work = node.engines[-1]
        wait_until(lambda at_work=at_work, num_asked=num_asked: len(at_work.samples) == num_asked)
        at_work.die()
        if len(node.engines) < 3:
            assert pool.collect(batch, DEADLINE_S) is None
            node.engines.append(ThreadedEngine("engine 0, again"))
            node.engines[-1].works.clear()
            pool.take_up([node.engines[-1]], policy_version=0)
    with pytest.raises(DeadlyRequests, match=r"rows \[0, 1, 2, 3\] of"):
        pool.collect(batch, DEADLINE_S)


def test_pool_after_engine_death_resamples_no_dropped_batch(node: Node) -> None:
    engine = ThreadedEngine("engine 0")
    engine.works.clear()
    pool = node.pool(engine)
    dropped: Batch = pool.submit(requests_of(np.random.default_rng(2), 4))
    kept_requests = requests_of(np.random.default_rng(3), 4, first_seed=50)
    kept = pool.submit(kept_requests)
    pool.drop(dropped)
    engine.die()
    come_back(node, pool, 0)
    completions = pool.collect(kept, DEADLINE_S)
    assert completions is not None
    assert to_lists(completions) == expected_of(kept_requests)
    assert {i for sample in node.engines[-1].samples for i in sample.ids} == {*kept.ids}
    wait_until(lambda: sum(thread.is_alive() for thread in pool._senders._threads) == 1)
