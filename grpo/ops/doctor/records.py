"""Records of the doctor: one per finding, one report per node, one verdict for the cluster."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from grpo.ops.rendezvous.agreement import Software
from grpo.ops.rendezvous.trouble import Trouble
from grpo.place.wire import Wire


class Status(StrEnum):
    """Severity of a finding, in rising order."""

    PASS = "PASS"
    WARN = "WARN"
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One row of the table.

    Example:
        Finding(check="gpus", status=Status.FAIL, message="6 of 8 GPUs visible", fix="look at the driver", nodes=("b",))
    """

    check: str
    """Name of the check; several findings may share it."""
    status: Status
    message: str
    """Observation, with the values."""
    fix: str = ""
    """Fix; empty for a PASS."""
    nodes: tuple[str, ...] = ()
    """Nodes concerned. Empty before merging: the nodes of the report it belongs to."""

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
    """Report of one node: its own findings, and values for comparison with other nodes."""

    node: str
    """Name in the list of expected nodes."""
    host: str
    """Host name of the machine."""
    findings: tuple[Finding, ...] = ()
    gpus: int = 0
    """Number of GPUs visible to torch."""
    driver: str = ""
    """Version of the NVIDIA driver; '' without one."""
    network: str = ""
    """Kernel and network namespace: nodes with equal values reach each other's loopback address; '' if unknown."""
    own_address: str = ""
    """Address the own host name resolves to; '' if it does not resolve."""
    route_interface: str = ""
    """Interface of the route to the head (on the head: to another node); '' if unknown."""
    route_source: str = ""
    """Own address on this route."""
    infiniband: tuple[str, ...] = ()
    """Devices with an active port."""
    clock_offset_s: float | None = None
    """This node's clock minus the head's; None if not measured."""
    clock_error_s: float = 0.0
    """Half the round trip of the measurement."""
    sees_shared_file: bool | None = None
    """True if the head's file at the output path is visible here too; None without an output path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorVerdict(Wire):
    """Verdict printed by all nodes; determines their exit code."""

    nodes: tuple[str, ...]
    """Expected nodes, the head first."""
    findings: tuple[Finding, ...]
    reports: tuple[Examination, ...] = ()
    """Reports of the present nodes, on the judging node."""

    @property
    def status(self) -> Status:
        found = (finding.status for finding in self.findings)
        return max(found, key=list(Status).index, default=Status.PASS)

    @property
    def exit_code(self) -> int:
        return int(self.status is Status.FAIL)

    @property
    def failed_nodes(self) -> list[str]:
        """Nodes with a FAIL."""
        failed = {node for finding in self.findings if finding.status is Status.FAIL for node in finding.nodes}
        return [node for node in self.nodes if node in failed]


def merge(findings: Iterable[Finding], nodes: tuple[str, ...] = ()) -> tuple[Finding, ...]:
    """Merge equal findings of several nodes into one, in the order of the first. `nodes`: for findings without
    nodes."""
    merged: dict[tuple[str, ...], Finding] = {}
    for finding in findings:
        key = (finding.check, finding.status, finding.message, finding.fix)
        before = merged.get(key, replace(finding, nodes=()))
        merged[key] = replace(before, nodes=before.nodes + (finding.nodes or nodes))
    return tuple(merged.values())
