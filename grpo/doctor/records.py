"""What the doctor finds: one record per finding, one report per node, one verdict for the cluster."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any


class Status(StrEnum):
    """How bad a finding is, in rising order."""

    PASS = "PASS"
    WARN = "WARN"
    FAIL = "FAIL"


def worst(statuses: Iterable[Status]) -> Status:
    return max(statuses, key=list(Status).index, default=Status.PASS)


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
    """The nodes that it is about; filled in by `judge`, empty in a node's own report."""

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Finding":
        return cls(**{**value, "status": Status(value["status"]), "nodes": tuple(value["nodes"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """What one node says about itself: its own findings, and what must agree with the other nodes."""

    node: str
    """Name in the list of expected nodes."""
    host: str
    """What the machine calls itself."""
    findings: tuple[Finding, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    """Installed version by package, and that of `python`; a package that is missing is not in it."""
    commit: str = ""
    """Of the checkout that the package runs from; empty when it is none."""
    code_digest: str = ""
    """Over the package's own source files: sees edits that no commit holds."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """NCCL_* and GLOO_* of the environment."""
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

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str | bytes) -> "NodeReport":
        """Raises ValueError for what another version of this class wrote."""
        try:
            value = json.loads(text)
            findings = tuple(Finding.from_json(item) for item in value["findings"])
            return cls(**{**value, "findings": findings, "infiniband": tuple(value["infiniband"])})
        except (KeyError, TypeError) as error:
            raise ValueError(f"no report of this version: {type(error).__name__}: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What all nodes print and exit with."""

    nodes: tuple[str, ...]
    """The expected ones, the head first."""
    findings: tuple[Finding, ...]
    reports: tuple[NodeReport, ...] = ()
    """Of the nodes that came, on the node that judged."""

    @property
    def status(self) -> Status:
        return worst(finding.status for finding in self.findings)

    @property
    def exit_code(self) -> int:
        return int(self.status is Status.FAIL)

    def dumps(self, *, indent: int | None = None) -> str:
        return json.dumps({"status": self.status, **asdict(self)}, indent=indent)

    @classmethod
    def loads(cls, text: str | bytes) -> "Verdict":
        """Without the reports."""
        value = json.loads(text)
        findings = tuple(Finding.from_json(item) for item in value["findings"])
        return cls(nodes=tuple(value["nodes"]), findings=findings)


def merge(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """One finding for nodes that found the same, in the order of the first."""
    merged: dict[tuple[str, ...], Finding] = {}
    for finding in findings:
        key = (finding.check, finding.status, finding.message, finding.fix)
        before = merged.get(key, replace(finding, nodes=()))
        merged[key] = replace(before, nodes=(*before.nodes, *finding.nodes))
    return tuple(merged.values())
