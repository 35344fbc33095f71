"""`grpo doctor` on two nodes, its parts in threads of one process: what each prints and returns."""

import json
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from grpo.cli import main
from grpo.ops.doctor import report, rounds
from grpo.ops.doctor.records import DoctorVerdict, Examination
from grpo.ops.rendezvous import rendezvous
from tests.support.launching import free_port

Doctor = Callable[..., int]


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch) -> Doctor:
    """Runs one node's doctor, which finds nothing wrong by itself; returns the exit code."""

    def examine(node: str, *_: object, peers: object) -> Examination:
        return Examination(node=node, host=node)

    monkeypatch.setattr(report, "examine", examine)
    monkeypatch.setattr(rendezvous, "GRACE_S", 0.0)

    def run(node: str, port: int, *options: str) -> int:
        here = ["--nodes", "a,b", "--node-name", node, "--head", "127.0.0.1", "--port", str(port)]
        return main(["doctor", *here, *options])

    return run


def test_doctor_with_late_process_fails_on_it_and_on_head(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    port, second = free_port(), []
    real_show = rounds.show

    def show(verdict: DoctorVerdict, **options: bool) -> None:
        real_show(verdict, **options)  # type: ignore[arg-type]
        if not second:
            second.append(None)  # the late one shows its own findings, and starts nobody
            second[0] = doctor("b", port)

    monkeypatch.setattr(rounds, "show", show)
    with ThreadPoolExecutor() as threads:
        first = threads.submit(doctor, "b", port)
        head = doctor("a", port)
        assert (first.result(), second, head) == (0, [1], 1)
    out, err = capsys.readouterr()
    late = "a process came as b when the verdict of the head a stood already, for another process that had come as b"
    reported = f"join: {late} → start one per node: srun --ntasks-per-node=1 grpo doctor"
    assert "grpo doctor: PASS" in out
    assert f"grpo doctor on b: FAIL: {reported}" in out
    assert f"grpo doctor on a: FAIL: {reported}" in err


def test_doctor_with_missing_node_reports_it_in_head_table(doctor: Doctor, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor("a", free_port(), "--join-timeout", "0") == 1
    out = capsys.readouterr().out
    assert "[GRPO-302]" in out
    assert "is grpo doctor started there" in out
    assert "next, how fast" not in out


def test_doctor_with_missing_head_names_it_on_other_node(doctor: Doctor, capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    assert doctor("b", port, "--join-timeout", "0") == 1
    said = capsys.readouterr().out
    assert "grpo doctor on b: FAIL: join: " in said
    assert f"(127.0.0.1:{port})" in said
    assert "[GRPO-303]: Connection refused" in said
    assert doctor("b", port, "--join-timeout", "0", "--json") == 1
    verdict = json.loads(capsys.readouterr().out)
    (finding,) = (finding for finding in verdict["findings"] if finding["check"] == "join")
    assert (verdict["status"], finding["status"], finding["nodes"]) == ("FAIL", "FAIL", ["a"])
    assert "[GRPO-303]: Connection refused" in finding["message"]


def test_doctor_head_with_taken_port_fails(doctor: Doctor, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("", 0)) as taken:
        assert doctor("a", taken.getsockname()[1]) == 1
    assert "the head cannot open its store on port" in capsys.readouterr().out
