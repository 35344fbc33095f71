"""A folder that hangs is named, in time; one that answers, or refuses, is none."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from grpo.faults.storage import LOOK_S, Storage

WARN_S, LIMIT_S = 30.0, 100.0


@pytest.fixture
def reported() -> list[str]:
    return []


@pytest.fixture
def storage(reported: list[str]) -> Storage:
    return Storage(
        warn_s=WARN_S, limit_s=LIMIT_S, warn=reported.append, fail=lambda cause: reported.append(f"failed: {cause}")
    )


def _until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A `touch` that waits for a reader, as in the kernel; it is removed at the end."""
    (tmp_path / "bin").mkdir()
    os.mkfifo(tmp_path / "never")
    program = tmp_path / "bin" / "touch"
    program.write_text(f"#!/bin/sh\necho > {tmp_path / 'never'}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    before = {*psutil.Process().children()}
    yield tmp_path
    for child in {*psutil.Process().children()} - before:
        child.kill()
        child.wait()


def _trial(before: set[psutil.Process]) -> psutil.Process:
    (found,) = {*psutil.Process().children()} - before
    return found


def test_storage_with_hanging_folder_warns_then_fails(hangs: Path, storage: Storage, reported: list[str]) -> None:
    storage.look(0.0)
    storage.folder = hangs / "logs"
    for now_s in (5.0, LOOK_S, LOOK_S + WARN_S):
        storage.look(now_s)
    assert reported == [], "not known, not tried, and just as long as it may"
    for now_s in (LOOK_S + WARN_S + 1, LOOK_S + WARN_S + 3):
        storage.look(now_s)
    assert [line for line in reported if str(hangs / "logs") in line and "31 s" in line] == reported
    assert len(reported) == 1, "once"
    storage.look(LOOK_S + LIMIT_S + 1)
    assert reported[1].startswith(f"failed: the folder {hangs / 'logs'} has taken no write for 101 s")
    assert "GRPO-622" in reported[1]


def test_storage_after_folder_recovers_tries_again(hangs: Path, storage: Storage, reported: list[str]) -> None:
    before = {*psutil.Process().children()}
    storage.folder = hangs
    storage.look(LOOK_S)
    storage.look(2 * LOOK_S)
    trial = _trial(before)
    with (hangs / "never").open("rb"):
        _until(lambda: trial.status() == psutil.STATUS_ZOMBIE)
    storage.look(LOOK_S + LIMIT_S + 5)  # a new trial
    storage.look(LOOK_S + LIMIT_S + 5 + WARN_S)
    assert reported == []


@pytest.mark.parametrize("name", ["there", "missing"])
def test_storage_with_answering_folder_reports_nothing(
    name: str, tmp_path: Path, storage: Storage, reported: list[str]
) -> None:
    (tmp_path / "there").mkdir()
    before = (tmp_path / "there").stat().st_mtime_ns
    others = {*psutil.Process().children()}
    storage.folder = tmp_path / name
    for looks in range(1, 40):
        storage.look(LOOK_S * looks)
        for child in {*psutil.Process().children()} - others:
            _until(lambda child=child: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
    assert reported == []
    assert [each.name for each in tmp_path.iterdir()] == ["there"], "nothing is made"
    assert ((tmp_path / "there").stat().st_mtime_ns > before) == (name == "there"), "it was written to"
