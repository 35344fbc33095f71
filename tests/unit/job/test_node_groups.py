"""A process alone, and rank 0's judgement about the others, in a store that nobody else is at."""

import pickle
from datetime import timedelta

import pytest
import torch.distributed as dist

from grpo.job.agreement import _judge, agree_on_topology
from grpo.job.failure import FailureRecord, GenerationDropped, JobFailed
from grpo.job.node_groups import NodeGroups
from grpo.job.signals import StopRequest
from grpo.job.topology import NodeTopology
from grpo.job.watch import FailureWatch
from tests.unit.job.test_topology import job

RECORD = FailureRecord(node=0, rank=0, host="a", phase="push", cause="EngineError: gone")


def test_a_lone_process_answers_itself_and_fails_by_its_own_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo.job.node_groups.SIGNAL_PATIENCE_S", 0.0)
    (topology, *_) = job((8,), ranks=1)
    groups = NodeGroups(topology, max_wait_s=1.0)
    watch = FailureWatch(None, node=0, rank=0, host="a", local_pids={})
    assert groups.all_gather(7) == [7]
    assert groups.exchange(watch, None, 7) == [7]
    with pytest.raises(JobFailed, match="EngineError: gone"):
        groups.exchange(watch, RECORD)
    watch.signals.request = StopRequest(why="got SIGUSR1", requeue=True)
    with pytest.raises(GenerationDropped, match=r"a stop was asked for \(got SIGUSR1\)") as caught:
        groups.exchange(watch, RECORD)
    assert caught.value.why == "got SIGUSR1"
    watch.signals.release()


def test_a_lone_process_raises_what_does_not_fit() -> None:
    def plan() -> NodeTopology:
        raise ValueError("one GPU is missing")

    with pytest.raises(ValueError, match="one GPU is missing"):
        agree_on_topology(plan, rank=0, world_size=1, timeout_s=1.0)


def test_rank_0_names_who_did_not_come_and_what_does_not_fit_between_nodes() -> None:
    topologies = job((8, 8), ranks=1)
    store = dist.HashStore()
    store.set("rank0", pickle.dumps((topologies[0], None, 11)))
    error, _ = _judge(store, 2, timedelta(seconds=0.1))
    assert isinstance(error, TimeoutError)
    assert str(error) == "ranks [1] did not come within 0 s"
    store.set("rank1", pickle.dumps((topologies[0], None, 12)))
    error, pids = _judge(store, 2, timedelta(seconds=1))
    assert isinstance(error, ValueError)
    assert pids == [11, 12]
    store.set("rank1", pickle.dumps((topologies[1], None, 12)))
    assert _judge(store, 2, timedelta(seconds=1)) == (None, [11, 12])
