"""`make test-gpu` where there is no GPU: what it says, and that it needs torch and pytest alone for the first GPU."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import psutil
import pytest

from tests.gpu.failures import keep_logs
from tests.gpu.report import Outcome, duration, render, summary
from tests.gpu.requirements import RUN_BY, Needs, lacking, needs
from tests.gpu.session import OPTIONS

ROOT = Path(__file__).resolve().parents[3]

OUTCOMES = [
    Outcome(name="t.py::test_a", gpus=1, result="passed", seconds=1.25, usual_s=10,
            figures=[("sync", 0.01234, "s"), ("x", 15200, "B")]),
    Outcome(name="t.py::test_b", gpus=2, result="FAILED", seconds=100, usual_s=90, detail="assert 1 == 2 | 3",
            records=["the job failed on rank 0: it broke [GRPO-405]"], logs=[Path("/kept/job.log"), Path.cwd() / "a"]),
    Outcome(name="t.py::test_c", gpus=2, result="began", usual_s=4000),
    Outcome(name="t.py::test_d", gpus=4, result="not run", detail="needs 4 GPUs (2 more than this machine has)"),
]  # fmt: skip


def test_render_lists_run_and_unrun_tests() -> None:
    report = render([("driver", "575.1")], OUTCOMES)
    for line in (
        "| driver | 575.1 |",
        "## What ran: 1 passed, 1 FAILED, 1 did not end, 1 not run",
        "What the tests take by estimate, by the GPUs that they need: 1 GPU 10 s, 2 GPUs 1 h 8 min, 4 GPUs 0 s.",
        "2 min in all; 1 h 8 min by estimate.",
        "| 1 | `t.py::test_a` | passed | 1.2 | 10 | sync 0.0123 s; x 15,200 B |",
        "| 2 | `t.py::test_b` | FAILED: assert 1 == 2 / 3 | 100.0 | 90 |  |",
        "| 2 | `t.py::test_c` | began, and did not end | 0.0 | 4000 |  |",
        "### `t.py::test_b`",
        "assert 1 == 2 | 3",
        "the job failed on rank 0: it broke [GRPO-405]",
        "- `/kept/job.log`",
        "- `a`",
        "| 4 | `t.py::test_d` | needs 4 GPUs (2 more than this machine has) |",
    ):
        assert line in report.splitlines()
    assert summary([]) == "nothing was collected"


def test_lacking_names_missing_gpus_and_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUN_BY, "1")
    assert lacking(4, (), found=1) == ["4 GPUs (3 more than this machine has)"]
    assert lacking(1, (), found=0) == ["1 GPU (this machine has none)"]
    assert lacking(1, ("torch", "no_such_a", "no_such_b"), found=1) == ["no_such_a, no_such_b (not installed)"]
    assert lacking(0, (), found=0) == lacking(2, (), found=2) == []
    monkeypatch.delenv(RUN_BY)
    assert lacking(2, (), found=2) == ["`make test-gpu`, which runs one at a time"]


def run(arguments: list[str], **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.gpu", *arguments]
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **env}
    return subprocess.run(command, cwd=ROOT, env=hidden, capture_output=True, text=True, check=False, timeout=300)


def test_gpu_run_without_gpu_fails_and_lists_needs(tmp_path: Path) -> None:
    report = tmp_path / "report.md"
    done = run([], GRPO_GPU_REPORT=str(report))
    assert done.returncode != 0, done.stdout
    assert "make test-gpu on 0 GPUs" in done.stdout, done.stdout + done.stderr
    assert "nothing ran" in done.stdout
    for needed in ("1 GPU", "2 GPUs", "3 GPUs", "4 GPUs", "8 GPUs"):
        assert f"not run, needs {needed} (this machine has none)" in done.stdout
    assert (
        "| 3 | `test_three_gpus.py::test_job_on_three_gpus_logs_first_step_within_120_s[torchrun]` | needs 3 GPUs"
        in (report.read_text())
    )
    estimates = re.findall(
        r"(\d) GPUs? ([\dhmins ]+)[,.]", report.read_text().partition("by the GPUs that they need: ")[2]
    )
    assert [gpus for gpus, _ in estimates] == ["1", "2", "3", "4", "8"]
    table = re.findall(r"^\| (\d) \| ([\dhmins ]+) \|$", (ROOT / "docs" / "gpu.md").read_text(), re.MULTILINE)
    assert table == estimates, "docs/gpu.md says how long a tier takes"


@pytest.mark.long
def test_first_gpu_tier_needs_only_torch_and_pytest(tmp_path: Path) -> None:
    """Its tests on CPU, and all of `tests/gpu` read, where nothing else can be imported: as on a bare GPU machine."""
    absent = {"vllm", "transformers", "trl", "deepspeed", "accelerate", "datasets", "psutil", "numpy", "yaml", "rich"}
    (tmp_path / "sitecustomize.py").write_text(
        f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
"""
    )
    folder = ROOT / "tests" / "gpu"
    command = [sys.executable, "-m", "pytest", *OPTIONS, "-v", "-W", "ignore", "--confcutdir", str(folder), str(folder)]
    env = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
    env |= {"PYTHONPATH": str(tmp_path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "CUDA_VISIBLE_DEVICES": ""}
    command += ["-k", "cpu and (sync or gather)"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("test_put_rows_of_28_ranks_restores_parameters", "test_nccl_transport_delivers_equal_bits"):
        assert f"{name}[cpu" in done.stdout
    assert "SKIPPED" not in done.stdout
    env |= {"GRPO_GPU_REPORT": str(tmp_path / "report.md")}
    whole = [sys.executable, "-m", "tests.gpu"]
    done = subprocess.run(whole, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=300)
    assert "nothing ran" in done.stdout, done.stdout + done.stderr


def stubs(folder: Path, tests: str) -> str:
    folder.mkdir()
    (folder / "conftest.py").write_text((ROOT / "tests" / "gpu" / "conftest.py").read_text())
    (folder / "test_x.py").write_text(tests)
    return str(folder)


def test_gpu_run_after_crashed_test_runs_others(tmp_path: Path) -> None:
    tests = """
import os, pytest
pytestmark = [pytest.mark.gpus(1), pytest.mark.rehearsable]
def test_first(figure): figure("speed", 2.0, "GB/s")
def test_dies(tmp_path):
    (tmp_path / "job.log").write_text("[rank0]: ValueError: the cause\\nRuntimeError: what follows")
    os._exit(3)
def test_last(): pass
"""
    report, env = tmp_path / "report.md", {"GRPO_GPU_TESTS": stubs(tmp_path / "tests", tests), "GRPO_REHEARSE": "1"}
    done = run(["-q"], GRPO_GPU_REPORT=str(report), **env)
    assert done.returncode == 1, done.stdout + done.stderr
    lines = report.read_text().splitlines()
    assert any("test_first` | passed |" in line and "speed 2 GB/s" in line for line in lines), lines
    assert any("test_dies` | FAILED: took its process along (exit code 3) |" in line for line in lines), lines
    assert any("test_last` | passed |" in line for line in lines), lines
    assert "[rank0]: ValueError: the cause" in lines
    assert any(line.startswith("- `") and Path(line[3:-1]).read_text().startswith("[rank0]") for line in lines), lines


def test_gpu_run_on_sigterm_ends_its_tests(tmp_path: Path) -> None:
    """By SIGTERM, as schedulers do. The report says which test ran."""
    pid = tmp_path / "pid"
    tests = f"""
import os, pytest, subprocess, time
from pathlib import Path
@pytest.mark.gpus(1)
@pytest.mark.rehearsable
def test_sleeps():
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    Path({str(pid)!r} + ".new").write_text(str(child.pid))
    os.rename({str(pid)!r} + ".new", {str(pid)!r})
    child.wait()
"""
    report = tmp_path / "report.md"
    env = {**os.environ, "GRPO_GPU_TESTS": stubs(tmp_path / "tests", tests), "GRPO_REHEARSE": "1"}
    env |= {"GRPO_GPU_REPORT": str(report)}
    driver = subprocess.Popen([sys.executable, "-m", "tests.gpu"], cwd=ROOT, env=env, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 200
    while not pid.exists() and driver.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    driver.terminate()
    assert driver.wait(60) == 128 + signal.SIGTERM
    assert not psutil.pid_exists(int(pid.read_text()))
    assert "`test_x.py::test_sleeps` | began, and did not end |" in report.read_text()


def test_keep_logs_returns_cause_of_failure(tmp_path: Path) -> None:
    """The first line of the record; of a lone rank's, and of a mistake before the first step, what the run keeps."""
    for name, text, state in (
        (
            "a",
            "x\n[rank1]: JobFailed: the job failed on rank 1: it broke [GRPO-405]\nmore",
            {"state": "failed", "why": "no"},
        ),
        ("b", "ValueError: not this", {"state": "failed", "why": "ZeroDivisionError: by zero\nmore"}),
        ("c", "Traceback\nModuleNotFoundError: No module named 'x'\nerrors.ChildFailedError: 1", {"state": "running"}),
        ("d", "all is well", None),
    ):
        (tmp_path / "jobs" / name).mkdir(parents=True)
        (tmp_path / "jobs" / name / "job.log").write_text(text)
        if state is not None:
            (tmp_path / "jobs" / name / "run_state.json").write_text(json.dumps(state))
    records, logs = keep_logs("t::x", [tmp_path / "jobs"], tmp_path / "kept", stacks=None, text="what pytest says")
    assert records == [
        "the job failed on rank 1: it broke [GRPO-405]",
        "ZeroDivisionError: by zero",
        "ModuleNotFoundError: No module named 'x'",
    ]
    assert [log.name for log in logs] == ["job.log"] * 4 + ["pytest.txt"]
    assert all(log.is_file() and log.is_relative_to(tmp_path / "kept") for log in logs)


@pytest.mark.parametrize(("marks", "limit_s"), [((), 900), ((300,), 3000), ((60,), 900)])
def test_needs_limit_follows_usual_duration(marks: tuple[int, ...], limit_s: float) -> None:
    mark = pytest.mark.takes(*marks).mark if marks else None
    item = SimpleNamespace(iter_markers=lambda name: [pytest.mark.gpus(2).mark], get_closest_marker=lambda name: mark)
    assert needs(cast(pytest.Item, item)) == Needs(gpus=2, usual_s=marks[0] if marks else 10, limit_s=limit_s)


def test_duration_uses_largest_unit() -> None:
    said = {40: "40 s", 89: "89 s", 90: "2 min", 3570: "1 h 0 min", 4800: "1 h 20 min"}
    assert {seconds: duration(seconds) for seconds in said} == said
