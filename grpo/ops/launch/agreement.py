"""Agreement of a job's nodes before any launcher runs: their reports, and the common decision."""

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

# Below the kernel's range for outgoing connections.
_PORTS = range(10000, 30000)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport(Wire):
    """Report of one node."""

    gpus: int
    """GPUs torch can use; 0 for a job on CPUs."""
    mistake: str = ""
    """Reason why this node cannot run the job; '' if it can."""
    inputs: Mapping[str, str] = field(default_factory=dict)
    """Digests of the job's inputs, by name: the script, its arguments, its files."""
    software: Software = field(default_factory=Software)


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed(Wire):
    """Decision for all nodes."""

    ranks_by_node: tuple[int, ...]
    why: str
    """Origin of these numbers."""
    on_gpus: bool
    port: int
    """Port of the job's process group, on the head."""
    started: float
    """Head's clock at the rendezvous; identifies this attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict(Wire):
    """Verdict of the head."""

    agreed: Agreed | None
    """Common settings; None if the job cannot start."""
    troubles: tuple[Trouble, ...]
    kind: FailureKind = FailureKind.MACHINE
    """Kind of a failed start: USER for differing or unfit settings, not for late nodes or lost GPUs."""


def report(use_cpu: bool, inputs: Mapping[str, str]) -> NodeReport:
    """Make this node's report, without values that matter only between nodes."""
    try:
        return NodeReport(gpus=count_gpus(os.environ, use_cpu=use_cpu), inputs=inputs)
    except DeviceMistake as error:
        return NodeReport(gpus=0, mistake=str(error), inputs=inputs)


def digest_of_file(path: Path) -> str:
    """Digest of a file; a text with the error if it cannot be read."""
    try:
        return digest(path.read_bytes())
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


def free_port() -> int:
    """Return a free port of this machine."""
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
    """Decide from the nodes' reports; `reports` has the head first."""
    mistaken = {node: one.mistake for node, one in reports.items() if one.mistake}
    troubles = list(absent)
    troubles += [Trouble(nodes=(node,), message=f"{node}: {mistake}", fix="") for node, mistake in mistaken.items()]
    if len(reports) > 1:
        for found in compare_software({node: one.software for node, one in reports.items()}).values():
            troubles += found
        same = "give all nodes the same command line and the same files"
        troubles += differences({node: one.inputs for node, one in reports.items()}, same).values()
    # A single node without GPUs is broken, and another node would work; on all nodes it is the user's error.
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
    """Agree on the verdict; every node of the job calls it. Takes at most the join timeout and the report timeout.

    Args:
        asked: used on the head alone, which compares the files it comes from.
        port: of the job's process group; None: the scheduler's, or a free one.
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
    # A duplicate process has been refused, and ends; the others have read the verdict and go on.
    warnings = tuple(replace(one, is_fatal=False) for one in late)
    return replace(verdicts[-1], troubles=(*verdicts[-1].troubles, *warnings))
