"""Topology: this process's rank, the devices of its node, and those reserved for engines.

`launch` reads torchrun's variables and `devices` CUDA_VISIBLE_DEVICES; the plan (`plan_node`) is a pure function of
both.
"""

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction

from grpo.place.devices import visible_devices
from grpo.place.launch import (
    Launch,
    accelerate_request,
    check_accelerate_request,
    either,
    host_name,
    multiples_around,
    parent_argv,
    read_launch,
)
from grpo.place.same_everywhere import read_settings


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTopology(Launch):
    """One rank's view of its node. All ranks of a node see the same devices and engines."""

    host: str
    """Host name; two nodes (agents) may run on one host."""
    devices: tuple[str, ...]
    """GPUs of the node as CUDA_VISIBLE_DEVICES names them; local rank i trains on the i-th; empty on CPU."""
    reserved_devices: tuple[str, ...]
    """Last entries of `devices`, on which no rank trains; empty on CPU."""
    engines: tuple[tuple[str, ...], ...]
    """Devices of each engine of this node, `tensor_parallel_size` of them; on CPU an empty tuple per engine."""
    tensor_parallel_size: int
    """Devices per engine; on CPU, worker processes per engine."""
    settings: tuple[tuple[str, str], ...] = ()
    """Versions and variables that must be equal on all nodes, by name."""
    engines_by_node: tuple[int, ...] = ()
    """Engines of each node, once the nodes have exchanged them."""

    @property
    def num_engines(self) -> int:
        return len(self.engines)

    @property
    def engines_differ(self) -> bool:
        """True if the ratio of ranks to engines differs between nodes."""
        nodes = zip(self.ranks_by_node, self.engines_by_node, strict=True)
        return len({Fraction(ranks, engines) for ranks, engines in nodes}) > 1


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
    """Assign the node's first devices to training ranks and the last ones to engines.

    Args:
        reserved_gpus: `vllm_reserved_gpus`. None: all GPUs on which no rank trains.
        tensor_parallel_size: `vllm_tensor_parallel_size`.
        engines_per_node: `vllm_engines_per_node`. None: as many as fit; without GPUs, one.
        num_attention_heads: of the model, if known.
        num_key_value_heads: of the model, if known.

    Raises:
        ValueError: no placement is possible. For idle GPUs the local main warns.
    """
    host = host_name(os.environ) if host is None else host
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
    """Check tensor parallelism: vLLM splits attention by heads; key-value heads are split, or copied for more
    devices."""
    if size < 1:
        raise ValueError(f"vllm_tensor_parallel_size is {size}: an engine needs at least 1 device")
    key_value_heads = num_key_value_heads or num_attention_heads or size
    heads = num_attention_heads or key_value_heads

    def fits(size: int) -> bool:
        return heads % size == 0 and (key_value_heads % size == 0 or size % key_value_heads == 0)

    if not fits(size):
        raise ValueError(
            f"vllm_tensor_parallel_size {size} does not fit the model [GRPO-105]: it must divide the {heads} attention "
            f"heads, and divide the {key_value_heads} key-value heads or be a multiple of them: set "
            f"vllm_tensor_parallel_size to {either([size for size in range(1, heads + 1) if fits(size)])}"
        )


def _count_reserved(
    launch: Launch,
    num_gpus: int,
    reserved_gpus: int | None,
    tensor_parallel_size: int,
    engines_per_node: int | None,
    host: str,
) -> int:
    """Number of GPUs of this node for engines; num_gpus >= 1. Raises ValueError if ranks and engines do not fit."""
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
            f"{host} has 1 visible GPU, but two are needed [GRPO-102]: a rank trains on one, an engine generates on "
            "another; make more GPUs visible (CUDA_VISIBLE_DEVICES, or --gpus-per-node instead of --gpus-per-task "
            "under Slurm)"
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
            f"vllm_engines_per_node is {engines_per_node}, but the {num_reserved} inference GPUs of {host} hold "
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
    """Error text with the right number of processes: the usual error of a first run on a new cluster."""
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
        f"{launch.world_size} ({launch.local_world_size} on node {launch.node}, host {host}) [GRPO-103]: write "
        f"num_processes: {launch.num_nodes * fit} in the accelerate config (with torchrun: --nproc_per_node {fit})"
    )
    if launch.local_world_size > num_gpus:
        text += "; if the node has more GPUs, make them visible to every rank (Slurm: --gpus-per-node, or --gres, "
        text += "instead of --gpus-per-task)"
    free = (num_gpus - launch.local_world_size) // size * size
    return text + (f", or set vllm_reserved_gpus to {free}" if reserved_gpus and free > 0 else "")


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
    """Read this rank's topology from the environment and the GPUs torch counts, without initialising CUDA.

    Local: communicates with no other rank; `check_nodes` compares the results. Raises ValueError as its parts do.
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
