"""What must agree between nodes: pure functions of the nodes' reports, and the verdict over everything."""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace

from grpo.doctor.network import select_interfaces
from grpo.doctor.records import Finding, NodeReport, Status, Verdict, merge
from grpo.job.same_everywhere import OF_THE_LOG, OF_THE_NODE

SKEW_S = 2.0  # logs of two nodes stop being comparable; certificates and munge tokens fail at minutes
_NAMES_SHOWN = 8


def judge(nodes: Sequence[str], reports: Sequence[NodeReport], others: Sequence[Finding] = ()) -> Verdict:
    """The verdict over all nodes.

    Args:
        nodes: all expected names, the head first.
        reports: of those that came, the head's first.
        others: findings that are about no report: who did not come, say.
    """
    own = [replace(finding, nodes=(report.node,)) for report in reports for finding in report.findings]
    between = compare(reports) if len(reports) > 1 else []
    return Verdict(nodes=tuple(nodes), findings=merge([*others, *own, *between]), reports=tuple(reports))


def compare(reports: Sequence[NodeReport]) -> list[Finding]:
    """Findings between two or more nodes; the reference is what most of them have, the head's (the first) on a tie."""
    return [
        *_same_versions(reports),
        *_same_code(reports),
        *_same_variables(reports),
        *_same_hardware(reports),
        *_reachable_names(reports),
        *_routes(reports),
        *_clocks(reports),
        *_shared_output(reports),
    ]


def list_nodes(names: Sequence[str]) -> str:
    """`a, b, c`, or the first few and how many there are."""
    if len(names) <= _NAMES_SHOWN:
        return ", ".join(names)
    return f"{', '.join(names[:_NAMES_SHOWN])} and {len(names) - _NAMES_SHOWN} more"


def _differing(reports: Sequence[NodeReport], values: Sequence[Hashable]) -> tuple[tuple[str, ...], str] | None:
    """The nodes whose value is not the reference, and all values with their nodes; None when all agree."""
    by_value: dict[Hashable, list[str]] = {}
    for report, value in zip(reports, values, strict=True):
        by_value.setdefault(value, []).append(report.node)
    if len(by_value) == 1:
        return None
    reference = Counter({value: len(names) for value, names in by_value.items()}).most_common(1)[0][0]
    outside = tuple(name for value, names in by_value.items() if value != reference for name in names)
    order = [reference, *(value for value in by_value if value != reference)]
    return outside, "; ".join(f"{value or 'none'} on {list_nodes(by_value[value])}" for value in order)


def _same_versions(reports: Sequence[NodeReport]) -> list[Finding]:
    findings = []
    for package in dict.fromkeys(name for report in reports for name in report.versions):
        if found := _differing(reports, [report.versions.get(package) for report in reports]):
            findings.append(
                Finding(
                    check="same versions",
                    status=Status.FAIL,
                    message=f"{package}: {found[1]}",
                    fix=f"install the same {package} on all nodes",
                    nodes=found[0],
                )
            )
    if found := _differing(reports, [report.driver for report in reports]):
        fix = (
            "works as long as each driver is new enough for torch's CUDA; make them equal before you look for slowness"
        )
        findings.append(
            Finding(
                check="same versions", status=Status.WARN, message=f"NVIDIA driver: {found[1]}", fix=fix, nodes=found[0]
            )
        )
    return findings or [_passed("same versions", f"{len(reports[0].versions)} packages agree", reports)]


def _same_code(reports: Sequence[NodeReport]) -> list[Finding]:
    fix = "check out the same commit on all nodes, or install from one shared folder"
    for what, found in (
        ("commit", _differing(reports, [report.commit for report in reports])),
        ("source files, in the same commit", _differing(reports, [report.code_digest for report in reports])),
    ):
        if found:
            message = f"{what}: {found[1]}"
            return [Finding(check="same code", status=Status.FAIL, message=message, fix=fix, nodes=found[0])]
    commit = f"commit {reports[0].commit}" if reports[0].commit else "no checkout"
    return [_passed("same code", f"{commit}, sources {reports[0].code_digest}", reports)]


def _same_variables(reports: Sequence[NodeReport]) -> list[Finding]:
    findings = []
    for name in sorted({name for report in reports for name in report.variables}):
        if name.startswith(OF_THE_LOG):
            continue
        if found := _differing(reports, [report.variables.get(name) for report in reports]):
            of_the_node = name.startswith(OF_THE_NODE)
            fix = "right if the nodes differ in hardware" if of_the_node else "export the same value on all nodes"
            findings.append(
                Finding(
                    check="same variables",
                    status=Status.WARN if of_the_node else Status.FAIL,
                    message=f"{name}: {found[1]}",
                    fix=fix,
                    nodes=found[0],
                )
            )
    shown = " ".join(f"{name}={value}" for name, value in reports[0].variables.items())
    return findings or [_passed("same variables", shown or "no NCCL_* or GLOO_* is set", reports)]


def _same_hardware(reports: Sequence[NodeReport]) -> list[Finding]:
    findings = []
    if found := _differing(reports, [report.gpus for report in reports]):
        none = any(report.gpus == 0 for report in reports)
        fix = "all nodes train with the same number of ranks; only the reserved GPUs may differ"
        message = f"visible GPUs: {found[1]}"
        status = Status.FAIL if none else Status.WARN
        findings.append(Finding(check="same hardware", status=status, message=message, fix=fix, nodes=found[0]))
    if found := _differing(reports, [", ".join(report.infiniband) for report in reports]):
        fix = "look at ibstat on the node that differs; NCCL is as fast as the worst of them"
        message = f"InfiniBand: {found[1]}"
        findings.append(Finding(check="same hardware", status=Status.WARN, message=message, fix=fix, nodes=found[0]))
    return findings or [_passed("same hardware", "as many GPUs, the same InfiniBand devices", reports)]


def _reachable_names(reports: Sequence[NodeReport]) -> list[Finding]:
    """gloo listens on the address that the own host name resolves to, and on loopback when it does not resolve."""
    shared_loopback = len({report.network for report in reports}) == 1
    findings = []
    for report in reports:
        named = report.variables.get("GLOO_SOCKET_IFNAME")
        address = report.own_address
        if (
            not report.network
            or named
            or shared_loopback
            or (address and not address.startswith("127.") and address != "::1")
        ):
            continue
        seen = f"resolves to {address}" if address else "does not resolve"
        interface = report.route_interface or "INTERFACE"
        where = f", or write {report.route_source} {report.host} into /etc/hosts" if report.route_source else ""
        findings.append(
            Finding(
                check="own address",
                status=Status.FAIL,
                message=f"the host name {report.host} {seen} on its own node: gloo would listen where no other "
                "node reaches it",
                fix=f"export GLOO_SOCKET_IFNAME={interface}{where}",
                nodes=(report.node,),
            )
        )
    if findings:
        return findings
    message = "all nodes are on one machine" if shared_loopback else "every host name resolves to a reachable address"
    return [_passed("own address", message, reports)]


def _routes(reports: Sequence[NodeReport]) -> list[Finding]:
    """Which interface joins the nodes, and whether NCCL was told another one for its bootstrap."""
    findings = []
    for report in reports:
        value = report.variables.get("NCCL_SOCKET_IFNAME")
        if any(finding.check == "interfaces" and finding.status is Status.FAIL for finding in report.findings):
            continue  # it selects no interface at all: told already
        if value and report.route_interface and not select_interfaces(value, [report.route_interface])[0]:
            findings.append(
                Finding(
                    check="route",
                    status=Status.WARN,
                    message=f"NCCL_SOCKET_IFNAME={value}, but {report.route_interface} joins this node to the others",
                    fix=f"right if {value} joins all nodes too; else set NCCL_SOCKET_IFNAME={report.route_interface}",
                    nodes=(report.node,),
                )
            )
    shown = "; ".join(
        f"{report.node} by {report.route_interface or 'an unknown interface'} ({report.route_source or 'no route'})"
        for report in reports[:_NAMES_SHOWN]
    )
    return findings or [_passed("route", shown, reports)]


def _clocks(reports: Sequence[NodeReport]) -> list[Finding]:
    offsets = [(report, report.clock_offset_s) for report in reports[1:] if report.clock_offset_s is not None]
    findings = [
        Finding(
            check="clock",
            status=Status.WARN,
            message=f"{abs(offset):.1f} s {'ahead of' if offset > 0 else 'behind'} {reports[0].node}",
            fix="start chrony or ntpd there",
            nodes=(report.node,),
        )
        for report, offset in offsets
        if abs(offset) - report.clock_error_s > SKEW_S
    ]
    if findings or not offsets:
        return findings
    largest = max(abs(offset) + report.clock_error_s for report, offset in offsets)
    return [_passed("clock", f"within {largest:.2f} s of {reports[0].node}", reports)]


def _shared_output(reports: Sequence[NodeReport]) -> list[Finding]:
    blind = tuple(report.node for report in reports if report.sees_shared_file is False)
    if blind:
        return [
            Finding(
                check="shared output",
                status=Status.FAIL,
                message=f"{list_nodes(blind)} does not see the file that {reports[0].node} wrote at the output path",
                fix="give an --output-dir that all nodes share: else a checkpoint lies in pieces on several nodes",
                nodes=blind,
            )
        ]
    if any(report.sees_shared_file for report in reports):
        return [_passed("shared output", f"what {reports[0].node} writes, all see", reports)]
    return []


def _passed(check: str, message: str, reports: Sequence[NodeReport]) -> Finding:
    return Finding(check=check, status=Status.PASS, message=message, nodes=tuple(report.node for report in reports))
