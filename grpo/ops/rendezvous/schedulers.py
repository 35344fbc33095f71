"""Nodes of a job from its scheduler's variables: Slurm, torchrun's PET_*, Kubeflow's PyTorchJob, an indexed Job."""

import re
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from grpo.ops.rendezvous.addresses import address_of

_SCONTROL_TIMEOUT_S = 20.0
_HOST_LIST_ENTRY = r"(?:[^\s,\[]|\[[^\]]*\])+"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerNodes:
    """Nodes of a job, from its scheduler's variables.

    Example: SchedulerNodes(nodes=("n1", "n2"), rank=1, head_address="10.0.0.1").
    """

    nodes: tuple[str, ...]
    """Head first; pods without names are `node0`, `node1`, …"""
    rank: int | None = None
    """Index of this node in `nodes`."""
    name: str | None = None
    """Name of this node in `nodes`; takes precedence over `rank`."""
    head_address: str | None = None
    """Address of the head for the other nodes; None: its name."""
    port: int | None = None
    """Port on the head for the job's own process group."""


def read_scheduler(env: Mapping[str, str], hostname: str) -> SchedulerNodes | None:
    """Read the nodes from a scheduler's variables; None without a scheduler or with one node only.

    Args:
        hostname: this machine's; its domain is looked up where needed.

    Raises:
        ValueError: variables are missing or contradict each other; the message names the variable to set.
    """
    return _slurm(env) or _elastic(env) or _indexed_job(env, hostname)


def expand_hostlist(text: str) -> list[str]:
    """Expand a Slurm host list: `n[1-2,5],gpu-[08-09]-a` is n1 n2 n5 gpu-08-a gpu-09-a.

    White space separates too, so the output of `scontrol show hostnames` is a host list.
    """

    def expand(entry: str) -> list[str]:
        bracket = re.search(r"\[([^\]]*)\]", entry)
        if bracket is None:
            return [entry]
        hosts = []
        for part in bracket[1].split(","):
            low, dash, high = part.partition("-")
            numbers = [f"{i:0{len(low)}}" for i in range(int(low), int(high) + 1)] if dash else [part]
            for number in numbers:
                hosts += expand(entry[: bracket.start()] + number + entry[bracket.end() :])
        return hosts

    return [host for entry in re.findall(_HOST_LIST_ENTRY, text) for host in expand(entry)]


def _slurm(env: Mapping[str, str]) -> SchedulerNodes | None:
    hosts = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    if not hosts:
        return None
    nodes = tuple(expand_hostlist(hosts))
    name = env.get("SLURMD_NODENAME")
    return SchedulerNodes(
        nodes=nodes,
        rank=int(env["SLURM_NODEID"]) if env.get("SLURM_NODEID") else None,
        name=name if name in nodes and env.get("SLURM_NODEID") else None,
        head_address=nodes[0] if address_of(nodes[0]) else _address_in_slurm(nodes[0]),
    )


def _address_in_slurm(node: str) -> str | None:
    """Slurm's own address of a node (`NodeAddr`); Slurm's node names need not be host names."""
    command = ["scontrol", "show", "node", node]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, timeout=_SCONTROL_TIMEOUT_S).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"\bNodeAddr=(\S+)", shown)
    return found[1] if found else None


def _elastic(env: Mapping[str, str]) -> SchedulerNodes | None:
    """Read PET_* (torchrun's), or MASTER_ADDR with RANK and WORLD_SIZE, which count nodes if a PyTorchJob sets them."""
    address = env.get("PET_MASTER_ADDR") or env.get("MASTER_ADDR")
    ranks = {name: env[name] for name in ("PET_NODE_RANK", "RANK") if env.get(name)}
    if not address or not ranks or env.get("LOCAL_RANK"):  # LOCAL_RANK is set: a launcher's child
        return None
    name, rank = next(iter(ranks.items()))
    per_node = env.get("PET_NPROC_PER_NODE", "")
    if env.get("PET_NNODES"):
        low, _, high = env["PET_NNODES"].partition(":")
        if high and low != high:
            raise ValueError(
                f"PET_NNODES is {env['PET_NNODES']}, but a job has the same nodes from start to end: set one number"
            )
        count = _whole("PET_NNODES", low)
    elif env.get("WORLD_SIZE"):
        # Newer operators count processes here; PET_NPROC_PER_NODE then divides them.
        count = _whole("WORLD_SIZE", env["WORLD_SIZE"]) // max(1, int(per_node) if per_node.isdigit() else 1)
    else:
        raise ValueError(f"{name}={rank} says which node this is, but not how many there are: set PET_NNODES too")
    port = env.get("PET_MASTER_PORT") or env.get("MASTER_PORT")
    number = _whole(name, rank)
    if number >= count:
        raise ValueError(f"{name} is {number}, but there are {count} nodes, counted from 0")
    return SchedulerNodes(
        nodes=tuple(f"node{k}" for k in range(count)),
        rank=number,
        head_address=address if count > 1 else "127.0.0.1",
        port=int(port) if port else None,
    )


def _indexed_job(env: Mapping[str, str], hostname: str) -> SchedulerNodes | None:
    """Pods are called JOB-INDEX.SERVICE, by the headless service named as the Job's subdomain."""
    index = env.get("JOB_COMPLETION_INDEX")
    if not index:
        return None
    if not env.get("NNODES"):
        raise ValueError(
            "JOB_COMPLETION_INDEX says which pod of an indexed Job this is, but nothing how many there are: set the "
            "variable NNODES to the Job's `completions`, or give --nodes"
        )
    count, number = _whole("NNODES", env["NNODES"]), _whole("JOB_COMPLETION_INDEX", index)
    if count == 1:
        return SchedulerNodes(nodes=(hostname,), rank=0)
    if "." not in hostname:
        hostname = socket.getfqdn(hostname)
    pod, dot, domain = hostname.partition(".")
    if not pod.endswith(f"-{number}") or not domain:
        raise ValueError(
            f"this pod is called {hostname}, not JOB-{number}.SERVICE: name the Job's headless service as the pods' "
            "subdomain, or give --nodes and --node-rank"
        )
    job = pod.removesuffix(f"-{number}")
    service = domain.partition(".")[0]
    return SchedulerNodes(nodes=tuple(f"{job}-{k}{dot}{service}" for k in range(count)), rank=number)


def _whole(name: str, value: str) -> int:
    if not re.fullmatch(r"[0-9]+", value):
        raise ValueError(f"{name} is {value!r}: it must be a whole number")
    return int(value)
