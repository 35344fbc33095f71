"""Nodes that meet in a real store, here in threads of one process: who does not come, comes twice, or comes late."""

import json
import re
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from grpo.faults.deadlines import within
from grpo.ops.rendezvous import rendezvous
from grpo.ops.rendezvous.expected import Place
from grpo.ops.rendezvous.rendezvous import Attendance, RendezvousFailed, attend, preside
from grpo.ops.rendezvous.trouble import Trouble
from tests.support.launching import free_port

WAIT_S = 60.0  # no step here takes a second


def place(node: str = "a", *, nodes: str = "ab", port: int | None = None, wait_s: float = WAIT_S) -> Place:
    return Place(
        nodes=tuple(nodes),
        node=node,
        head_address="127.0.0.1",
        port=port or free_port(),
        command="grpo test",
        join_timeout_s=wait_s,
    )


def come(here: Place, bring: Callable[[Any], str] = lambda _: "here") -> str:
    """The verdict, or why there is none for this process."""
    try:
        return attend(here, bring).decode()
    except RendezvousFailed as error:
        return str(error)


def hold(
    head: Place, others: dict[str, Callable[[Any], str]], decide: Callable[[Any, Attendance], str], **given: Any
) -> tuple[tuple[Trouble, ...], dict[str, str]]:
    """A rendezvous with a node for each of `others`: the head's report of late ones, and each one's verdict."""
    with ThreadPoolExecutor() as threads:
        verdicts = {node: threads.submit(come, replace(head, node=node), bring) for node, bring in others.items()}
        late = preside(head, lambda: "the head's own", decide, **given)
        return late, {node: verdict.result() for node, verdict in verdicts.items()}


def test_rendezvous_gives_all_nodes_one_verdict_from_all_reports() -> None:
    def decide(own: str, attendance: Attendance) -> str:
        assert attendance.troubles == ()
        for arrival in attendance.arrivals:
            assert arrival.clock_offset_s is not None
            assert abs(arrival.clock_offset_s) <= arrival.clock_error_s + 1e-3
        return json.dumps([own, *((arrival.node, arrival.report.decode()) for arrival in attendance.arrivals)])

    others = {node: lambda opening, node=node: f"{node} was handed {opening}" for node in "cb"}
    late, verdicts = hold(place(nodes="abc"), others, decide, opening={"n": 1})  # type: ignore[arg-type]
    assert late == ()
    reported = ["the head's own", ["b", "b was handed {'n': 1}"], ["c", "c was handed {'n': 1}"]]
    assert [json.loads(verdict) for verdict in verdicts.values()] == [reported, reported]


def messages(_: Any, attendance: Attendance) -> str:
    return "; ".join(trouble.message for trouble in attendance.troubles) or "all is well"


def test_rendezvous_with_duplicate_node_before_verdict_fails() -> None:
    """The second one comes when the first has reported already, and another node keeps the rendezvous open."""
    head, second = place(nodes="abc"), []

    def bring_of_c(_: Any) -> str:
        store = dist.TCPStore("127.0.0.1", head.port, is_master=False, wait_for_workers=False)
        store.wait(["report/b"], timedelta(seconds=WAIT_S))
        second.append(come(replace(head, node="b")))
        return "here"

    late, verdicts = hold(head, {"b": lambda _: "here", "c": bring_of_c}, messages)
    assert second == ["another process came as b before this one"]
    assert verdicts == dict.fromkeys("bc", "2 processes came as b")
    assert late == ()


def test_rendezvous_with_process_after_verdict_refuses_and_reports_it() -> None:
    """Between the head's last look and the others' hearing of the verdict: it cannot be in what they hear."""
    head, reported = place(nodes="abc"), []

    def decide(own: Any, attendance: Attendance) -> str:
        reported.extend(come(replace(head, node=node)) for node in "bcc")
        return messages(own, attendance)

    late, verdicts = hold(replace(head, nodes=("a", "b")), {"b": lambda _: "here"}, decide)
    assert verdicts == {"b": "all is well"}
    stood = "when the verdict of the head a stood already"
    assert reported[0] == f"a process came as b {stood}, for another process that had come as b"
    assert all(one == "the head a expects a, b, and not c" for one in reported[1:])
    (trouble,) = late
    assert (trouble.message, trouble.fix) == (reported[0], "start one per node: srun --ntasks-per-node=1 grpo test")


def test_rendezvous_with_late_node_suggests_join_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "GRACE_S", 0.0)
    head, reported = place(wait_s=0.0), []

    def decide(own: Any, attendance: Attendance) -> str:
        reported.append(come(replace(head, node="b")))
        return messages(own, attendance)

    verdict = []
    late = preside(
        head,
        lambda: None,
        lambda own, attendance: verdict.append(decide(own, attendance)) or verdict[0],
    )
    assert re.fullmatch(r"b .* within 0 s .*\[GRPO-302\]", *verdict)
    assert reported == ["a process came as b when the verdict of the head a stood already"]
    assert [trouble.fix for trouble in late] == ["start all nodes together; slow starters: --join-timeout"]


def test_rendezvous_with_joined_node_without_report_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(rendezvous, "REMINDER_S", 0.1)
    store = dist.HashStore()
    store.set("hello/b", "0")
    attendance, counts = rendezvous._receive(store, replace(place(wait_s=0.0), report_timeout_s=0.4))
    assert (attendance.arrivals, counts) == ((), {"b": 0})
    assert "[grpo] for 0 s grpo test waits for the report of b\n" in capsys.readouterr().out
    (trouble,) = attendance.troubles
    assert (trouble.nodes, trouble.message) == (("b",), "b came, but did not report within 0 s")


def test_preside_with_hanging_own_report_names_head() -> None:
    """A driver that does not answer, say."""
    hangs = threading.Event()
    with pytest.raises(RendezvousFailed, match="the head a did not report within 0 s") as caught:
        preside(replace(place(wait_s=0.0), report_timeout_s=0.2), lambda: hangs.wait(5.0), messages)
    hangs.set()
    assert caught.value.trouble.nodes == ("a",)
    assert "run grpo test on it alone" in caught.value.trouble.fix


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_within_reraises_exception_of_thread(error: type[BaseException]) -> None:
    def ends() -> None:
        raise error

    with pytest.raises(error):
        within(5.0, ends)


def test_measure_clock_without_answer_returns_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_CLOCK_S", 0.01)
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=1))
    assert rendezvous._measure_clock(store, "b") == (None, 0.0)


def test_attend_with_missing_head_names_it_and_tried_address() -> None:
    here = place("b", wait_s=0.0)
    with pytest.raises(RendezvousFailed, match=rf"head a \(127.0.0.1:{here.port}\) .*GRPO-303") as caught:
        attend(here, lambda _: "")
    assert str(caught.value).endswith("Connection refused; here packets leave by lo from 127.0.0.1")
    assert caught.value.trouble.nodes == ("a",)
    assert "is grpo test started on it and not over already" in caught.value.trouble.fix


def test_attend_with_silent_port_refuses_it_as_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_CONNECT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        reported = come(place("b", port=silent.getsockname()[1]))
    assert "is not grpo test of the head a" in reported


def test_preside_with_taken_port_suggests_another_port() -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RendezvousFailed, match=f"the head cannot open its store on port {port}") as caught:
            preside(place(port=port, wait_s=0.0), lambda: "", messages)
    assert "another --port" in caught.value.trouble.fix


def test_attend_with_head_gone_silent_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def dark(*args: object, **kwargs: object) -> None:
        raise TimeoutError("no end within 9 s")

    monkeypatch.setattr(rendezvous, "_reach", lambda *args: None)
    monkeypatch.setattr(rendezvous, "_join", dark)
    assert come(place("b", port=1)) == "the head a came, but stopped answering: no end within 9 s"
