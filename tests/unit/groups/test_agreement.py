"""Do all ranks make one job: made-up placements, and rank 0's judgement in a store that nobody else is at."""

import pickle
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from grpo.faults.failure import FailureRecord
from grpo.groups.agreement import (
    _find_verdict,
    _judge,
    _name_missing,
    _store_of,
    _Verdict,
    _Word,
    agree_on_topology,
    check_nodes,
    give_up,
    knowing,
)
from grpo.place.launch import read_launch
from grpo.place.topology import NodeTopology
from tests.support.made_up_jobs import job, launch, plan, torchrun_env


def test_check_nodes_with_different_reserved_gpus_passes():
    topologies = job()
    assert [t.num_engines for t in topologies if t.is_local_main] == [2, 2, 1, 2]
    assert [t.reserved_devices for t in topologies if t.is_local_main][2] == ("6",)
    check_nodes(topologies)
    check_nodes([plan(read_launch({}), ())])


def test_check_nodes_with_two_nodes_on_one_host_passes():
    assert check_nodes([plan(launch(rank, 4, 2), (), host="same") for rank in range(4)]) is None


def test_check_nodes_with_uneven_ranks_passes() -> None:
    """Three, one and two: as torchrun numbers them, whatever each agent starts."""
    env = {"GROUP_WORLD_SIZE": 3, "WORLD_SIZE": 6}
    launches = [torchrun_env(rank, 6, 3, **env) for rank in range(3)]
    launches += [torchrun_env(3, 6, 1, **env, GROUP_RANK=1, LOCAL_RANK=0)]
    launches += [torchrun_env(rank, 6, 2, **env, GROUP_RANK=2, LOCAL_RANK=rank - 4) for rank in (4, 5)]
    topologies = [plan(read_launch(env), (), host="abc"[int(env["GROUP_RANK"])]) for env in launches]
    check_nodes(topologies)
    for topology in knowing(topologies):
        assert (topology.ranks_by_node, topology.engines_by_node) == ((3, 1, 2), (1, 1, 1))
        assert topology.nodes() == [range(3), range(3, 4), range(4, 6)]
        assert topology.nodes()[topology.node] == topology.node_ranks
    with pytest.raises(ValueError, match=r"local ranks came: node 0 \(host a\): 0\|1\|2, node 2 \(host c\): 0\|1: "):
        check_nodes(
            [replace(t, rank=rank, world_size=5) for rank, t in enumerate(t for t in topologies if t.node != 1)]
        )
    dealt = [replace(t, node=t.rank % 2, local_rank=t.rank // 2, host=f"h{t.rank % 2}") for t in job((8, 8), ranks=2)]
    with pytest.raises(ValueError, match="ranks are numbered node by node"):
        check_nodes(dealt)


@pytest.mark.parametrize(
    ("gpus", "ranks", "engines", "differ"),
    [
        ((8, 8), 7, (1, 1), False),
        ((8, 7), (7, 6), (1, 1), True),
        ((8, 7), 6, (2, 1), True),
        ((8, 4), (6, 3), (2, 1), False),  # an engine for three ranks on both
    ],
)
def test_engines_differ_with_uneven_nodes_matches_table(
    gpus: tuple[int, ...], ranks: int | tuple[int, ...], engines: tuple[int, ...], differ: bool
) -> None:
    (first, *_) = knowing(job(gpus, ranks))
    assert (first.engines_by_node, first.engines_differ) == (engines, differ)


def change(topologies, ranks, **fields):
    return [replace(t, **fields) if t.rank in ranks else t for t in topologies]


@pytest.mark.parametrize(
    ("ranks", "fields", "message"),
    [
        (range(2, 4), {"tensor_parallel_size": 2}, r"vllm_tensor_parallel_size differs.*\(host h1\): 2:"),
        (range(2, 4), {"num_nodes": 3}, r"num_machines differs.*node 0 \(host h0\): 2, node 1 \(host h1\): 3:"),
        (range(4), {"num_nodes": 3}, r"num_machines is 3, .*node 0 \(host h0\): 0\|1, node 1 \(host h1\): 0\|1:"),
        (range(2, 4), {"node": 0}, r"the host differs between ranks of one node: node 0 \(host h0\|h1\): h0\|h1:"),
        (range(2, 4), {"node": 0, "host": "h0"}, "num_machines is 2, .*--machine_rank"),
        ([3], {"local_rank": 0}, r"local ranks came: .*node 1 \(host h1\): 0:"),
        ([3], {"devices": ("7",)}, r"visible GPUs differs between ranks of one node: .*h1\): 0,1,2,3,4,5,6,7\|7:"),
        (range(2, 4), {"devices": ()}, r"some have none: .*node 1 \(host h1\): none:"),
        (
            range(4),
            lambda t: {"node": 1 - t.node, "host": f"h{1 - t.node}"},
            r"ranks are numbered node by node, but these local ranks came: ",
        ),
        ([3], {"rank": 2}, "4 ranks answered, but number 3 on host h1 takes itself for rank 2 of 4"),
        ([3], {"world_size": 8}, "takes itself for rank 3 of 8"),
    ],
)
def test_check_nodes_with_inconsistent_topology_raises(ranks, fields, message):
    topologies = job((8, 8), ranks=2)
    check_nodes(topologies)
    with pytest.raises(ValueError, match=message):
        check_nodes([t for t in topologies for t in change([t], ranks, **(fields(t) if callable(fields) else fields))])


def test_check_nodes_with_other_versions_or_variables_names_nodes():
    settings = (("NCCL_P2P_DISABLE", "1"), ("torch", "2.13.0"))
    topologies = change(job((8, 8), ranks=2), range(4), settings=settings)
    check_nodes(topologies)
    message = r"GRPO-305.*torch: 2\.13\.0 on node 0 \(host h0\); 2\.12\.1 on node 1 \(host h1\)"
    with pytest.raises(ValueError, match=message):
        check_nodes(change(topologies, range(2, 4), settings=(*settings[:1], ("torch", "2.12.1"))))
    with pytest.raises(ValueError, match=r"NCCL_NET: none on node 0 .*; IB on node 1"):
        check_nodes(change(topologies, range(2, 4), settings=(*settings, ("NCCL_NET", "IB"))))


def test_agree_on_topology_of_lone_process_raises_plan_error() -> None:
    def plan() -> NodeTopology:
        raise ValueError("one GPU is missing")

    with pytest.raises(ValueError, match="one GPU is missing"):
        agree_on_topology(plan, rank=0, world_size=1, timeout_s=1.0)


def test_judge_names_missing_ranks_and_mismatched_nodes() -> None:
    topologies = job((8, 8), ranks=1)
    store = dist.HashStore()

    def say(rank: int, topology: NodeTopology) -> None:
        store.set(f"rank{rank}", _Word(topology=topology, problem=None, pid=11 + rank).dumps())

    say(0, topologies[0])
    late = _judge(store, 2, timedelta(seconds=0.1))
    assert (late.problem, late.is_late) == ("ranks [1] did not come within 0 s", True)
    say(1, topologies[0])
    wrong = _judge(store, 2, timedelta(seconds=1))
    assert (wrong.problem is not None, wrong.is_late, wrong.pids) == (True, False, (11, 12))
    say(1, topologies[1])
    assert _judge(store, 2, timedelta(seconds=1)) == _Verdict(
        pids=(11, 12), ranks_by_node=(1, 1), engines_by_node=(7, 7)
    )


def test_name_missing_prints_awaited_ranks(capfd: pytest.CaptureFixture) -> None:
    words = dist.HashStore()
    words.set("rank0", "")
    _name_missing(words, 3, 61.2)
    assert capfd.readouterr().out.startswith("[grpo] for 61 s ranks [1, 2] have been waited for: they are not in the")
    words.set("rank1", "")
    words.set("rank2", "")
    _name_missing(words, 3, 121.2)
    assert capfd.readouterr().out == ""


def test_give_up_frees_waiting_ranks_with_first_record() -> None:
    record = FailureRecord(node=1, rank=1, host="h1", phase="start", cause="got SIGTERM")
    raw = dist.HashStore()
    store = _store_of(0, raw)
    store.set("rank0", _Word(topology=job((8, 8), ranks=1)[0], problem=None, pid=11).dumps())
    give_up(record, 2, raw)
    for rank in (0, 1):
        assert _find_verdict(store, rank, 2, timedelta(seconds=1)).failure == record
    give_up(replace(record, cause="another"), 2, raw)
    assert _find_verdict(store, 1, 2, timedelta(seconds=1)).failure == record


def test_judge_of_foreign_pickle_raises_and_runs_nothing(tmp_path: Path) -> None:
    """Whoever reaches the job's store can write into it."""
    store = dist.HashStore()
    store.set("rank0", pickle.dumps(Path(tmp_path / "made").touch))
    with pytest.raises(ValueError, match="no _Word of this version"):
        _judge(store, 1, timedelta(seconds=1))
