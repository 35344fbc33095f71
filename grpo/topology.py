"""Who this process is, which devices its node has, and which of them are reserved for engines.

The one place that reads torchrun's variables; `devices` reads CUDA_VISIBLE_DEVICES. The plan itself (`plan_node`,
`check_nodes`) is a pure function of what was read.
"""

import os
import re
import socket
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from grpo.devices import visible_devices
from grpo.launch_request import (
    accelerate_request,
    check_accelerate_request,
    either,
    multiples_around,
    parent_argv,
)
from grpo.same_everywhere import check_same, read_settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What the launcher told this process."""

    rank: int
    """In the job, 0 .. world_size - 1."""
    world_size: int
    """Training processes of the job."""
    local_rank: int
    """On the node, 0 .. local_world_size - 1."""
    local_world_size: int
    """Training processes of this node."""
    node: int
    """Number of the node (torchrun agent), 0 .. num_nodes - 1."""
    num_nodes: int
    """Torchrun agents of the job."""
    launched: bool = True
    """False when there was no launcher: one process that was started with `python`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTopology(Launch):
    """One rank's view of its node. All ranks of a node have the same devices and the same engines."""

    host: str
    """Host name; two nodes (agents) may run on one host."""
    devices: tuple[str, ...]
    """The node's GPUs as CUDA_VISIBLE_DEVICES names them; local rank i trains on the i-th; empty on CPU."""
    reserved_devices: tuple[str, ...]
    """The last of `devices`, on which no rank trains; empty on CPU."""
    engines: tuple[tuple[str, ...], ...]
    """The devices of each engine of this node, `tensor_parallel_size` of them; on CPU an empty tuple per engine."""
    tensor_parallel_size: int
    """Devices per engine; on CPU, worker processes per engine."""
    settings: tuple[tuple[str, str], ...] = ()
    """Versions and variables that must be the same everywhere, by name."""

    @property
    def is_local_main(self) -> bool:
        return self.local_rank == 0

    @property
    def num_engines(self) -> int:
        return len(self.engines)


def read_launch(env: Mapping[str, str]) -> Launch:
    """Reads torchrun's variables (`accelerate launch` runs torchrun and sets the same ones).

    GROUP_RANK and GROUP_WORLD_SIZE may be missing: they are then worked out, as if every node had LOCAL_WORLD_SIZE
    consecutive ranks. Raises ValueError when variables are missing, are no numbers or contradict each other. A world
    whose nodes differ in size is let through: `check_nodes` can name the nodes.
    """
    required = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    names = (*required, "GROUP_RANK", "GROUP_WORLD_SIZE")
    present = {name: env[name] for name in names if env.get(name, "") != ""}
    if not present:
        return Launch(rank=0, world_size=1, local_rank=0, local_world_size=1, node=0, num_nodes=1, launched=False)
    shown = " ".join(f"{name}={value}" for name, value in present.items())
    if missing := [name for name in required if name not in present]:
        raise ValueError(
            f"the launcher set {shown}, but not {', '.join(missing)}: start the script with accelerate launch or "
            "torchrun, which set them all (with several machines and DeepSpeed, the accelerate config needs "
            "deepspeed_multinode_launcher: standard), or unset the variables to run one process"
        )
    if bad := [name for name, value in present.items() if not re.fullmatch(r"[0-9]+", value)]:
        raise ValueError(f"{', '.join(bad)} must be whole numbers from 0 up, but the environment has {shown}")
    rank, world_size, local_rank, local_world_size = (int(present[name]) for name in required)

    def contradiction(why: str) -> ValueError:
        return ValueError(f"the launcher's variables contradict each other: {shown}: {why}; unset what is left over")

    if local_world_size < 1 or local_world_size > world_size:
        raise contradiction("LOCAL_WORLD_SIZE must be between 1 and WORLD_SIZE")
    if rank >= world_size or local_rank >= local_world_size or local_rank > rank:
        raise contradiction(
            "ranks count from 0, so RANK < WORLD_SIZE, LOCAL_RANK < LOCAL_WORLD_SIZE, LOCAL_RANK <= RANK"
        )
    if "GROUP_WORLD_SIZE" not in present and world_size % local_world_size:
        raise contradiction("WORLD_SIZE is no multiple of LOCAL_WORLD_SIZE")
    num_nodes = int(present.get("GROUP_WORLD_SIZE", world_size // local_world_size))
    if "GROUP_RANK" not in present and rank % local_world_size != local_rank:
        raise contradiction("without GROUP_RANK, LOCAL_RANK must be RANK modulo LOCAL_WORLD_SIZE")
    node = int(present.get("GROUP_RANK", rank // local_world_size))
    if node >= num_nodes or num_nodes > world_size or (num_nodes == 1) != (local_world_size == world_size):
        raise contradiction(f"they give {num_nodes} nodes, of which this is node {node} (counted from 0)")
    return Launch(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        node=node,
        num_nodes=num_nodes,
        launched=True,
    )


def plan_node(
    launch: Launch,
    devices: Sequence[str],
    *,
    reserved_gpus: int | None,
    tensor_parallel_size: int,
    engines_per_node: int | None,
    num_attention_heads: int | None = None,
    num_key_value_heads: int | None = None,
    host: str | None = None,
) -> NodeTopology:
    """Gives the first devices to the training ranks and the last ones to the engines.

    The settings are the user's `vllm_reserved_gpus` (None: all GPUs on which no rank trains),
    `vllm_tensor_parallel_size` and `vllm_engines_per_node` (None: as many as fit; without GPUs, one). Head counts are
    those of the model, where known. Raises ValueError when no placement follows from them; the local main warns when
    GPUs stay idle.
    """
    host = socket.gethostname() if host is None else host
    _check_tensor_parallel(tensor_parallel_size, num_attention_heads, num_key_value_heads)
    if engines_per_node is not None and engines_per_node < 1:
        raise ValueError(f"vllm_engines_per_node is {engines_per_node}: a node needs at least 1, or leave it unset")
    if devices:
        num_reserved = _count_reserved(
            launch, len(devices), reserved_gpus, tensor_parallel_size, engines_per_node, host
        )
        reserved = tuple(devices[len(devices) - num_reserved :])
        starts = range(0, num_reserved, tensor_parallel_size)
        engines = tuple(reserved[start : start + tensor_parallel_size] for start in starts)
    else:
        if reserved_gpus:
            raise ValueError(
                f"vllm_reserved_gpus is {reserved_gpus}, but {host} has no visible GPU to reserve: leave it unset to "
                "run on CPU, or look at CUDA_VISIBLE_DEVICES, use_cpu and the driver"
            )
        reserved, engines = (), ((),) * (engines_per_node or 1)
    return NodeTopology(
        **asdict(launch),
        host=host,
        devices=tuple(devices),
        reserved_devices=reserved,
        engines=engines,
        tensor_parallel_size=tensor_parallel_size,
    )


def _check_tensor_parallel(size: int, num_attention_heads: int | None, num_key_value_heads: int | None) -> None:
    """vLLM splits attention by heads; key-value heads are split, or copied when devices outnumber them."""
    if size < 1:
        raise ValueError(f"vllm_tensor_parallel_size is {size}: an engine needs at least 1 device")
    key_value_heads = num_key_value_heads or num_attention_heads or size
    heads = num_attention_heads or key_value_heads

    def fits(size: int) -> bool:
        return heads % size == 0 and (key_value_heads % size == 0 or size % key_value_heads == 0)

    if not fits(size):
        raise ValueError(
            f"vllm_tensor_parallel_size {size} does not fit the model: it must divide the {heads} attention heads, and "
            f"divide the {key_value_heads} key-value heads or be a multiple of them: set vllm_tensor_parallel_size to "
            f"{either([size for size in range(1, heads + 1) if fits(size)])}"
        )


def _count_reserved(
    launch: Launch,
    num_gpus: int,
    reserved_gpus: int | None,
    tensor_parallel_size: int,
    engines_per_node: int | None,
    host: str,
) -> int:
    """GPUs of this node that go to engines; num_gpus >= 1. Raises ValueError when ranks and engines do not fit."""
    ranks, size = launch.local_world_size, tensor_parallel_size
    if reserved_gpus is not None and reserved_gpus < 1:
        raise ValueError(
            f"vllm_reserved_gpus is {reserved_gpus}, but the engines of a node run on GPUs that no rank trains on: set "
            f"it to {size} or a multiple, or leave it unset to reserve all GPUs without a rank"
        )
    if reserved_gpus is not None and reserved_gpus % size:
        raise ValueError(
            f"vllm_reserved_gpus {reserved_gpus} is no multiple of vllm_tensor_parallel_size {size}, the GPUs of one "
            f"engine: set vllm_reserved_gpus to {either(multiples_around(reserved_gpus, size))}"
        )
    if num_gpus == 1:
        raise ValueError(
            f"{host} has 1 visible GPU, but two are needed: a rank trains on one, an engine generates on another; make "
            "more GPUs visible (CUDA_VISIBLE_DEVICES, or --gpus-per-node instead of --gpus-per-task under Slurm)"
        )
    if not launch.launched and num_gpus > 2 and reserved_gpus is None:
        raise ValueError(
            f"{host} has {num_gpus} visible GPUs, but the script was started without a launcher, so 1 process would "
            f"train and {num_gpus - 1} GPUs would generate: start it with `accelerate launch --config_file "
            "configs/1node.yaml your_script.py`, or make two GPUs visible (CUDA_VISIBLE_DEVICES=0,1): one trains, one "
            "generates"
        )
    if ranks + (reserved_gpus or size) > num_gpus:
        raise ValueError(_too_many_ranks(launch, num_gpus, reserved_gpus, size, host))
    num_reserved = num_gpus - ranks if reserved_gpus is None else reserved_gpus
    if num_reserved % size:
        counts = [num_gpus - reserved for reserved in multiples_around(num_reserved, size) if reserved < num_gpus]
        raise ValueError(
            f"{ranks} training processes leave {num_reserved} of the {num_gpus} GPUs of {host}, no multiple of "
            f"vllm_tensor_parallel_size {size}: set vllm_reserved_gpus to {num_reserved // size * size}, or start "
            f"{either(counts)} processes per node"
        )
    if engines_per_node is not None and engines_per_node != num_reserved // size:
        raise ValueError(
            f"vllm_engines_per_node is {engines_per_node}, but the {num_reserved} reserved GPUs of {host} hold "
            f"{num_reserved // size} engines of {size} GPUs: leave vllm_engines_per_node unset, or set "
            f"vllm_reserved_gpus to {engines_per_node * size}"
        )
    if (idle := num_gpus - ranks - num_reserved) and launch.local_rank == 0:
        warnings.warn(
            f"{idle} of the {num_gpus} GPUs of {host} stay idle: {ranks} train and {num_reserved} are reserved; start "
            "more processes, or leave vllm_reserved_gpus unset to generate on all GPUs without a rank",
            stacklevel=3,
        )
    return num_reserved


def _too_many_ranks(launch: Launch, num_gpus: int, reserved_gpus: int | None, size: int, host: str) -> str:
    """The number of processes to write: the error that a first run on a new cluster ends in."""
    reserved = reserved_gpus or size
    nodes = f"{launch.num_nodes} node{'s' if launch.num_nodes > 1 else ''} x {num_gpus} GPUs"
    fit = num_gpus - reserved
    if fit < 1:
        setting = "vllm_reserved_gpus" if reserved_gpus else "vllm_tensor_parallel_size"
        return (
            f"{nodes} with {reserved} reserved leave no GPU of {host} to train on: lower {setting} (it is {reserved})"
        )
    text = (
        f"{nodes} with {reserved} reserved leave {launch.num_nodes * fit} training processes, but num_processes is "
        f"{launch.world_size} ({launch.local_world_size} on node {launch.node}, host {host}): write num_processes: "
        f"{launch.num_nodes * fit} in the accelerate config (with torchrun: --nproc_per_node {fit})"
    )
    if launch.local_world_size > num_gpus:
        text += (
            "; if the node has more GPUs, make them visible to every rank (Slurm: --gpus-per-node, or --gres, instead "
        )
        text += "of --gpus-per-task)"
    free = (num_gpus - launch.local_world_size) // size * size
    return text + (f", or set vllm_reserved_gpus to {free}" if reserved_gpus and free > 0 else "")


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


def read_topology(
    *,
    use_cpu: bool,
    reserved_gpus: int | None,
    tensor_parallel_size: int,
    engines_per_node: int | None,
    num_attention_heads: int | None = None,
    num_key_value_heads: int | None = None,
    env: Mapping[str, str] = os.environ,
) -> NodeTopology:
    """This rank's topology, from the environment and the GPUs that torch counts (without initialising CUDA).

    Local: talks to no other rank; `check_nodes` compares the results. Raises ValueError as the parts do.
    """
    launch = read_launch(env)
    if launch.launched:
        check_accelerate_request(*accelerate_request(parent_argv()), launch)
    topology = plan_node(
        launch,
        () if use_cpu else visible_devices(env),
        reserved_gpus=reserved_gpus,
        tensor_parallel_size=tensor_parallel_size,
        engines_per_node=engines_per_node,
        num_attention_heads=num_attention_heads,
        num_key_value_heads=num_key_value_heads,
    )
    return replace(topology, settings=read_settings(env))
