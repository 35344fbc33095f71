"""The head's part where a node came but sent no report, or another version's, and where its port is taken."""

import socket
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from grpo.doctor import meeting
from grpo.doctor.expected import Place
from grpo.doctor.records import NodeReport, Status, Verdict
from tests.unit.doctor.test_node import report


def place(port: int) -> Place:
    return Place(nodes=("a", "b", "c"), node="a", head_address="127.0.0.1", port=port)


def test_reports_that_do_not_come_or_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "REPORT_S", 0.2)
    store = dist.HashStore()
    for node in "bc":
        store.set(f"hello/{node}", "0")
    store.set("report/c", "{}")
    findings, reports = meeting._receive(store, place(1), join_timeout_s=0.0, started=0.0)
    assert reports == []
    assert [(finding.nodes, finding.status) for finding in findings] == [(("b",), Status.FAIL), (("c",), Status.FAIL)]
    assert "b came, but did not report within 0 s" in findings[0].message
    assert "c runs another version of grpo" in findings[1].message


def test_a_head_that_does_not_answer_has_no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "REPORT_S", 0.02)
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=1))
    assert meeting._measure_clock(store, "b") == (None, 0.0)


def test_a_port_that_is_taken_is_told_with_the_way_out() -> None:
    shown: list[Verdict] = []

    def examine() -> NodeReport:
        return report("a")

    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        verdict = meeting.preside(
            place(port), examine, shown.append, output_dir=Path("/tmp"), join_timeout_s=0.0, started=0.0
        )
    assert shown == [verdict]
    (told,) = (finding for finding in verdict.findings if finding.check == "join")
    assert f"the head cannot open its store on port {port}" in told.message
    assert "another --port" in told.fix
    assert verdict.exit_code == 1


def test_a_head_that_stops_answering_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def dark(*args: object, **kwargs: object) -> None:
        raise TimeoutError("no end within 9 s")

    monkeypatch.setattr(meeting, "_reach", lambda *args: None)
    monkeypatch.setattr(meeting, "_join", dark)
    verdict, is_the_heads = meeting.attend(place(1), lambda: report("b"), join_timeout_s=0.0, started=0.0)
    assert not is_the_heads
    (told,) = (finding for finding in verdict.findings if finding.check == "join")
    assert told.message == "the head a came, but stopped answering: no end within 9 s"
