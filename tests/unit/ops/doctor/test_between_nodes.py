"""What must agree between nodes, on made-up reports, and the verdict over all."""

import json
from dataclasses import replace

import pytest

from grpo.ops.doctor.between_nodes import compare, judge, judge_rendezvous
from grpo.ops.doctor.records import DoctorVerdict, Examination, Finding, Status
from grpo.ops.rendezvous.expected import Place
from grpo.ops.rendezvous.rendezvous import Attendance, NodeArrival
from grpo.ops.rendezvous.trouble import Trouble

PASS, WARN, FAIL = Status.PASS, Status.WARN, Status.FAIL


def report(node: str, **changes) -> Examination:
    good = Examination(
        node=node,
        host=node,
        versions={"torch": "2.13.0", "vllm": "0.31.0"},
        commit="abc",
        code_digest="123",
        gpus=8,
        network=f"boot/{node}",
        own_address=f"10.0.0.{ord(node) - ord('a')}",
        route_interface="eth0",
        route_source="10.0.0.9",
        clock_offset_s=0.01,
        clock_error_s=0.02,
        sees_shared_file=True,
    )
    return replace(good, **changes)


def wrong(*reports: Examination) -> list[tuple[str, Status, tuple[str, ...], str]]:
    return [(f.check, f.status, f.nodes, f.message) for f in compare(reports) if f.status is not PASS]


def test_compare_of_equal_nodes_finds_nothing() -> None:
    assert wrong(report("a"), report("b"), report("c")) == []


@pytest.mark.parametrize(
    ("changes", "check", "status", "message"),
    [
        ({"versions": {"torch": "2.13.0"}}, "same versions", FAIL, "vllm: 0.31.0 on a, c; none on b"),
        ({"driver": "570"}, "same versions", WARN, "NVIDIA driver: none on a, c; 570 on b"),
        ({"commit": "def"}, "same code", FAIL, "commit: abc on a, c; def on b"),
        ({"variables": {"NCCL_ALGO": "Ring"}}, "same variables", FAIL, "NCCL_ALGO: none on a, c; Ring on b"),
        ({"gpus": 7}, "same hardware", WARN, "visible GPUs: 8 on a, c; 7 on b"),
        ({"gpus": 0}, "same hardware", FAIL, "visible GPUs: 8 on a, c; none on b"),
        ({"infiniband": ("mlx5_0",)}, "same hardware", WARN, "InfiniBand: none on a, c; mlx5_0 on b"),
        ({"clock_offset_s": -5.0}, "clock", WARN, "5.0 s behind a"),
        ({"sees_shared_file": False}, "shared output", FAIL, "b does not see the file that a wrote at the output path"),
    ],
)
def test_compare_with_differing_node_names_it(changes: dict, check: str, status: Status, message: str) -> None:
    assert wrong(report("a"), report("b", **changes), report("c")) == [(check, status, ("b",), message)]


def test_own_address_on_loopback_fails_between_machines() -> None:
    (found,) = wrong(report("a"), report("b", own_address="127.0.1.1"))
    assert found[:3] == ("own address", FAIL, ("b",))
    (fix,) = (f.fix for f in compare([report("a"), report("b", own_address="")]) if f.status is FAIL)
    assert fix == "export GLOO_SOCKET_IFNAME=eth0, or write 10.0.0.9 b into /etc/hosts"
    on_one_machine = [report(node, own_address="127.0.0.1", network="boot/x") for node in "ab"]
    assert wrong(*on_one_machine) == []
    assert wrong(report("a"), report("b", own_address="", network="")) == []  # the check itself failed, and said so
    blind = [report(node, own_address="127.0.0.1", network="") for node in "ab"]
    assert [each.check for each in compare(blind)].count("own address") == 0  # of which nothing is known
    reported = {"variables": {"GLOO_SOCKET_IFNAME": "eth0"}}
    assert wrong(report("a", **reported), report("b", own_address="127.0.1.1", **reported)) == []


def test_compare_with_nccl_interface_off_route_reports_each_node() -> None:
    reported = {"variables": {"NCCL_SOCKET_IFNAME": "^lo,eth"}}
    assert [found[0] for found in wrong(report("a", **reported), report("b", **reported))] == ["route", "route"]


def test_verdict_merges_equal_findings_and_round_trips_as_json() -> None:
    found = Finding(check="open files", status=WARN, message="1024", fix="ulimit -n 65536")
    reports = [report(node, findings=(found,)) for node in "ab"]
    missing = Finding(check="join", status=FAIL, message="c did not come", nodes=("c",))
    verdict = judge(["a", "b", "c"], reports, [missing])
    assert (verdict.status, verdict.exit_code) == (FAIL, 1)
    assert [f.nodes for f in verdict.findings if f.check in ("join", "open files")] == [("c",), ("a", "b")]
    assert DoctorVerdict.loads(verdict.dumps()) == verdict
    assert Examination.loads(reports[0].dumps()) == reports[0]


def test_judge_rendezvous_names_missing_and_mismatched_nodes() -> None:
    here = Place(nodes=("a", "b", "c", "d"), node="a", head_address="10.0.0.1", port=1, command="grpo doctor")

    def arrival(node: str, text: str) -> NodeArrival:
        return NodeArrival(node=node, report=text.encode(), clock_offset_s=-5.0, clock_error_s=0.1)

    missing = Trouble(message="d did not come", fix="start it", nodes=("d",))
    another = json.dumps({"node": "c", "host": "c", "news": 1})
    came = (arrival("b", report("b").dumps()), arrival("c", another))
    verdict = judge_rendezvous(
        here, report("a", route_source=""), Attendance(arrivals=came, troubles=(missing,), waited_s=1.0)
    )
    joined = [(f.status, f.nodes, f.message) for f in verdict.findings if f.check == "join"]
    assert joined[0] == (FAIL, ("d",), "d did not come")
    assert joined[1][:2] == (FAIL, ("c",))
    reported = "c runs another version of grpo: no Examination of this version: news: Unexpected keyword argument"
    assert joined[1][2] == reported
    assert [(one.node, one.clock_offset_s) for one in verdict.reports] == [("a", 0.01), ("b", -5.0)]
    assert "5.0 s behind a" in [finding.message for finding in verdict.findings]

    well = judge_rendezvous(here, report("a"), Attendance(arrivals=came[:1], troubles=(), waited_s=1.25))
    (joined_well,) = (finding for finding in well.findings if finding.check == "join")
    assert (joined_well.status, joined_well.message) == (PASS, "all 4 nodes came within 1.2 s")
