"""Doctors as people start them: one process per node, here all on one machine, each with a name of its own."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.launching import BIN, free_port

DEADLINE_S = 60
DOCTOR = [sys.executable, "-m", "grpo", "doctor"]


class Started:
    """One started process, its output in a file."""

    def __init__(self, command: list[str], log: Path, env: dict[str, str]) -> None:
        self.log = log
        self.started = time.monotonic()
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "NCCL_", "GLOO_"))}
        home = log.parent / "home"  # no build lock or cache of whoever runs the tests
        home.mkdir(exist_ok=True)
        with log.open("wb") as sink:
            self.process = subprocess.Popen(
                command,
                stdout=sink,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=log.parent,
                start_new_session=True,
                env={**clean, "HOME": str(home), "COLUMNS": "200", **env},
            )

    def end(self) -> tuple[int, str, float]:
        """Exit code, output, and seconds that it took."""
        try:
            code = self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            raise AssertionError(f"still runs after {DEADLINE_S} s:\n{self.log.read_text()}") from None
        return code, self.log.read_text(), time.monotonic() - self.started


def doctor(name: str, folder: Path, port: int, *options: str, env: dict[str, str] | None = None) -> Started:
    command = [*DOCTOR, "--nodes", "a,b", "--node-name", name, "--head", "127.0.0.1", "--port", str(port), *options]
    return Started(command, folder / f"{name}-{port}.log", env or {})


def test_doctor_on_two_nodes_passes_and_agrees_on_verdict(tmp_path: Path) -> None:
    port, output = free_port(), tmp_path / "runs" / "not-there-yet"
    options = ("--output-dir", str(output), "--json")
    ends = [started.end() for started in [doctor(name, tmp_path, port, *options) for name in "ba"]]
    (code_b, output_b, _), (code_a, output_a, _) = ends
    assert (code_a, code_b) == (0, 0), output_a + output_b
    verdict = json.loads(output_a)
    status = {finding["check"]: finding["status"] for finding in verdict["findings"]}
    assert verdict["nodes"] == ["a", "b"]
    for check in ("join", "versions", "same versions", "same code", "own address", "clock", "shared output"):
        assert status[check] == "PASS", output_a
    assert [report["node"] for report in verdict["reports"]] == ["a", "b"]
    assert re.search(rf"on b: {verdict['status']}; the table is in the output of a", output_b)
    assert not list(tmp_path.glob(".grpo-doctor-*"))


def test_doctor_with_other_version_or_interface_names_node(tmp_path: Path) -> None:
    metadata = tmp_path / "old" / "accelerate-1.13.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: accelerate\nVersion: 1.13.0\n")
    path = os.pathsep.join(filter(None, [str(metadata.parent), os.environ.get("PYTHONPATH")]))
    other = {"PYTHONPATH": path, "NCCL_SOCKET_IFNAME": "ib9", "NCCL_ALGO": "Ring"}
    port = free_port()
    nodes = [doctor("a", tmp_path, port), doctor("b", tmp_path, port, env=other)]
    (code_a, output_a, _), (code_b, output_b, _) = [node.end() for node in nodes]
    assert (code_a, code_b) == (1, 1), output_a + output_b
    for check, status, seen in (
        ("versions", "WARN", "accelerate is 1.13.0, tested is <2,>=1.14"),
        ("same versions", "FAIL", "accelerate: 1.15.0 on a; 1.13.0 on b"),
        ("same variables", "FAIL", "NCCL_ALGO: none on a; Ring on b"),
        ("interfaces", "FAIL", "NCCL_SOCKET_IFNAME=ib9 selects no interface"),
    ):
        row = rf"^\W*{check}\W+{status}\W+b\W+{re.escape(seen)}"
        assert re.search(row, output_a, re.MULTILINE), output_a
    assert "FAIL (interfaces, same versions, same variables)" in output_b


def on_two_nodes(what: list[str], folder: Path, ranks: tuple[int, int] = (1, 1)) -> list[Started]:
    """`what` by torchrun, as two nodes of so many ranks."""
    port = free_port()

    def command(node: int) -> list[str]:
        flags = ["--nnodes", "2", "--node_rank", str(node), "--nproc_per_node", str(ranks[node])]
        flags += ["--master_addr", "127.0.0.1"]
        return [str(BIN / "torchrun"), *flags, "--master_port", str(port), *what]

    return [Started(command(node), folder / f"node{node}.log", {}) for node in range(2)]


def test_bandwidth_of_two_nodes_reports_rates(tmp_path: Path) -> None:
    what = ["-m", "grpo.ops.doctor.bandwidth", "--size-mb", "4", "--deadline", "40", "--params-b", "0.5"]
    what += ["--", "--model_name_or_path", "m", "--fp16"]
    ends = [node.end() for node in on_two_nodes(what, tmp_path, ranks=(2, 1))]
    output = "".join(end[1] for end in ends)
    assert [end[0] for end in ends] == [0, 0], output
    rates = r"all-reduce \d+\.\d+ GB/s, all-gather \d+\.\d+ GB/s"
    assert re.search(rf"inside a node .*{rates} among 2 ranks", output), output
    assert re.search(rf"across nodes .*{rates} over 3 ranks on 2", output), output
    assert re.search(r"number formats .*PASS.*gloo on CPUs carries float32, float16", output), output
    assert re.search(r"one weight sync .*about \d+\.\d s to gather 1\.0 GB", output), output
    assert re.search(r"pairs of nodes .*\d+\.\d+ GB/s each way", output), output


FAULTY = """
import sys, time
from grpo.ops.doctor import bandwidth

def stop(*_):
    {fault}

if bandwidth.read_launch(bandwidth.os.environ).node == 1:
    bandwidth._pair_exchanges = stop
sys.exit(bandwidth.main(["--size-mb", "1", "--deadline", "{deadline_s}"]))
"""


@pytest.mark.parametrize(
    ("fault", "deadline_s", "reported"),
    [
        ("time.sleep(600)", 5, r"pairs of nodes: round 1: no end within 5 s; not there: node 1 \("),
        ("raise OSError('no space')", 300, "across nodes: all-gather: rank 1 on .*: no space"),
    ],
    ids=["stuck", "failed"],
)
def test_bandwidth_with_stuck_or_failed_node_names_it(
    fault: str, deadline_s: int, reported: str, tmp_path: Path
) -> None:
    script = tmp_path / "faulty.py"
    script.write_text(FAULTY.format(fault=fault, deadline_s=deadline_s))
    ends = [node.end() for node in on_two_nodes([str(script)], tmp_path)]
    output = "".join(end[1] for end in ends)
    assert all(end[0] != 0 for end in ends), output
    assert re.search(rf"bandwidth +│ FAIL .*{reported}", output), output
    assert output.count("grpo doctor: FAIL") == 1, output
