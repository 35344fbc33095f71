"""What the nodes of a job tell each other before any launcher runs, and what they then all do."""

import hashlib
import os
import random
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from grpo.faults.failure import FailureKind
from grpo.ops.launch.ranks import Asked, LostGPUs, ranks_by_node
from grpo.ops.rendezvous.agreement import Software, compare_software, differences, read_software
from grpo.ops.rendezvous.expected import Place
from grpo.ops.rendezvous.rendezvous import Attendance, RendezvousFailed, attend, preside
from grpo.ops.rendezvous.trouble import Trouble
from grpo.place.devices import DeviceMistake, count_gpus
from grpo.place.wire import Wire

# Below the range from which the kernel takes ports for outgoing connections.
_PORTS = range(10000, 30000)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport(Wire):
    """What one node brings."""

    gpus: int
    """That torch can use; 0 for a job on CPUs."""
    mistake: str = ""
    """Why this node cannot run the job; empty when it can."""
    inputs: Mapping[str, str] = field(default_factory=dict)
    """What the job is made of, by name: the script, its arguments, its files; a digest of each."""
    software: Software = field(default_factory=Software)


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed(Wire):
    """What all nodes do."""

    ranks_by_node: tuple[int, ...]
    why: str
    """Where these numbers come from."""
    on_gpus: bool
    port: int
    """Of the job's process group, on the head."""
    started: float
    """The head's clock when all had met: the name of this attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict(Wire):
    """The head's."""

    agreed: Agreed | None
    """None when the job cannot start."""
    troubles: tuple[Trouble, ...]
    kind: FailureKind = FailureKind.MACHINE
    """Where it cannot: the user's is what differs or does not fit, and not who is late or has lost its GPUs."""


def report(use_cpu: bool, inputs: Mapping[str, str]) -> NodeReport:
    """This node's, without what only matters between nodes."""
    try:
        return NodeReport(gpus=count_gpus(os.environ, use_cpu=use_cpu), inputs=inputs)
    except DeviceMistake as error:
        return NodeReport(gpus=0, mistake=str(error), inputs=inputs)


def digest_of_file(path: Path) -> str:
    """Says so where it cannot be read."""
    try:
        return digest(path.read_bytes())
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


def free_port() -> int:
    """One that nobody on this machine listens on now."""
    while True:
        port = random.choice(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
                return port
            except OSError:
                continue


def decide(
    place: Place, reports: Mapping[str, NodeReport], asked: Asked, *, port: int | None, absent: tuple[Trouble, ...] = ()
) -> Verdict:
    """What becomes of the nodes that came; `reports` has the head first."""
    mistaken = {node: one.mistake for node, one in reports.items() if one.mistake}
    troubles = list(absent)
    troubles += [Trouble(nodes=(node,), message=f"{node}: {mistake}", fix="") for node, mistake in mistaken.items()]
    if len(reports) > 1:
        for found in compare_software({node: one.software for node, one in reports.items()}).values():
            troubles += found
        same = "give all nodes the same command line and the same files"
        troubles += differences({node: one.inputs for node, one in reports.items()}, same).values()
    # One node that sees no GPU is broken, and another one would do; on all of them it is the user's mistake.
    agreed, may_heal = None, bool(absent) or 0 < len(mistaken) < len(reports)
    if not any(trouble.is_fatal for trouble in troubles):
        try:
            ranks = ranks_by_node(asked, {node: reports[node].gpus for node in place.nodes})
        except ValueError as error:
            may_heal = isinstance(error, LostGPUs)
            troubles.append(Trouble(nodes=(place.head,), message=str(error), fix=""))
        else:
            agreed = Agreed(
                ranks_by_node=ranks.by_node,
                why=ranks.why,
                on_gpus=all(one.gpus for one in reports.values()),
                port=port or place.scheduler_port or free_port(),
                started=time.time(),
            )
    kind = FailureKind.MACHINE if agreed or may_heal else FailureKind.USER
    return Verdict(agreed=agreed, troubles=tuple(troubles), kind=kind)


def meet(place: Place, make_report: Callable[[], NodeReport], asked: Asked, *, port: int | None) -> Verdict:
    """Every node of the job calls it; all get the same verdict, in at most the join timeout and the time to report.

    Args:
        asked: counts on the head alone, which compares the files that it comes from.
        port: of the job's process group; None: what the scheduler has named, or a free one.
    """
    if len(place.nodes) == 1:
        return decide(place, {place.node: make_report()}, asked, port=port)

    def bring() -> NodeReport:
        return replace(make_report(), software=read_software(os.environ))

    try:
        if not place.is_head:
            return Verdict.loads(attend(place, lambda _: bring().dumps()))
        verdicts: list[Verdict] = []

        def close(own: NodeReport, attendance: Attendance) -> str:
            reports = {place.node: own}
            reports |= {arrival.node: NodeReport.loads(arrival.report) for arrival in attendance.arrivals}
            verdicts.append(decide(place, reports, asked, port=port, absent=attendance.troubles))
            return verdicts[-1].dumps()

        late = preside(place, bring, close)
    except RendezvousFailed as error:
        return Verdict(agreed=None, troubles=(error.trouble,))
    except ValueError as error:  # another version of this project on the other side
        fix = "install the same version on all nodes"
        return Verdict(agreed=None, troubles=(Trouble(nodes=(place.node,), message=str(error), fix=fix),))
    # Who came twice has been reported, and ends; the others have read the verdict and go on.
    warnings = tuple(replace(one, is_fatal=False) for one in late)
    return replace(verdicts[-1], troubles=(*verdicts[-1].troubles, *warnings))
