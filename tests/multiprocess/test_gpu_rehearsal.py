"""`make test-gpu` on CPUs: what its report says of tests that fail, hang and are skipped, and its jobs for two GPUs."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.launching import ROOT

TIERS = (1, 2, 3, 4, 8)
STUBS = f"""
import json, os, sys
from pathlib import Path
import pytest
from tests.gpu.jobs import by_accelerate, finish, launch, save_model, tiny_script

HERE = Path(__file__).parent
SLEEPS = '''
import json, mmap, os, sys, time
held = f"/dev/shm/of-a-stub-{{os.getpid()}}"
with open(held, "w+b") as file:
    file.truncate(4096)
    memory = mmap.mmap(file.fileno(), 4096)
if os.fork() == 0:  # in a session of its own, and soon without a parent
    os.setsid()
    if os.fork() == 0:
        found = {{"pid": os.getpid(), "held": held, "temporary": os.environ["TMPDIR"]}}
        with open(sys.argv[1] + ".new", "w") as file:
            json.dump(found, file)
        os.rename(sys.argv[1] + ".new", sys.argv[1])
        time.sleep(10**6)
    os._exit(0)
time.sleep(10**6)
'''

def each_tier(*marks):
    return pytest.mark.parametrize("gpus", [pytest.param(n, marks=[pytest.mark.gpus(n), *marks]) for n in {TIERS}])

@each_tier(pytest.mark.job)
def test_fails(gpus, tmp_path):
    out = tmp_path / "out"
    command = lambda _: [sys.executable, "-c", "[][0]"]
    if gpus == 3:
        model = save_model("qwen3-tied", tmp_path / "model")
        script = tiny_script(model, out, hold="reward-error-1", vllm_reserved_gpus=1)
        command = by_accelerate(script, gpus_per_node=3, reserved=1)
    finish(launch(command, out))

@each_tier(pytest.mark.job, pytest.mark.takes(1, limit_s=8))
def test_hangs(gpus, tmp_path):
    command = [sys.executable, "-S", "-c", SLEEPS, str(HERE / f"hangs-{{gpus}}.json")]
    launch(lambda _: command, tmp_path / "out").wait(1e6)

@each_tier(pytest.mark.rehearsable)
def test_comes_next(gpus, figure):
    figure("seen", gpus, "GPUs")

@each_tier()
def test_needs_gpus(gpus):
    raise AssertionError("skipped by its mark")
"""  # fmt: skip


def rehearse(report: Path, *arguments: str, **env: str) -> tuple[subprocess.CompletedProcess[str], str]:
    """As a user starts it. What it printed, and the report."""
    hidden = {**os.environ, "GRPO_REHEARSE": "1", "GRPO_GPU_REPORT": str(report), "CUDA_VISIBLE_DEVICES": "", **env}
    command = [sys.executable, "-m", "tests.gpu", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=hidden, capture_output=True, text=True, check=False, timeout=560)
    return done, report.read_text()


def section(report: str, name: str) -> str:
    """Of a failed test."""
    assert f"### `{name}`" in report, report
    return report.partition(f"### `{name}`")[2].partition("\n## ")[0].partition("\n### ")[0]


def logs_in(text: str) -> list[Path]:
    logs = [ROOT / path for path in re.findall(r"^- `(.*)`$", text, re.MULTILINE)]
    assert all(log.is_file() for log in logs), text
    return logs


@pytest.mark.long
def test_gpu_report_of_each_tier_lists_failed_hung_and_skipped_tests(tmp_path: Path) -> None:
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    (stubs / "conftest.py").write_text((ROOT / "tests" / "gpu" / "conftest.py").read_text())
    (stubs / "test_stub.py").write_text(STUBS)
    done, report = rehearse(tmp_path / "report.md", GRPO_GPU_TESTS=str(stubs))
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"## What ran: {len(TIERS)} passed, {2 * len(TIERS)} FAILED, {len(TIERS)} not run" in report, report
    for gpus in TIERS:
        hung = section(report, f"test_stub.py::test_hangs[{gpus}]")
        assert "hung: ended after 8 s, with the processes that it had started" in hung
        names = {log.name: log for log in logs_in(hung)}
        assert "in test_hangs" in names["stacks.txt"].read_text()
        assert "job.log" in names
        child = json.loads((stubs / f"hangs-{gpus}.json").read_text())
        assert not psutil.pid_exists(child["pid"])
        assert not Path(child["held"]).exists()
        assert not Path(child["temporary"]).exists()
        assert f"| {gpus} | `test_stub.py::test_comes_next[{gpus}]` | passed | " in report
        assert f"seen {gpus} GPUs" in report
        assert f"| {gpus} | `test_stub.py::test_needs_gpus[{gpus}]` | needs {gpus} GPU" in report
        assert f"test_stub.py::test_hangs[{gpus}]: about 1 s by estimate, ended after 8 s" in done.stdout
        failed = section(report, f"test_stub.py::test_fails[{gpus}]")
        names = {log.name: log for log in logs_in(failed)}
        if gpus == 3:
            assert re.search(r"^the job failed on .*rank 1.*ZeroDivisionError.*a reward of the user's", failed, re.M), (
                failed
            )
            assert "ZeroDivisionError" in names["job.log"].read_text()
            assert {
                "rank-node0-0.attempt-0.log",
                "rank-node0-1.attempt-0.log",
                "engine-node0-0.attempt-0.log",
            } <= names.keys()
        else:
            assert "launchers exited [1]" in failed
            assert "IndexError: list index out of range" in failed
            assert "IndexError" in names["job.log"].read_text()


@pytest.mark.long
def test_gpu_job_with_compiled_engine_passes_on_cpus(tmp_path: Path) -> None:
    """All of it but the device: weight syncs to a compiled engine, and the last step, which shows weights that are
    old."""
    done, report = rehearse(tmp_path / "report.md", "-k", "test_compiled_engine")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "## What ran: 1 passed" in report
    assert "with weights of the step before" in report


@pytest.mark.long
@pytest.mark.parametrize(
    "chosen",
    [
        "demo_in_bf16",
        "one_generates and shm",
        "alone and shm",
        "resumed or bandwidth",
        "killed and first-sync-inner",
    ],
)
def test_two_gpu_jobs_pass_on_cpus(chosen: str, tmp_path: Path) -> None:
    """One of each kind."""
    done, report = rehearse(tmp_path / "report.md", "-k", f"test_two_gpus and ({chosen})")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "## What ran: 1 passed" in report or "## What ran: 2 passed" in report
