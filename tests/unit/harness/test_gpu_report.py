"""`make test-gpu` where there is no GPU: what it says, and that it needs torch and pytest alone for the first GPU."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.__main__ import OPTIONS
from tests.gpu.report import Outcome, render, summary
from tests.gpu.requirements import RUN_BY, lacking

ROOT = Path(__file__).resolve().parents[3]

OUTCOMES = [
    Outcome(name="t.py::test_a", gpus=1, result="passed", seconds=1.25,
            figures=[("push", 0.01234, "s"), ("x", 15200, "B")]),
    Outcome(name="t.py::test_b", gpus=2, result="FAILED", seconds=3, detail="assert 1 == 2 | 3"),
    Outcome(name="t.py::test_c", gpus=2, result="began"),
    Outcome(name="t.py::test_d", gpus=4, result="not run", detail="needs 4 GPUs (2 more than this machine has)"),
]  # fmt: skip


def test_the_report_tells_what_ran_and_what_did_not() -> None:
    report = render([("driver", "575.1")], OUTCOMES)
    for line in (
        "| driver | 575.1 |",
        "## What ran: 1 passed, 1 FAILED, 1 did not end, 1 not run",
        "| 1 | `t.py::test_a` | passed | 1.2 | push 0.0123 s; x 15,200 B |",
        "| 2 | `t.py::test_b` | FAILED: assert 1 == 2 / 3 | 3.0 |  |",
        "| 2 | `t.py::test_c` | began, and did not end | 0.0 |  |",
        "| 4 | `t.py::test_d` | needs 4 GPUs (2 more than this machine has) |",
    ):
        assert line in report.splitlines()
    assert summary([]) == "nothing was collected"


def test_what_is_lacking_is_told_with_how_many_more(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_without_a_gpu_nothing_passes_for_tested(tmp_path: Path) -> None:
    report = tmp_path / "report.md"
    done = run([], GRPO_GPU_REPORT=str(report))
    assert done.returncode != 0, done.stdout
    assert "make test-gpu on 0 GPUs" in done.stdout, done.stdout + done.stderr
    assert "nothing ran" in done.stdout
    for needed in ("1 GPU", "2 GPUs", "3 GPUs", "4 GPUs", "8 GPUs"):
        assert f"not run, needs {needed} (this machine has none)" in done.stdout
    assert "| 3 | `test_three_gpus.py::test_the_first_step_comes_within_two_minutes[torchrun]` | needs 3 GPUs" in (
        report.read_text()
    )


@pytest.mark.long
def test_the_first_tier_needs_torch_and_pytest_alone(tmp_path: Path) -> None:
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
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations
    packed_tensor = Path(spec.submodule_search_locations[0]) / "distributed/weight_transfer/packed_tensor.py"
    folder = ROOT / "tests" / "gpu"
    command = [sys.executable, "-m", "pytest", *OPTIONS, "-v", "-W", "ignore", "--confcutdir", str(folder), str(folder)]
    env = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
    env |= {"PYTHONPATH": str(tmp_path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "CUDA_VISIBLE_DEVICES": ""}
    env |= {"GRPO_VLLM_PACKED_TENSOR": str(packed_tensor)}
    command += ["-k", "cpu and (push or gather)"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("test_rows_of_28_ranks_are_the_whole_parameter", "test_what_arrives_is_bit_equal"):
        assert f"{name}[cpu" in done.stdout
    assert "SKIPPED" not in done.stdout


def test_the_report_is_written_as_tests_go_on(tmp_path: Path) -> None:
    """One that takes the process along leaves what ran before, and its own name."""
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "conftest.py").write_text((ROOT / "tests" / "gpu" / "conftest.py").read_text())
    (folder / "test_x.py").write_text(
        """
import os, pytest
@pytest.mark.gpus(1)
def test_first(figure): figure("speed", 2.0, "GB/s")
@pytest.mark.gpus(1)
def test_dies(): os._exit(3)
"""
    )
    report = tmp_path / "report.md"
    code = f"""
import sys
import tests.gpu.requirements as requirements
requirements.num_gpus = lambda: 1
from tests.gpu import __main__ as runner
sys.exit(runner.main(["-q"], folder={str(folder)!r}))
"""
    env = {**os.environ, "GRPO_GPU_REPORT": str(report)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 3, done.stdout + done.stderr
    lines = report.read_text().splitlines()
    assert any("test_first` | passed |" in line and "speed 2 GB/s" in line for line in lines), lines
    assert any("test_dies` | began, and did not end |" in line for line in lines), lines
