"""A process under an engine host that fails while the engine starts is reported, whether or not others notice."""

import multiprocessing
import os
import queue
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from grpo.engine.inner_processes import StartWatch, _reporting
from grpo.engine.messages import Died
from grpo.engine.plugin import HOST_MARK
from grpo.faults.failure import FailureKind
from tests.support.contract import CONTRACT_S

FORK = multiprocessing.get_context("fork")


def fails() -> None:
    raise ValueError("no space")


def fills() -> None:
    raise torch.OutOfMemoryError("of 80 GiB")


def is_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def returns() -> None:
    """As vLLM's worker does, which logs what it has raised."""


def works() -> None:
    time.sleep(CONTRACT_S)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(HOST_MARK, str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("work", "cause", "kind"),
    [
        (fails, "a worker has ended: ValueError: no space", FailureKind.USER),
        (fills, "a worker has ended: OutOfMemoryError: of 80 GiB", FailureKind.MEMORY),
        (returns, "a worker has ended", FailureKind.ENGINE),
        (is_killed, "a process of vLLM (pid {pid}) was killed", FailureKind.ENGINE),
    ],
)
def test_start_watch_with_failed_process_reports_cause_and_kind(
    work: Callable[[], None], cause: str, kind: FailureKind, folder: Path
) -> None:
    causes: queue.Queue[Died] = queue.Queue()
    watch = StartWatch(folder, causes.put, grace_s=0.1)
    working = FORK.Process(target=_reporting(works, "another worker"))
    process = FORK.Process(target=_reporting(work, "a worker"))
    try:
        working.start()
        process.start()
        reported = causes.get(timeout=CONTRACT_S)
        assert reported.cause.partition("\nin training")[0].endswith(f"[GRPO-403]: {cause.format(pid=process.pid)}")
        assert reported.kind is kind
    finally:
        watch.end()
        for each in (working, process):
            each.kill()
            each.join()


def test_start_watch_ended_before_grace_reports_nothing(folder: Path) -> None:
    """Then its own words are reported: the watch comes to nothing."""
    causes: queue.Queue[Died] = queue.Queue()
    process = FORK.Process(target=_reporting(fails, "a worker"))
    process.start()
    process.join()
    watch = StartWatch(folder, causes.put, grace_s=CONTRACT_S)
    assert watch.cause()
    watch.end()
    with pytest.raises(queue.Empty):
        causes.get(timeout=1)


def test_start_watch_cause_prefers_error_over_silent_exit(folder: Path) -> None:
    """EngineCore, whose pid is the lower, says no more than that a worker has failed."""
    for work in (returns, fills, returns):
        process = FORK.Process(target=_reporting(work, "it"))
        process.start()
        process.join()
    watch = StartWatch(folder, pytest.fail, grace_s=CONTRACT_S)
    died = watch.cause()
    watch.end()
    assert died is not None
    assert died.kind is FailureKind.MEMORY


def test_start_watch_with_missing_folder_finds_no_cause(folder: Path) -> None:
    watch = StartWatch(folder / "gone", pytest.fail)
    assert watch.cause() is None
    watch.end()
