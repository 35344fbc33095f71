"""A pool with several batches under way, whose engines get new weights while they sample."""

import time
from typing import Any

import numpy as np
import pytest

from grpo.faults.watch import FailureWatch
from grpo.groups.node_groups import NodeGroups
from grpo.place.topology import read_topology
from grpo.record.timeline.recorder import Recorder
from grpo.record.timeline.records import GENERATE
from grpo.rollout.node import LocalMainSampler
from grpo.rollout.packing import Request, to_lists
from grpo.rollout.pool import EnginePool
from grpo.rollout.prompts import Prompts
from grpo.rollout.search import DeadlyRequests
from tests.support.engines import DEADLINE_S, ThreadedEngine
from tests.support.pools import Node, expected_of, requests_of, wait_until


class Watch(FailureWatch):
    """Has seen no failure; a test says what happens when it is asked."""

    def __init__(self) -> None:
        super().__init__(None, node=0, rank=0, host="here")
        self.looks: list[Any] = []

    def check(self) -> None:
        if self.looks:
            self.looks.pop(0)()


def asleep(name: str = "engine 0", **settings: Any) -> ThreadedEngine:
    """An engine that answers nothing until its `works` is set."""
    engine = ThreadedEngine(name, **settings)
    engine.works.clear()
    return engine


def one_each(*rows: int) -> list[Request]:
    return [Request(token_ids=np.array([row], np.int32), n=1, seed=row) for row in rows]


def prompts_sent(engine: ThreadedEngine) -> list[int]:
    return [int(sample.token_ids[0]) for sample in engine.samples]


def test_pool_sends_evaluation_first_then_batches_in_order(node: Node) -> None:
    engine = asleep(num_slots=1)
    pool = node.pool(engine)
    long_prompt = Request(token_ids=np.array([30] * 9, np.int32), n=1, seed=0)
    batches = [pool.submit(one_each(10, 11), order=1), pool.submit([long_prompt], order=2)]
    evaluation = pool.submit(one_each(20), order=0)
    engine.works.set()
    for batch in (*batches, evaluation):
        assert pool.collect(batch, DEADLINE_S) is not None
    assert prompts_sent(engine) == [10, 20, 11, 30]  # the first had begun


def test_sampler_timeout_in_flight_counts_from_collect(node: Node) -> None:
    """Three batches of a step of ten minutes: the last one was submitted longer ago than the timeout."""
    engine, watch = asleep(num_slots=2), Watch()
    pool = node.pool(engine, in_flight=True)
    topology = read_topology(use_cpu=True, reserved_gpus=None, tensor_parallel_size=1, engines_per_node=None, env={})
    groups = NodeGroups(topology, max_wait_s=DEADLINE_S)
    sampler = LocalMainSampler(groups, watch, pool, timeout_s=DEADLINE_S, overlaps=True)
    pending = [sampler.submit(Prompts.of([[row, row]] * 2), base_seed=row, order=row) for row in range(3)]
    for each in pending:
        each.batch.submitted_at -= 600
        each.batch.asked_at -= 600
    watch.looks.append(lambda: None)
    watch.looks.append(engine.works.set)  # the first look is before the wait
    collected = [sampler.collect(each) for each in pending]
    assert [completions.num_completions for completions, _ in collected] == [2, 2, 2]


def test_take_sampled_in_flight_covers_all_batches_since_last_call(node: Node) -> None:
    engine = ThreadedEngine("engine 0", num_slots=4)
    pool = node.pool(engine, in_flight=True)
    requests = requests_of(np.random.default_rng(3), 8)
    batches = [pool.submit(requests, order=order) for order in range(3)]
    for batch in batches:
        pool.collect(batch, DEADLINE_S)
    num_tokens, seconds = pool.accounts.take_sampled()
    assert num_tokens == 3 * sum(len(row) for row in expected_of(requests)[0])
    assert 0 < seconds <= time.monotonic() - batches[0].submitted_at  # the accounts may close behind the last batch
    assert pool.accounts.take_sampled() == (0, 0.0)


def kill(node: Node, pool: EnginePool) -> None:
    """The only engine dies at work on what it has; another one takes its place, asleep, with the same weights."""
    engine = node.engines[-1]
    wait_until(lambda: engine.samples)
    engine.die()
    node.engines.append(asleep())
    pool.take_up([node.engines[-1]], policy_version=pool.policy_version)


def test_engine_deaths_across_weight_syncs_blame_no_prompt(node: Node) -> None:
    """Unrelated ones, in the hours of a long completion, accuse no prompt."""
    pool = node.pool(asleep(), in_flight=True)
    requests = one_each(7, 8)
    batch = pool.submit(requests)
    for step in range(1, 5):
        kill(node, pool)
        wait_until(lambda: len(node.engines[-1].samples) == 2)  # it is at work on both
        pool.take_up([node.engines[-1]], policy_version=step)
    node.engines[-1].works.set()
    completions = pool.collect(batch, DEADLINE_S)
    assert completions is not None
    assert to_lists(completions) == expected_of(requests)


def test_engine_deaths_between_two_syncs_raise_deadly_requests(node: Node) -> None:
    pool = node.pool(asleep(), in_flight=True)
    batch = pool.submit(one_each(7, 8))
    for _ in range(3):
        kill(node, pool)
    with pytest.raises(DeadlyRequests, match="GRPO-410"):
        pool.collect(batch, DEADLINE_S)


def test_cache_salt_in_flight_changes_with_each_weight_sync(node: Node) -> None:
    """Even where the policy version is the same: the weights may be others, as for an evaluation."""
    engine = ThreadedEngine("engine 0")
    pool = node.pool(engine, in_flight=True)
    for _ in range(2):
        pool.take_up([engine], policy_version=3)
        pool.collect(pool.submit(one_each(1, 2)), DEADLINE_S)
    first, second, third, fourth = [sample.cache_salt for sample in engine.samples]
    assert first is not None
    assert first == second != third == fourth


def test_cache_salt_without_in_flight_is_none(node: Node) -> None:
    engine = ThreadedEngine("engine 0")
    pool = node.pool(engine)
    pool.take_up([engine], policy_version=3)
    pool.collect(pool.submit(one_each(1)), DEADLINE_S)
    assert engine.samples[0].cache_salt is None


def test_pool_sends_late_requests_with_adapter_of_submission(node: Node) -> None:
    engine = asleep(num_slots=1)
    pool = node.pool(engine, in_flight=True)
    pool.take_up([engine], policy_version=0, adapter=1)
    early = pool.submit(one_each(1, 2), order=1)
    pool.take_up([engine], policy_version=1, adapter=2)
    late = pool.submit(one_each(3), order=2)
    engine.works.set()
    assert pool.collect(early, DEADLINE_S) is not None
    assert pool.collect(late, DEADLINE_S) is not None
    assert [(int(sample.token_ids[0]), sample.adapter) for sample in engine.samples] == [(1, 1), (2, 1), (3, 2)]
    assert {*early.policy_versions.values()} == {0}
    assert {*late.policy_versions.values()} == {1}
    assert early.newer.versions == 0  # its age is that of its adapter


def test_timeline_of_busy_engine_records_generate_per_weight_sync(node: Node) -> None:
    records: list[Any] = []
    engine = asleep(num_slots=4)

    class Kept(Recorder):
        def add(self, phase: str, *args: Any, **more: Any) -> None:
            records.append((phase, more["policy_version"]))

    pool = node.pool(engine, in_flight=True, timeline=Kept())
    batch = pool.submit(one_each(1, 2))
    for step in range(1, 4):
        pool.take_up([engine], policy_version=step)
    engine.works.set()
    pool.collect(batch, DEADLINE_S)
    assert records == [(GENERATE, 0), (GENERATE, 1), (GENERATE, 2), (GENERATE, 3)]
