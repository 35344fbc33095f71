"""What the doctor finds: one record per finding, one report per node, one verdict for the cluster."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from grpo.ops.rendezvous.agreement import Software
from grpo.ops.rendezvous.trouble import Trouble
from grpo.place.wire import Wire


class Status(StrEnum):
    """How bad a finding is, in rising order."""

    PASS = "PASS"
    WARN = "WARN"
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One row of the table."""

    check: str
    """Name of the check; several findings may share it."""
    status: Status
    message: str
    """What was seen, with the values."""
    fix: str = ""
    """What to do about it; empty for a PASS."""
    nodes: tuple[str, ...] = ()
    """The nodes that it is about; empty, until it is merged: those of which all findings beside it are."""

    @classmethod
    def passed(cls, check: str, message: str, *, nodes: Iterable[str] = ()) -> "Finding":
        return cls(check=check, status=Status.PASS, message=message, nodes=tuple(nodes))

    @classmethod
    def warn(cls, check: str, message: str, fix: str, *, nodes: Iterable[str] = ()) -> "Finding":
        return cls(check=check, status=Status.WARN, message=message, fix=fix, nodes=tuple(nodes))

    @classmethod
    def fail(cls, check: str, message: str, fix: str, *, nodes: Iterable[str] = ()) -> "Finding":
        return cls(check=check, status=Status.FAIL, message=message, fix=fix, nodes=tuple(nodes))

    @classmethod
    def of(cls, check: str, trouble: Trouble) -> "Finding":
        return (cls.fail if trouble.is_fatal else cls.warn)(check, trouble.message, trouble.fix, nodes=trouble.nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination(Software, Wire):
    """What one node says about itself: its own findings, and what is compared with the other nodes."""

    node: str
    """Name in the list of expected nodes."""
    host: str
    """What the machine calls itself."""
    findings: tuple[Finding, ...] = ()
    gpus: int = 0
    """Visible to torch."""
    driver: str = ""
    """Version of the NVIDIA driver; empty where there is none."""
    network: str = ""
    """Same value: same kernel and network namespace, so a loopback address reaches the other; empty when the network
    could not be checked."""
    own_address: str = ""
    """What the own host name resolves to here; empty when it does not resolve."""
    route_interface: str = ""
    """The interface that routes to the head (on the head: to another node); empty when unknown."""
    route_source: str = ""
    """The own address on that route."""
    infiniband: tuple[str, ...] = ()
    """Devices with an active port."""
    clock_offset_s: float | None = None
    """This node's clock minus the head's; None when it was not measured."""
    clock_error_s: float = 0.0
    """Half the round trip of that measurement."""
    sees_shared_file: bool | None = None
    """Whether the file that the head wrote at the output path is here too; None when there is no output path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorVerdict(Wire):
    """What all nodes print and exit with."""

    nodes: tuple[str, ...]
    """The expected ones, the head first."""
    findings: tuple[Finding, ...]
    reports: tuple[Examination, ...] = ()
    """Of the nodes that came, on the node that judged."""

    @property
    def status(self) -> Status:
        found = (finding.status for finding in self.findings)
        return max(found, key=list(Status).index, default=Status.PASS)

    @property
    def exit_code(self) -> int:
        return int(self.status is Status.FAIL)

    @property
    def failed_nodes(self) -> list[str]:
        """Those that a FAIL is about."""
        failed = {node for finding in self.findings if finding.status is Status.FAIL for node in finding.nodes}
        return [node for node in self.nodes if node in failed]


def merge(findings: Iterable[Finding], nodes: tuple[str, ...] = ()) -> tuple[Finding, ...]:
    """One finding for nodes that found the same, in the order of the first. `nodes`: of those that name none."""
    merged: dict[tuple[str, ...], Finding] = {}
    for finding in findings:
        key = (finding.check, finding.status, finding.message, finding.fix)
        before = merged.get(key, replace(finding, nodes=()))
        merged[key] = replace(before, nodes=before.nodes + (finding.nodes or nodes))
    return tuple(merged.values())
