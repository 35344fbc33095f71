"""An engine host's process, as the local main holds it."""

import contextlib
import gc
import os
import resource
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo.engine import process
from grpo.engine.process import HostProcess
from grpo.faults.sessions import WatchedProcess

ABOVE = 1100  # `select` takes no descriptor above 1023


@pytest.fixture
def many_files() -> Iterator[list[int]]:
    """As in a trainer with a group on every device and weights mapped into memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, ABOVE + 100), hard))
    files = []
    while not files or files[-1] < ABOVE:
        files.append(os.dup(0))
    yield files
    for file in files:
        os.close(file)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_host_wait_for_end_with_1100_open_files_notices_exit(many_files: list[int]) -> None:
    host = object.__new__(HostProcess)
    with subprocess.Popen([sys.executable, "-c", ""]) as host._process:
        assert host.wait_for_end(stopped_timeout_s=60.0) is None
    with pytest.raises(ValueError, match="out of range"):
        select.select([many_files[-1]], [], [], 0)


@pytest.mark.parametrize("taken_by_others", [False, True])
def test_watched_process_with_descriptor_closed_by_others_is_alive(taken_by_others: bool) -> None:
    """vLLM's forked workers close some of their descriptors twice, by number; one ended itself by that once."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        end = WatchedProcess(process.pid)
        if taken_by_others:  # of which something is to be read
            with open("/dev/null", "rb") as other:
                os.dup2(other.fileno(), taken := end.descriptor or 0)
        else:
            os.close(taken := end.descriptor or 0)
        assert not end.wait(0.2)
        process.kill()
        assert end.wait(60.0)
        end.close()
    if taken_by_others:
        os.close(taken)


def test_host_process_after_failed_start_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object, **kwargs: object) -> None:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(process.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(process.subprocess, "Popen", fails)
    gc.collect()
    before = open_files()
    with pytest.raises(BlockingIOError, match="no more processes"):
        HostProcess({})
    assert list(tmp_path.iterdir()) == []
    assert open_files() <= before  # what others of this process close meanwhile may be gone


def open_files() -> set[str]:
    """What this process has open, by the names that the kernel has for it."""
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that listed them
            found.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    return found
