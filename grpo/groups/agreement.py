"""Agreement of all ranks on the job's topology, before anything slow happens.

There is no watch yet: a rank ended by SIGTERM writes this into the job's store, where the others wait.
"""

import contextlib
import itertools
import os
import signal
import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from grpo.faults.deadlines import every_minute, on_expiry
from grpo.faults.failure import FailureRecord, JobFailed
from grpo.place.same_everywhere import check_same
from grpo.place.topology import NodeTopology
from grpo.place.wire import Wire

LAST_WORDS_S = 5.0
STORE_S = 30.0  # slack beyond every timeout: if the process hosting the TCPStore is stopped, store timeouts never fire
PHASE = "start"

_agreements = itertools.count()


# JSON records, not pickles: the job's store has no password, so anyone who reaches it can write.
@dataclass(frozen=True, slots=True, kw_only=True)
class _Word(Wire):
    """Answer of one rank."""

    topology: NodeTopology | None
    problem: str | None
    """Reason why this rank has no topology."""
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Verdict(Wire):
    """Verdict of rank 0 about all ranks' answers."""

    problem: str | None = None
    """Reason against the start; None if all is well."""
    is_late: bool = False
    """True if the problem is missing ranks."""
    failure: FailureRecord | None = None
    """Record of a rank that was ended meanwhile, and wrote this verdict in rank 0's place; excludes `problem`."""
    pids: tuple[int, ...] = ()
    ranks_by_node: tuple[int, ...] = ()
    engines_by_node: tuple[int, ...] = ()


def agree_on_topology(
    plan: Callable[[], NodeTopology], rank: int, world_size: int, *, timeout_s: float
) -> tuple[NodeTopology, list[int]]:
    """Read this rank's topology and compare it with every other rank's, before anything slow happens.

    Collective over the job, through the store. A rank whose own plan fails reports it, so that the others do not wait.

    Args:
        plan: makes this rank's topology, or raises ValueError.

    Returns:
        This rank's topology, with the ranks and engines of every node, and the pid of every rank.

    Raises:
        ValueError: the first rank's error, on every rank; or the mismatch between nodes.
        TimeoutError: names the missing ranks.
        JobFailed: a rank was ended meanwhile.
    """
    topology, problem = None, None
    try:
        topology = plan()
    except ValueError as error:
        problem = str(error)
    if not dist.is_initialized() or world_size == 1:
        if topology is None:
            raise ValueError(problem)
        return knowing([topology])[0], [os.getpid()]
    number = next(_agreements)
    store = _store_of(number, _job_store())
    store.set(f"rank{rank}", _Word(topology=topology, problem=problem, pid=os.getpid()).dumps())
    with contextlib.ExitStack() as around:
        around.enter_context(_last_words(number, topology, rank, world_size))
        around.enter_context(on_expiry(timeout_s + STORE_S, _end_without_store))
        if rank == 0:
            words = _store_of(number, _job_store().clone())  # the main thread waits in the job's store
            around.enter_context(every_minute(partial(_name_missing, words, world_size)))
        verdict = _find_verdict(store, rank, world_size, timedelta(seconds=timeout_s))
    if verdict.failure is not None:
        raise JobFailed(verdict.failure)
    if verdict.problem is not None:
        raise (TimeoutError if verdict.is_late else ValueError)(verdict.problem)
    assert topology is not None
    known = replace(topology, ranks_by_node=verdict.ranks_by_node, engines_by_node=verdict.engines_by_node)
    return known, list(verdict.pids)


def _job_store() -> dist.Store:
    """Store of the launcher, without the prefixes of torch's groups."""
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def _store_of(number: int, store: dist.Store) -> dist.Store:
    return dist.PrefixStore(f"grpo/topology/{number}", store)


def _find_verdict(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> _Verdict:
    if rank == 0:
        verdict = _judge(store, world_size, timeout)
        return _Verdict.loads(store.compare_set("verdict", "", verdict.dumps()))
    try:
        store.wait(["verdict"], timeout + timedelta(seconds=10))
    except dist.DistStoreError as error:
        seconds = timeout.total_seconds()
        raise TimeoutError(f"rank 0 did not say within {seconds:.0f} s whether the placement fits") from error
    return _Verdict.loads(store.get("verdict"))


def missing_ranks(store: dist.Store, world_size: int) -> list[int]:
    """Ranks without an answer under `rank<number>` yet."""
    return [rank for rank in range(world_size) if not store.check([f"rank{rank}"])]


def _name_missing(words: dist.Store, world_size: int, seconds: float) -> None:
    if missing := missing_ranks(words, world_size):
        _say(
            f"for {seconds:.0f} s ranks {missing} have been waited for: they are not in the trainer yet, but at "
            "imports, data or a model before it"
        )


def _say(line: str) -> None:
    """Write to stdout: there is no log yet."""
    with contextlib.suppress(OSError):
        os.write(1, f"[grpo] {line}\n".encode())  # one write: all ranks write


def _end_without_store() -> None:
    _say("the job's store does not answer: is the launcher of the first node stopped?")
    os._exit(1)


# -- a rank that is ended meanwhile -----------------------------------------------------------------------------------


def give_up(record: FailureRecord, world_size: int, store: dist.Store, number: int = 0) -> None:
    """Make `agree_on_topology` raise `record` on the ranks waiting in it. Has no effect once it is over.

    Args:
        store: the job's, as its launcher has it.
        number: index of the agreement within each rank's process.
    """
    words = _store_of(number, store)
    words.compare_set("verdict", "", _Verdict(failure=record).dumps())
    for rank in range(world_size):  # rank 0 waits for all of them
        words.compare_set(f"rank{rank}", "", _Word(topology=None, problem=record.cause, pid=0).dumps())


@contextlib.contextmanager
def _last_words(number: int, topology: NodeTopology | None, rank: int, world_size: int) -> Iterator[None]:
    """On SIGTERM, report to the others, then end this rank. From a thread: the main one waits in C++ and gets no
    signals."""
    is_main = threading.current_thread() is threading.main_thread()
    if topology is None or not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    received, waker = socket.socketpair()
    waker.setblocking(False)
    cause = "got SIGTERM while ranks were waited for: by the launcher of this node, or by the scheduler [GRPO-306]"
    record = FailureRecord(node=topology.node, rank=rank, host=topology.host, phase=PHASE, cause=cause)
    store = _job_store().clone()  # the main thread waits in the job's store

    def listen() -> None:
        while numbers := received.recv(64):
            if signal.SIGTERM in numbers:
                _say(f"rank {rank} ends: {cause}")
                with on_expiry(LAST_WORDS_S, lambda: os._exit(128 + signal.SIGTERM)):
                    give_up(record, world_size, store, number)
                os._exit(128 + signal.SIGTERM)

    before = signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    threading.Thread(target=listen, name="grpo-last-words", daemon=True).start()
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.set_wakeup_fd(before)
        waker.close()


def _judge(store: dist.Store, world_size: int, timeout: timedelta) -> _Verdict:
    keys = [f"rank{rank}" for rank in range(world_size)]
    try:
        store.wait(keys, timeout)
    except dist.DistStoreError:
        missing = missing_ranks(store, world_size)
        return _Verdict(problem=f"ranks {missing} did not come within {timeout.total_seconds():.0f} s", is_late=True)
    words = [_Word.loads(store.get(key)) for key in keys]
    pids, topologies = tuple(word.pid for word in words), [word.topology for word in words if word.topology is not None]
    problem = next((word.problem for word in words if word.problem is not None), None)
    if problem is None:
        try:
            check_nodes(topologies)
        except ValueError as error:
            problem = str(error)
    if problem is not None:
        return _Verdict(problem=problem, pids=pids)
    first = knowing(topologies)[0]
    return _Verdict(pids=pids, ranks_by_node=first.ranks_by_node, engines_by_node=first.engines_by_node)


def knowing(topologies: Sequence[NodeTopology]) -> list[NodeTopology]:
    """Return the topologies of all ranks, in order, with the number of ranks and engines of each node."""
    mains = [topology for topology in topologies if topology.is_local_main]
    ranks = tuple(topology.local_world_size for topology in mains)
    engines = tuple(topology.num_engines for topology in mains)
    return [replace(topology, ranks_by_node=ranks, engines_by_node=engines) for topology in topologies]


def check_nodes(topologies: Sequence[NodeTopology]) -> None:
    """Raise ValueError if the nodes do not make one job; takes the topologies of all ranks, in rank order.

    The number of ranks, devices, reserved devices and engines may differ between nodes.
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
    num_nodes = topologies[0].num_nodes
    counts = [len(nodes.get(node, ())) for node in range(num_nodes)]
    wanted = [(node, count, local_rank) for node, count in enumerate(counts) for local_rank in range(count)]
    if [(one.node, one.local_world_size, one.local_rank) for one in topologies] != wanted or 0 in counts:
        raise ValueError(
            f"num_machines is {num_nodes}, and ranks are numbered node by node, but these local ranks came: "
            f"{_per_node(nodes, 'local_rank')}: give every machine its own --machine_rank (torchrun: --node_rank), and "
            "start the job with accelerate or torchrun"
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
    """Format as 'node 0 (host a): 7, node 1 (host b): 6'; several values of a node are joined by '|'."""

    def show(value: Any) -> str:
        return (",".join(value) or "none") if isinstance(value, tuple) else str(value)

    def joined(ranks: Sequence[NodeTopology], name: str) -> str:
        return "|".join(dict.fromkeys(show(getattr(topology, name)) for topology in ranks))

    return ", ".join(
        f"node {node} (host {joined(ranks, 'host')}): {joined(ranks, field)}" for node, ranks in sorted(nodes.items())
    )
