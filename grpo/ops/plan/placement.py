"""GPUs to ranks and engines, on nodes that need not be alike."""

from collections.abc import Sequence
from typing import Any

from grpo.groups.agreement import check_nodes
from grpo.ops.plan.job import Launcher
from grpo.place.files import read_wishes
from grpo.place.launch import Launch, check_accelerate_request
from grpo.place.topology import NodeTopology, plan_node

ASSUMED_GPUS_PER_NODE = 8


def gpus_of_nodes(asked: Sequence[int] | None, launcher: Launcher) -> tuple[tuple[int, ...], str | None]:
    """GPUs of each node (0 without GPUs), and what was assumed about them.

    Raises ValueError when `asked` has another number of nodes than the launcher.
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
    """ZeRO-3 in bfloat16 on all GPUs that are not reserved, where nobody says how the job is launched.

    Raises:
        ValueError: the training file cannot be read.
    """
    wishes = read_wishes(train_arguments)
    reserved = wishes.reserved_gpus or wishes.tensor_parallel_size or 1
    ranks = max(1, min(asked or [ASSUMED_GPUS_PER_NODE]) - reserved)
    return Launcher(
        num_processes=ranks * nodes, num_machines=nodes, mixed_precision="bf16", zero_optimization={"stage": 3}
    )


def place(launcher: Launcher, gpus: Sequence[int], **engines: Any) -> tuple[NodeTopology, ...]:
    """The local main's view of each node, by the code and with the refusals of the ranks themselves.

    Raises ValueError as they do.

    Args:
        engines: their settings, as `plan_node` takes them.
    """
    ranks, nodes = launcher.ranks_per_node, launcher.num_machines
    check_accelerate_request(launcher.num_processes, nodes, _launch(ranks, nodes, 0, 0))
    devices = [tuple(map(str, range(count))) for count in gpus]
    topologies = [
        plan_node(_launch(ranks, nodes, node, local_rank), devices[node], host=f"node{node}", **engines)
        for node in range(nodes)
        for local_rank in range(ranks)
    ]
    check_nodes(topologies)
    return tuple(topologies[::ranks])


def _launch(ranks: int, nodes: int, node: int, local_rank: int) -> Launch:
    """Of one rank, where every node has `ranks`."""
    return Launch(
        rank=node * ranks + local_rank,
        world_size=ranks * nodes,
        local_rank=local_rank,
        local_world_size=ranks,
        node=node,
        num_nodes=nodes,
    )
