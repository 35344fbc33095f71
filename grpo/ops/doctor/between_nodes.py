"""Comparison of nodes, and the verdict over everything: functions of the nodes' reports."""

from collections.abc import Sequence
from dataclasses import replace

from grpo.ops.doctor.network import select_interfaces
from grpo.ops.doctor.records import DoctorVerdict, Examination, Finding, Status, merge
from grpo.ops.rendezvous.addresses import read_interfaces, route_to
from grpo.ops.rendezvous.agreement import compare_software, differences
from grpo.ops.rendezvous.expected import Place
from grpo.ops.rendezvous.rendezvous import Attendance
from grpo.ops.rendezvous.trouble import Trouble, list_nodes

SKEW_S = 2.0  # logs of two nodes stop being comparable; certificates and munge tokens fail at minutes
_ROUTES_SHOWN = 8


def judge_rendezvous(place: Place, own: Examination, attendance: Attendance) -> DoctorVerdict:
    """Make the head's verdict over present and missing nodes."""
    joined = [Finding.of("join", trouble) for trouble in attendance.troubles]
    reports = []
    for arrival in attendance.arrivals:
        try:
            report = Examination.loads(arrival.report)
        except ValueError as error:
            message = f"{arrival.node} runs another version of grpo: {error}"
            fix = "install the same grpo on all nodes"
            joined.append(Finding.fail("join", message, fix, nodes=(arrival.node,)))
            continue
        offset_s, error_s = arrival.clock_offset_s, arrival.clock_error_s
        reports.append(replace(report, clock_offset_s=offset_s, clock_error_s=error_s))
    if not joined:
        message = f"all {len(place.nodes)} nodes came within {attendance.waited_s:.1f} s"
        joined.append(Finding.passed("join", message, nodes=place.nodes))
    if reports and not own.route_source:  # the others' names need not resolve here, but their addresses do
        interface, source = route_to(reports[0].route_source, read_interfaces())
        own = replace(own, route_interface=interface, route_source=source)
    return judge(place.nodes, [own, *reports], joined)


def judge(nodes: Sequence[str], reports: Sequence[Examination], others: Sequence[Finding] = ()) -> DoctorVerdict:
    """Make the verdict over all nodes.

    Args:
        nodes: all expected names, the head first.
        reports: of present nodes, the head's first.
        others: findings without a report, such as missing nodes.
    """
    own = [replace(finding, nodes=(report.node,)) for report in reports for finding in report.findings]
    came = tuple(report.node for report in reports)
    between = merge(compare(reports) if len(reports) > 1 else [], came)
    return DoctorVerdict(nodes=tuple(nodes), findings=merge([*others, *own, *between]), reports=tuple(reports))


def compare(reports: Sequence[Examination]) -> list[Finding]:
    """Findings from comparing two or more nodes; the reference is the majority's value, on a tie the head's (the
    first)."""
    return [
        *_same(reports),
        *_reachable_names(reports),
        *_routes(reports),
        *_clocks(reports),
        *_shared_output(reports),
    ]


def _same(reports: Sequence[Examination]) -> list[Finding]:
    first = reports[0]
    found = compare_software({report.node: report for report in reports})
    fix = "works as long as each driver is new enough for torch's CUDA; make them equal before you look for slowness"
    drivers = {report.node: {"NVIDIA driver": report.driver} for report in reports}
    found["versions"] += differences(drivers, fix, is_fatal=False).values()
    found["hardware"] = _hardware(reports)
    code = f"commit {first.commit}" if first.commit else "no checkout"
    variables = " ".join(f"{name}={value}" for name, value in first.variables.items())
    agreed = {
        "versions": f"{len(first.versions)} packages agree",
        "code": f"{code}, sources {first.code_digest}",
        "variables": variables or "no NCCL_* or GLOO_* is set",
        "hardware": "as many GPUs, the same InfiniBand devices",
    }
    findings = []
    for what, message in agreed.items():
        findings += [Finding.of(f"same {what}", trouble) for trouble in found[what]]
        if not found[what]:
            findings.append(Finding.passed(f"same {what}", message))
    return findings


def _hardware(reports: Sequence[Examination]) -> list[Trouble]:
    some_have_none = any(report.gpus == 0 for report in reports)
    fix = "grpo launch gives each node the ranks that its GPUs leave; is one broken?"
    gpus = {report.node: {"visible GPUs": report.gpus} for report in reports}
    found = differences(gpus, fix, is_fatal=some_have_none)
    fix = "look at ibstat on the node that differs; NCCL is as fast as the worst of them"
    fabric = {report.node: {"InfiniBand": ", ".join(report.infiniband)} for report in reports}
    return [*(found | differences(fabric, fix, is_fatal=False)).values()]


def _reachable_names(reports: Sequence[Examination]) -> list[Finding]:
    """Check host names: gloo listens on the address the own host name resolves to, and on loopback if it does not
    resolve."""
    networks = {report.network for report in reports}
    if networks == {""}:
        return []  # none of them could check its network: reported there
    shared_loopback = len(networks) == 1
    findings = []
    for report in reports:
        address = report.own_address
        is_reachable = address and not address.startswith("127.") and address != "::1"
        is_named = report.variables.get("GLOO_SOCKET_IFNAME")
        if not report.network or is_named or shared_loopback or is_reachable:
            continue
        seen = f"resolves to {address}" if address else "does not resolve"
        where = f", or write {report.route_source} {report.host} into /etc/hosts" if report.route_source else ""
        message = f"the host name {report.host} {seen} on its own node: gloo would listen where no other "
        message += "node reaches it"
        fix = f"export GLOO_SOCKET_IFNAME={report.route_interface or 'INTERFACE'}{where}"
        findings.append(Finding.fail("own address", message, fix, nodes=(report.node,)))
    message = "all nodes are on one machine" if shared_loopback else "every host name resolves to a reachable address"
    return findings or [Finding.passed("own address", message)]


def _routes(reports: Sequence[Examination]) -> list[Finding]:
    """Report the interface between the nodes, and an NCCL bootstrap set to another one."""
    findings = []
    for report in reports:
        value, interface = report.variables.get("NCCL_SOCKET_IFNAME"), report.route_interface
        if any(finding.check == "interfaces" and finding.status is Status.FAIL for finding in report.findings):
            continue  # it selects no interface at all: reported already
        if value and interface and not select_interfaces(value, [interface])[0]:
            message = f"NCCL_SOCKET_IFNAME={value}, but {interface} joins this node to the others"
            fix = f"right if {value} joins all nodes too; else set NCCL_SOCKET_IFNAME={interface}"
            findings.append(Finding.warn("route", message, fix, nodes=(report.node,)))
    shown = "; ".join(
        f"{report.node} by {report.route_interface or 'an unknown interface'} ({report.route_source or 'no route'})"
        for report in reports[:_ROUTES_SHOWN]
    )
    return findings or [Finding.passed("route", shown)]


def _clocks(reports: Sequence[Examination]) -> list[Finding]:
    head = reports[0].node
    findings, was_measured = [], False
    for report in reports:
        offset = report.clock_offset_s
        if offset is None:
            continue
        was_measured = True
        if abs(offset) - report.clock_error_s > SKEW_S:
            message = f"{abs(offset):.1f} s {'ahead of' if offset > 0 else 'behind'} {head}"
            findings.append(Finding.warn("clock", message, "start chrony or ntpd there", nodes=(report.node,)))
    if was_measured and not findings:
        findings.append(Finding.passed("clock", f"within {SKEW_S:.0f} s of {head}"))
    return findings


def _shared_output(reports: Sequence[Examination]) -> list[Finding]:
    head = reports[0].node
    if blind := [report.node for report in reports if report.sees_shared_file is False]:
        message = f"{list_nodes(blind)} does not see the file that {head} wrote at the output path"
        fix = "give an --output-dir that all nodes share: else a checkpoint lies in pieces on several nodes"
        return [Finding.fail("shared output", message, fix, nodes=blind)]
    if any(report.sees_shared_file for report in reports):
        return [Finding.passed("shared output", f"what {head} writes, all see")]
    return []
