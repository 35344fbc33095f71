"""Do all ranks make one job: every rank's topology against every other's, before anything slow happens."""

import itertools
import os
import pickle
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from grpo.job.same_everywhere import check_same
from grpo.job.topology import NodeTopology

_agreements = itertools.count()


def agree_on_topology(
    plan: Callable[[], NodeTopology], rank: int, world_size: int, *, timeout_s: float
) -> tuple[NodeTopology, list[int]]:
    """Read this rank's topology and check it against every other rank's, before anything slow happens.

    Collective over the job, through the store: a rank whose own arithmetic fails tells the others instead of leaving
    them waiting.

    Args:
        plan: makes this rank's topology, or raises ValueError.

    Returns:
        This rank's topology, and the pid of every rank.

    Raises:
        ValueError: the first rank's error, on every rank; or what does not fit between nodes.
        TimeoutError: names the ranks that did not come.
    """
    topology, problem = None, None
    try:
        topology = plan()
    except ValueError as error:
        problem = str(error)
    if not dist.is_initialized() or world_size == 1:
        if topology is None:
            raise ValueError(problem)
        return topology, [os.getpid()]
    store = dist.PrefixStore(f"grpo/topology/{next(_agreements)}", dist.distributed_c10d._get_default_store())
    store.set(f"rank{rank}", pickle.dumps((topology, problem, os.getpid())))
    timeout = timedelta(seconds=timeout_s)
    if rank == 0:
        verdict, pids = _judge(store, world_size, timeout)
        store.set("verdict", pickle.dumps((verdict, pids)))
    else:
        try:
            store.wait(["verdict"], timeout + timedelta(seconds=10))
        except dist.DistStoreError as error:
            raise TimeoutError(f"rank 0 did not say within {timeout_s:.0f} s whether the placement fits") from error
        verdict, pids = pickle.loads(store.get("verdict"))
    if isinstance(verdict, Exception):
        raise verdict
    assert topology is not None
    return topology, pids


def _judge(store: dist.Store, world_size: int, timeout: timedelta) -> tuple[Exception | None, list[int]]:
    keys = [f"rank{rank}" for rank in range(world_size)]
    try:
        store.wait(keys, timeout)
    except dist.DistStoreError:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        return TimeoutError(f"ranks {missing} did not come within {timeout.total_seconds():.0f} s"), []
    topologies, problems, pids = zip(*(pickle.loads(store.get(key)) for key in keys), strict=True)
    for problem in problems:
        if problem is not None:
            return ValueError(problem), list(pids)
    try:
        check_nodes(topologies)
    except ValueError as error:
        return error, list(pids)
    return None, list(pids)


def check_nodes(topologies: Sequence[NodeTopology]) -> None:
    """Raises ValueError when the nodes do not make one job; takes the records of all ranks, in rank order.

    The number of devices, reserved devices and engines may differ between nodes.
    """
    nodes: dict[int, list[NodeTopology]] = defaultdict(list)
    for rank, topology in enumerate(topologies):
        if topology.rank != rank or topology.world_size != len(topologies):
            raise ValueError(
                f"{len(topologies)} ranks answered, but number {rank} on host {topology.host} takes itself for rank "
                f"{topology.rank} of {topology.world_size}: look for variables of another launcher in its environment"
            )
        nodes[topology.node].append(topology)

    def same_on_all_ranks(what: str, field: str, advice: str) -> None:
        if len({getattr(topology, field) for topology in topologies}) > 1:
            raise ValueError(f"{what} differs between nodes: {_per_node(nodes, field)}: {advice}")

    def same_on_each_node(what: str, field: str, advice: str) -> None:
        if any(len({getattr(topology, field) for topology in ranks}) > 1 for ranks in nodes.values()):
            raise ValueError(f"{what} differs between ranks of one node: {_per_node(nodes, field)}: {advice}")

    same_on_each_node("the host", "host", "give every machine its own --machine_rank (torchrun: --node_rank)")
    same_on_all_ranks("num_machines", "num_nodes", "give every machine the same num_machines (torchrun: --nnodes)")
    same_on_all_ranks(
        "the number of training processes",
        "local_world_size",
        "start as many on each as the node with the fewest GPUs can hold beside an engine (accelerate: num_processes "
        "is that x num_machines; torchrun: --nproc_per_node); the reserved GPUs may differ between nodes",
    )
    num_nodes, local_world_size = topologies[0].num_nodes, topologies[0].local_world_size
    complete = [sorted(t.local_rank for t in ranks) == list(range(local_world_size)) for ranks in nodes.values()]
    if sorted(nodes) != list(range(num_nodes)) or not all(complete):
        raise ValueError(
            f"num_machines is {num_nodes} with {local_world_size} training processes each, but these local ranks "
            f"came: {_per_node(nodes, 'local_rank')}: give every machine its own --machine_rank (torchrun: --node_rank)"
        )
    for topology in topologies:
        if topology.rank != topology.node * local_world_size + topology.local_rank:
            raise ValueError(
                f"rank {topology.rank} is local rank {topology.local_rank} of node {topology.node}, but ranks must be "
                f"numbered node by node, {local_world_size} on each: start the job with accelerate or torchrun"
            )
    places = [f"node {topology.node} (host {topology.host})" for topology in topologies]
    check_same([dict(topology.settings) for topology in topologies], places)
    same_on_all_ranks("vllm_tensor_parallel_size", "tensor_parallel_size", "set the same value everywhere")
    same_on_each_node(
        "the list of visible GPUs",
        "devices",
        "all ranks of a node must see all its GPUs (under Slurm: --gpus-per-node, not --gpus-per-task)",
    )
    if len({bool(topology.devices) for topology in topologies}) > 1:
        raise ValueError(
            f"some nodes have GPUs and some have none: {_per_node(nodes, 'devices')}: look at the driver and at "
            "CUDA_VISIBLE_DEVICES of those without, or set use_cpu"
        )


def _per_node(nodes: Mapping[int, Sequence[NodeTopology]], field: str) -> str:
    """'node 0 (host a): 7, node 1 (host b): 6'; several values of a node are joined by '|'."""

    def show(value: Any) -> str:
        return (",".join(value) or "none") if isinstance(value, tuple) else str(value)

    def joined(ranks: Sequence[NodeTopology], name: str) -> str:
        return "|".join(dict.fromkeys(show(getattr(topology, name)) for topology in ranks))

    return ", ".join(
        f"node {node} (host {joined(ranks, 'host')}): {joined(ranks, field)}" for node, ranks in sorted(nodes.items())
    )
