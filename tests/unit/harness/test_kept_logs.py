"""A failed test keeps its logs, and says where; a passed one keeps nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import kept_logs
from tests.support.kept_logs import FILE_BYTES, keep
from tests.support.launching import ROOT

FAILING = """
from pathlib import Path
import pytest
from tests.support import kept_logs

pytest_plugins = "tests.support.kept_logs"
kept_logs.KEPT = Path(KEPT_HERE)

@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shared")
    (folder / "job.log").write_text("what the shared job said")
    return type("Job", (), {"output_dir": folder})()

@pytest.mark.parametrize("passes", [True, False])
def test_one(passes, job, tmp_path):
    (tmp_path / "out" / "logs").mkdir(parents=True)
    (tmp_path / "out" / "logs" / "engine.log").write_text("what its engine said")
    assert passes
"""


def test_kept_logs_of_failed_test_are_named(tmp_path: Path) -> None:
    test = tmp_path / "test_failing.py"
    test.write_text(FAILING.replace("KEPT_HERE", repr(str(tmp_path / "kept"))))
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "--rootdir", str(tmp_path), str(test)]
    ran = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}, capture_output=True, text=True
    )
    assert ran.returncode == 1, ran.stdout + ran.stderr
    (folder,) = (tmp_path / "kept").iterdir()
    assert folder.name.endswith("test_failing.py-test_one-False")
    assert f"are kept in {folder}" in ran.stdout
    kept = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.log")}
    assert sorted(kept.values()) == ["what its engine said", "what the shared job said"], kept


def test_keep_bounds_size_and_keeps_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "model.safetensors").write_text("weights")
    (out / "a.log").write_bytes(b"x" * FILE_BYTES + b"the end")
    (out / "b.log").write_text("second")
    monkeypatch.setattr(kept_logs, "TEST_BYTES", FILE_BYTES + 3)
    kept = keep("multiprocess/test_a.py::test_b[c d]", [out, out], tmp_path / "kept")
    assert kept == tmp_path / "kept" / "multiprocess-test_a.py-test_b-c-d"
    assert {path.name: path.stat().st_size for path in (kept / "out").iterdir()} == {"a.log": FILE_BYTES, "b.log": 3}
    assert (kept / "out" / "a.log").read_bytes().endswith(b"the end")
    assert not [
        *keep("multiprocess/test_a.py::test_b[c d]", [], tmp_path / "kept").iterdir()
    ]  # what is there is of the last run
