"""Which nodes are expected, which one this is, and where they meet."""

import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """This node among the expected ones."""

    nodes: tuple[str, ...]
    """All expected names, the head first."""
    node: str
    """This one's name."""
    head_address: str
    """Host name or IP address under which the others reach the head."""
    port: int
    """Of the doctor's store on the head."""

    @property
    def head(self) -> str:
        return self.nodes[0]

    @property
    def is_head(self) -> bool:
        return self.node == self.head


def expand_hostlist(text: str) -> list[str]:
    """Slurm's notation as host names: `n[1-2,5],gpu-[08-09]-a` is n1 n2 n5 gpu-08-a gpu-09-a.

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

    return [host for entry in re.findall(r"(?:[^\s,\[]|\[[^\]]*\])+", text) for host in expand(entry)]


def read_hostfile(path: Path) -> list[str]:
    """The first word of each line, without comments: also MPI's `host slots=8`."""
    lines = (line.partition("#")[0].split() for line in path.read_text().splitlines())
    return [host for words in lines if words for host in expand_hostlist(words[0])]


def is_local_address(name: str) -> bool:
    """Whether `name` resolves to an address of this machine: one that a socket can be bound to."""
    try:
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind(address)
                return True
            except OSError:
                continue
    return False


def find_place(
    *,
    nodes: str | None,
    nodes_file: Path | None,
    node_name: str | None,
    node_rank: int | None,
    head: str | None,
    port: int,
    env: Mapping[str, str],
    hostname: str | None = None,
    is_local: Callable[[str], bool] = is_local_address,
) -> Place:
    """This node's place, from the command line or else from Slurm; a machine without either is alone.

    Raises:
        ValueError: the options contradict each other, or none of the expected names is this machine's.
    """
    hostname = socket.gethostname() if hostname is None else hostname
    slurm_list = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    from_slurm = False
    if nodes is not None and nodes_file is not None:
        raise ValueError("--nodes and --nodes-file both say which nodes to expect: give one of them")
    if nodes is not None:
        expected = expand_hostlist(nodes)
    elif nodes_file is not None:
        expected = read_hostfile(nodes_file)
    elif slurm_list:
        expected, from_slurm = expand_hostlist(slurm_list), True
    else:
        expected = [node_name or hostname]
    if not expected:
        raise ValueError(f"{nodes_file or '--nodes'} names no node: give the host names, e.g. --nodes a,b,c")
    if repeated := sorted({name for name in expected if expected.count(name) > 1}):
        raise ValueError(f"{', '.join(repeated)} stands twice among the expected nodes: name every node once")
    if node_name is None:
        node_name = _own_name(expected, node_rank, env, from_slurm, hostname, is_local)
    elif node_name not in expected:
        raise ValueError(f"--node-name {node_name} is none of the expected nodes {', '.join(expected)}")
    if head in expected:  # that node holds the store; any other value is the address of the first
        expected.insert(0, expected.pop(expected.index(head)))
    return Place(nodes=tuple(expected), node=node_name, head_address=head or expected[0], port=port)


def _own_name(
    expected: Sequence[str],
    node_rank: int | None,
    env: Mapping[str, str],
    from_slurm: bool,
    hostname: str,
    is_local: Callable[[str], bool],
) -> str:
    if node_rank is None and from_slurm and env.get("SLURM_NODEID"):
        if (slurm_name := env.get("SLURMD_NODENAME", "")) in expected:
            return slurm_name
        node_rank = int(env["SLURM_NODEID"])
    if node_rank is not None:
        if not 0 <= node_rank < len(expected):
            raise ValueError(
                f"node rank {node_rank} is outside 0 .. {len(expected) - 1}, the {len(expected)} expected nodes: ranks "
                "count from 0, in the order of the list"
            )
        return expected[node_rank]
    short = hostname.partition(".")[0]
    matches = [name for name in expected if name == hostname] or [
        name for name in expected if name.partition(".")[0] == short and not name[0].isdigit()
    ]
    matches = matches or [name for name in expected if is_local(name)]
    if len(matches) == 1:
        return matches[0]
    found = f"the expected nodes {', '.join(matches)} all are" if matches else f"none of {', '.join(expected)} is"
    raise ValueError(
        f"{found} this machine ({hostname}): say which one it is with --node-name or --node-rank; inside a Slurm job, "
        "start one process per node: srun --ntasks-per-node=1 grpo doctor"
    )
