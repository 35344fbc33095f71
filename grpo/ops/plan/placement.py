"""GPUs to ranks and engines, on nodes that need not be alike, and the layout that wastes least."""

import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from grpo.groups.agreement import check_nodes
from grpo.ops.plan.job import Launcher
from grpo.place.launch import Launch, check_accelerate_request
from grpo.place.topology import NodeTopology, plan_node

ASSUMED_GPUS_PER_NODE = 8


def gpus_of_nodes(
    asked: Sequence[int] | None, launcher: Launcher, reserved_gpus: int | None
) -> tuple[tuple[int, ...], str | None]:
    """GPUs of each node (0 without GPUs), and what was assumed about them.

    Raises ValueError when `asked` has another number of nodes than the launcher.
    """
    nodes = launcher.num_machines
    if launcher.use_cpu:
        note = "use_cpu is set: no GPUs" + (", --gpus-per-node is not used" if asked else "")
        return (0,) * nodes, note
    if asked is not None:
        if len(asked) not in (1, nodes):
            raise ValueError(
                f"--gpus-per-node {','.join(map(str, asked))} names {len(asked)} nodes, but num_machines is {nodes}: "
                "give one number for all nodes, or one for each"
            )
        return tuple(asked) * (nodes if len(asked) == 1 else 1), None
    if reserved_gpus is not None:
        gpus = launcher.ranks_per_node + reserved_gpus
        return (gpus,) * nodes, f"{gpus} GPUs per node: the ranks and vllm_reserved_gpus (--gpus-per-node)"
    return (ASSUMED_GPUS_PER_NODE,) * nodes, f"{ASSUMED_GPUS_PER_NODE} GPUs per node (--gpus-per-node)"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What of the training settings decides where engines run."""

    reserved_gpus: int | None
    tensor_parallel_size: int
    engines_per_node: int | None
    num_attention_heads: int | None
    num_key_value_heads: int | None


def place(launcher: Launcher, gpus: Sequence[int], settings: EngineSettings) -> tuple[NodeTopology, ...]:
    """The local main's view of each node, by the code and with the refusals of the ranks themselves.

    Raises ValueError as they do.
    """
    ranks, nodes = launcher.ranks_per_node, launcher.num_machines
    check_accelerate_request(launcher.num_processes, nodes, _launch(ranks, nodes, 0, 0))
    topologies = [
        plan_node(_launch(ranks, nodes, node, local_rank), _devices(gpus[node]), host=f"node{node}", **asdict(settings))
        for node in range(nodes)
        for local_rank in range(ranks)
    ]
    check_nodes(topologies)
    return tuple(topologies[::ranks])


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A placement that works on nodes of these sizes."""

    ranks_per_node: int
    num_processes: int
    vllm_reserved_gpus: int | None
    """None: leave it unset."""
    reserved: tuple[int, ...]
    """GPUs of each node that serve engines."""
    idle: tuple[int, ...]
    """GPUs of each node that do nothing."""


def best_layout(gpus: Sequence[int], settings: EngineSettings) -> Layout | None:
    """The number of ranks per node that wastes least: the fewest idle GPUs, then the most ranks. None: none works.

    Torchrun wants as many ranks on every node; reserved GPUs may differ, in multiples of the tensor parallel size.
    """
    size = settings.tensor_parallel_size
    choices = [
        _layout(gpus, ranks, replace(settings, reserved_gpus=reserved, engines_per_node=None))
        for reserved in (None, *range(size, min(gpus), size))
        for ranks in range(1, min(gpus))
    ]
    working = [layout for layout in choices if layout is not None]
    return min(working, key=lambda layout: (sum(layout.idle), -layout.ranks_per_node), default=None)


def _layout(gpus: Sequence[int], ranks: int, settings: EngineSettings) -> Layout | None:
    """None where it does not work."""
    launch = _launch(ranks, len(gpus), 0, 0)
    try:
        with warnings.catch_warnings(action="ignore"):
            nodes = [plan_node(launch, _devices(count), host="", **asdict(settings)) for count in gpus]
    except ValueError:
        return None
    reserved = tuple(len(node.reserved_devices) for node in nodes)
    return Layout(
        ranks_per_node=ranks,
        num_processes=launch.world_size,
        vllm_reserved_gpus=settings.reserved_gpus,
        reserved=reserved,
        idle=tuple(count - ranks - held for count, held in zip(gpus, reserved, strict=True)),
    )


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


def _devices(count: int) -> tuple[str, ...]:
    return tuple(str(index) for index in range(count))
