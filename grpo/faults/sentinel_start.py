"""Start of a job's sentinels by the local mains, their addresses through the job's store, and a rank's watch."""

import contextlib
import itertools
import json
import os
import secrets
import select
import socket
import subprocess
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import psutil
import torch.distributed as dist

from grpo.faults.deadlines import on_expiry
from grpo.faults.failure import GrpoError
from grpo.faults.liveness import HEARTBEAT_TIMEOUT_S, RANK_STALL_TIMEOUT_S, START_TIMEOUT_S, NodePlace
from grpo.faults.sentinel_link import SentinelLink
from grpo.faults.watch import FailureWatch
from grpo.place.launch import Launch, agent_folder, agent_pid, head_address
from grpo.place.topology import NodeTopology

MAX_ADDRESSES = 8

_ROOT = Path(__file__).resolve().parents[2]


class SentinelError(GrpoError):
    """A node's sentinel does not start, or cannot reach the first node's."""


def link_to_sentinel(
    launch: Launch,
    host: str,
    local_pids: Mapping[int, int],
    store: dist.Store,
    *,
    timeout_s: float,
    join_s: float,
    stall_s: float | None = None,
) -> SentinelLink:
    """Start this node's sentinel, on its local main, and connect to it. Collective over the job, through the store.

    Args:
        local_pids: by global rank, for each rank on this node including this one.
        store: with keys of these sentinels alone.
        timeout_s: silence after which a node is lost.
        join_s: longest time between the first and the last rank's arrival; a node's sentinel may take as long to start.
        stall_s: limit without progress for a rank the others wait for; None: no limit.

    Raises:
        SentinelError: a sentinel does not start, or cannot reach the first node's.
    """

    def give_up() -> None:  # the store's process is stopped: it never answers, and its timeouts do not fire
        sys.stderr.write(f"[grpo] rank {launch.rank} ends: the job's store does not answer\n")
        os._exit(1)

    place = NodePlace(node=launch.node, rank=launch.rank, host=host, pid=0)
    patience_s = 2 * join_s  # the last rank to arrive has as long for its start as the others
    with on_expiry(join_s + patience_s, give_up):
        settings = {"pids": dict(local_pids), "timeout_s": timeout_s, "join_s": patience_s}
        settings |= {"stall_s": stall_s, "first_stall_s": join_s}
        name = _meet(launch, host, settings, store, timedelta(seconds=patience_s))
        return SentinelLink(name, launch.rank, place, timeout_s=timeout_s)


def _meet(launch: Launch, host: str, settings: dict[str, Any], store: dist.Store, patience: timedelta) -> str:
    """Return the socket name of this node's sentinel."""
    mine = f"node{launch.node}"
    if launch.local_rank != 0:
        return _wait(store, mine, patience)["name"]
    hub = {"secret": secrets.token_hex(32)} if launch.node == 0 else _wait(store, "hub", patience)
    settings |= {"node": launch.node, "host": host, "num_nodes": launch.num_nodes, **hub}
    settings["first_ranks"] = [ranks[0] for ranks in launch.nodes()]
    settings |= {"agent": agent_pid(), "agent_folder": None if (folder := agent_folder()) is None else str(folder)}
    name, port = start_sentinel(settings, timeout_s=settings["join_s"] / 2)
    if launch.node == 0 and launch.num_nodes > 1:
        store.set("hub", json.dumps({**hub, "port": port, "addresses": _addresses()}))
    store.set(mine, json.dumps({"name": name}))
    if store.add("come", 1) == launch.num_nodes and launch.num_nodes > 1:
        store.delete_key("hub")  # the store has no password, and the secret is not needed any more
    return name


def _wait(store: dist.Store, key: str, patience: timedelta) -> Any:
    try:
        store.wait([key], patience)
    except dist.DistStoreError as error:
        seconds = patience.total_seconds()
        raise SentinelError(f"no sentinel of the {key} has been announced within {seconds:.0f} s") from error
    return json.loads(store.get(key))


def start_sentinel(settings: Mapping[str, Any], *, timeout_s: float = START_TIMEOUT_S) -> tuple[str, int | None]:
    """Start a node's sentinel, within the time; see its `main` for the settings.

    Its socket is in the abstract namespace, without a file: it ends with the process. The kernel identifies connecting
    processes.

    Returns:
        The name of the socket for ranks, and the port for other nodes' sentinels, if it has one.

    Raises:
        SentinelError: it does not start; has the reason.
    """
    name = f"grpo-sentinel-{secrets.token_hex(16)}"
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{name}")
        listener.listen(128)
        process = subprocess.Popen(
            [sys.executable, "-m", "grpo.faults.sentinel", str(listener.fileno())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )
    answer: dict[str, Any] = {}
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout, contextlib.suppress(BrokenPipeError):
        process.stdin.write(json.dumps(settings).encode())
        process.stdin.close()
        is_there = _is_read_within(process.stdout, timeout_s)
        answer = {"error": f"silent for {timeout_s:.0f} s"}
        if is_there:
            answer = json.loads(process.stdout.readline() or "{}")
        if "port" in answer:
            _started.append(process)  # else `Popen` would warn that it still runs
            return name, answer["port"]
    process.kill()
    process.wait()
    why = answer.get("error", "it ended without a word")
    raise SentinelError(f"the sentinel of node {settings['node']} did not start [GRPO-606]: {why}")


def _is_read_within(pipe: IO[bytes], timeout_s: float) -> bool:
    """True if there is something to read, or end of file, within the time."""
    poll = select.poll()  # `select.select` takes no descriptor above 1023
    poll.register(pipe, select.POLLIN)
    return bool(poll.poll(1000 * timeout_s))


_started: list[subprocess.Popen] = []


def _addresses() -> list[str]:
    """Addresses at which other nodes may reach this one: the store's, and those of its interfaces."""
    own = [
        address.address
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family in (socket.AF_INET, socket.AF_INET6)
        and not address.address.startswith(("127.", "::1", "fe80"))
    ]
    return list(itertools.islice(dict.fromkeys([head_address(), *own]), MAX_ADDRESSES))


_watches = itertools.count()
_current: FailureWatch | None = None


def watch_for(
    topology: NodeTopology,
    local_pids: Mapping[int, int],
    *,
    timeout_s: float = HEARTBEAT_TIMEOUT_S,
    start_timeout_s: float = START_TIMEOUT_S,
    rank_stall_timeout_s: float = RANK_STALL_TIMEOUT_S,
) -> FailureWatch:
    """Make the watch of this rank; without a process group it only keeps the record. Collective over the job.

    Stops the watch of an earlier trainer: a process has one.

    Args:
        local_pids: by global rank, for each rank on this node including this one.
        timeout_s: silence of a node, or time a rank or launcher may be stopped, after which the job fails.
        start_timeout_s: longest time between the first and the last rank's start of the watch.
        rank_stall_timeout_s: limit without progress for a rank the others wait for, after which the job fails.

    Raises:
        SentinelError: a node's sentinel does not start, or cannot reach the first node's.
    """
    global _current
    if _current is not None:
        _current.stop()
    link = None
    if dist.is_initialized() and topology.world_size > 1:
        store = dist.PrefixStore(f"grpo/watch/{next(_watches)}", dist.distributed_c10d._get_default_store())
        link = link_to_sentinel(
            topology,
            topology.host,
            local_pids,
            store,
            timeout_s=timeout_s,
            join_s=start_timeout_s,
            stall_s=rank_stall_timeout_s,
        )
    _current = FailureWatch(link, node=topology.node, rank=topology.rank, host=topology.host)
    return _current
