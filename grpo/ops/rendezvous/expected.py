"""Expected nodes, the name of this one, and the address of the rendezvous."""

import argparse
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from grpo.ops.rendezvous.addresses import is_local_address
from grpo.ops.rendezvous.schedulers import SchedulerNodes, expand_hostlist, read_scheduler
from grpo.place.files import read_text

JOIN_TIMEOUT_S = 60.0
REPORT_TIMEOUT_S = 120.0
POD_JOIN_TIMEOUT_S = 900.0  # pods of a job are scheduled, and pull their images, minutes apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """This node among the expected ones."""

    nodes: tuple[str, ...]
    """All expected names, the head first."""
    node: str
    """Name of this node."""
    head_address: str
    """Host name or IP address of the head for the others."""
    port: int
    """Port of the store on the head."""
    scheduler_port: int | None = None
    """Port named by the scheduler for the job's own process group."""
    command: str
    """Command started on each node, for messages: `grpo doctor`."""
    is_reported: bool = True
    """False: no node was named, and this machine is alone."""
    join_timeout_s: float = JOIN_TIMEOUT_S
    """Longest wait for nodes, from the first one that is up."""
    report_timeout_s: float = REPORT_TIMEOUT_S
    """Longest time from a node's arrival to its report."""
    started: float = field(default_factory=time.monotonic)
    """Start of this node, by its `time.monotonic()`."""

    @property
    def head(self) -> str:
        return self.nodes[0]

    @property
    def is_head(self) -> bool:
        return self.node == self.head


def read_hostfile(path: Path) -> list[str]:
    """Read the first word of each line, without comments; accepts MPI's `host slots=8`."""
    lines = (line.partition("#")[0].split() for line in read_text(path, f"--hostfile {path}").splitlines())
    return [host for words in lines if words for host in expand_hostlist(words[0])]


def add_arguments(
    parser: argparse.ArgumentParser, *, default_port: int, join_timeout_s: float = JOIN_TIMEOUT_S
) -> None:
    """Add the options for the expected nodes; `find_place` reads them."""
    in_pod = "KUBERNETES_SERVICE_HOST" in os.environ
    nodes = parser.add_argument_group("which nodes", "by default what the scheduler says, or this machine alone")
    nodes.add_argument("--nodes", metavar="A,B,C", help="expected nodes, the head first; Slurm's n[1-4] is understood")
    nodes.add_argument(
        "--hostfile", "--nodes-file", dest="nodes_file", type=Path, metavar="FILE", help="the same, one host per line"
    )
    nodes.add_argument(
        "--node-rank", type=int, metavar="K", help="which of them this is, from 0; default: by host name"
    )
    nodes.add_argument("--node-name", metavar="NAME", help="the same by name")
    nodes.add_argument("--head", metavar="ADDRESS", help="where the others reach the head; default: its name")
    nodes.add_argument("--port", type=int, default=default_port, help="where the nodes meet (default: %(default)s)")
    nodes.add_argument(
        "--join-timeout",
        type=float,
        metavar="SECONDS",
        default=POD_JOIN_TIMEOUT_S if in_pod else join_timeout_s,
        help=f"from the first node that is up (default: {join_timeout_s:.0f}; on Kubernetes {POD_JOIN_TIMEOUT_S:.0f})",
    )


def find_place(
    args: argparse.Namespace,
    env: Mapping[str, str],
    *,
    command: str,
    hostname: str | None = None,
    is_local: Callable[[str], bool] = is_local_address,
) -> Place:
    """Find this node's place, from the command line or else from the scheduler; a machine without either is alone.

    Args:
        args: parsed options of `add_arguments`.

    Raises:
        ValueError: the options contradict each other, none of the expected names is this machine's, or the file of
            nodes cannot be read.
    """
    hostname = socket.gethostname() if hostname is None else hostname
    expected, reported = _expected(args, env, hostname)
    name, rank = args.node_name, args.node_rank
    if name is None and rank is None and reported is not None:
        name, rank = reported.name, reported.rank
    if name is None:
        name = _name_of_rank(rank, expected) if rank is not None else _own_name(hostname, expected, is_local, command)
    if name not in expected:
        raise ValueError(f"--node-name {name} is none of the expected nodes {', '.join(expected)}")
    if args.head in expected:  # that node has the store; any other value is the address of the first
        expected.insert(0, expected.pop(expected.index(args.head)))
    return Place(
        nodes=tuple(expected),
        node=name,
        head_address=args.head or (reported and reported.head_address) or expected[0],
        port=args.port,
        scheduler_port=reported.port if reported else None,
        command=command,
        is_reported=bool(args.nodes or args.nodes_file or reported),
        join_timeout_s=args.join_timeout,
    )


def _expected(
    args: argparse.Namespace, env: Mapping[str, str], hostname: str
) -> tuple[list[str], SchedulerNodes | None]:
    """Return the expected names, and the scheduler's information, if they come from it."""
    reported = None
    if args.nodes is not None and args.nodes_file is not None:
        raise ValueError("--nodes and --hostfile both say which nodes to expect: give one of them")
    if args.nodes is not None:
        expected = expand_hostlist(args.nodes)
    elif args.nodes_file is not None:
        expected = read_hostfile(args.nodes_file)
    elif reported := read_scheduler(env, hostname):
        expected = list(reported.nodes)
    else:
        expected = [args.node_name or hostname]
    if not expected:
        raise ValueError(f"{args.nodes_file or '--nodes'} names no node: give the host names, e.g. --nodes a,b,c")
    if repeated := sorted({name for name in expected if expected.count(name) > 1}):
        raise ValueError(f"{', '.join(repeated)} stands twice among the expected nodes: name every node once")
    return expected, reported


def _name_of_rank(rank: int, expected: Sequence[str]) -> str:
    if not 0 <= rank < len(expected):
        raise ValueError(
            f"node rank {rank} is outside 0 .. {len(expected) - 1}, the {len(expected)} expected nodes: ranks count "
            "from 0, in the order of the list"
        )
    return expected[rank]


def _own_name(hostname: str, expected: Sequence[str], is_local: Callable[[str], bool], command: str) -> str:
    """Find this machine's name: by the full host name, its first part, or an own address."""
    short = hostname.partition(".")[0]
    matches = (
        [name for name in expected if name == hostname]
        or [name for name in expected if name.partition(".")[0] == short and not name[0].isdigit()]
        or [name for name in expected if is_local(name)]
    )
    if len(matches) == 1:
        return matches[0]
    found = f"the expected nodes {', '.join(matches)} all are" if matches else f"none of {', '.join(expected)} is"
    raise ValueError(
        f"{found} this machine ({hostname}) [GRPO-304]: say which one it is with --node-name or --node-rank; inside a "
        f"Slurm job, start one process per node: srun --ntasks-per-node=1 {command}"
    )
