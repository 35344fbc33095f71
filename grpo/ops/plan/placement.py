"""Assign GPUs to ranks and engines; nodes may differ."""

from collections.abc import Sequence
from typing import Any

from grpo.groups.agreement import check_nodes, knowing
from grpo.ops.plan.job import Launcher
from grpo.place.files import read_wishes
from grpo.place.launch import Launch, check_accelerate_request
from grpo.place.topology import NodeTopology, plan_node

ASSUMED_GPUS_PER_NODE = 8


def gpus_of_nodes(asked: Sequence[int] | None, launcher: Launcher) -> tuple[tuple[int, ...], str | None]:
    """Return the GPUs of each node (0 without GPUs), and the assumption behind them (None if they were given).

    Raises:
        ValueError: `asked` has another number of nodes than the launcher.
    """
    nodes = launcher.num_machines
    if launcher.use_cpu:
        note = "use_cpu is set: no GPUs" + (", --gpus-per-node is not used" if asked else "")
        return (0,) * nodes, note
    if asked is None:
        return (ASSUMED_GPUS_PER_NODE,) * nodes, f"{ASSUMED_GPUS_PER_NODE} GPUs per node (--gpus-per-node)"
    if len(asked) not in (1, nodes):
        raise ValueError(
            f"--gpus-per-node {','.join(map(str, asked))} names {len(asked)} nodes, but num_machines is {nodes}: "
            "give one number for all nodes, or one for each"
        )
    return tuple(asked) * (nodes if len(asked) == 1 else 1), None


def assumed_launcher(nodes: int, asked: Sequence[int] | None, train_arguments: Sequence[str]) -> Launcher:
    """Assume a launcher, if none is given: ZeRO-3 in bfloat16 on all GPUs except those for inference.

    Raises:
        ValueError: the training file cannot be read.
    """
    wishes = read_wishes(train_arguments)
    reserved = wishes.reserved_gpus or wishes.tensor_parallel_size or 1
    counts = tuple(max(1, gpus - reserved) for gpus in asked or [ASSUMED_GPUS_PER_NODE])
    counts *= nodes if len(counts) == 1 else 1
    return Launcher(
        num_processes=sum(counts),
        num_machines=nodes,
        mixed_precision="bf16",
        zero_optimization={"stage": 3},
        ranks_by_node=counts,
    )


def place(launcher: Launcher, gpus: Sequence[int], **engines: Any) -> tuple[NodeTopology, ...]:
    """Return the topology of each node as its local main sees it, by the code of the ranks themselves.

    Args:
        engines: their settings, as for `plan_node`.

    Raises:
        ValueError: as `plan_node`.
    """
    places = [(node, local_rank) for node, count in enumerate(launcher.counts) for local_rank in range(count)]
    launches = [
        Launch(
            rank=rank,
            world_size=len(places),
            local_rank=local_rank,
            local_world_size=launcher.counts[node],
            node=node,
            num_nodes=launcher.num_machines,
        )
        for rank, (node, local_rank) in enumerate(places)
    ]
    if not launcher.ranks_by_node:
        check_accelerate_request(launcher.num_processes, launcher.num_machines, launches[0])
    devices = [tuple(map(str, range(count))) for count in gpus]
    topologies = [plan_node(each, devices[each.node], host=f"node{each.node}", **engines) for each in launches]
    check_nodes(topologies)
    return tuple(topology for topology in knowing(topologies) if topology.is_local_main)
