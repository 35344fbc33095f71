"""The failure record and the watch of a single process; the watch between ranks is in tests/multiprocess."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from grpo.job.failure import FailureRecord, JobFailed
from grpo.job.node_groups import NodeGroups
from grpo.job.signals import StopSignals
from grpo.job.watch import _LEFT_KEY, FailureWatch, _may_be_an_echo
from tests.unit.job.made_up_jobs import job

RECORD = FailureRecord(node=1, rank=5, host="b", phase="push", cause="EngineError: gone\nits log")


def alone() -> FailureWatch:
    return FailureWatch(None, node=0, rank=0, host="a", local_pids={})


def test_the_record_survives_the_store_and_reads_well() -> None:
    assert FailureRecord.loads(RECORD.dumps()) == RECORD
    assert str(JobFailed(RECORD)).startswith("the job failed on node 1 (b), rank 5, phase 'push': EngineError: gone")


def test_alone_errors_raise_as_they_are() -> None:
    watch = alone()
    with pytest.raises(ZeroDivisionError), watch.guard():
        raise ZeroDivisionError
    watch.check()


def test_phases_nest_and_stay_at_the_failure() -> None:
    watch = alone()
    with watch.during("train"):
        with watch.during("push"):
            assert watch.phase == "push"
        assert watch.phase == "train"
    with pytest.raises(ZeroDivisionError), watch.during("train"), watch.during("generate"):
        raise ZeroDivisionError
    assert watch.make_record("x").phase == "generate"


def test_the_first_record_stays() -> None:
    watch = alone()
    watch.report(RECORD)
    watch.report(watch.make_record("later"))
    with pytest.raises(JobFailed, match="rank 5"):
        watch.check()


@pytest.fixture
def store() -> dist.Store:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def pair(store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FailureWatch]]:
    """Two ranks' watches in one process; they cannot end it."""
    ended: list[int] = []
    monkeypatch.setattr(FailureWatch, "_end", lambda self, code: (ended.append(code), self.stop()))
    monkeypatch.setattr(StopSignals, "take", lambda self, waker=None: None)
    before = signal.getsignal(signal.SIGTERM)
    watches = [FailureWatch(store, node=0, rank=rank, host="a", local_pids={}) for rank in (0, 1)]
    yield watches
    for watch in watches:
        watch.stop()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_failure_reaches_the_other_rank_and_keeps_its_first_cause(pair: list[FailureWatch]) -> None:
    with pytest.raises(ZeroDivisionError), pair[1].guard(), pair[1].during("train"):
        raise ZeroDivisionError("reward")
    deadline = time.monotonic() + 10
    while pair[0].record is None and time.monotonic() < deadline:
        time.sleep(0.05)
    with pytest.raises(JobFailed, match=r"rank 1, phase 'train': ZeroDivisionError: reward"):
        pair[0].check()
    # what the other rank meets as a consequence is told as that
    with pytest.raises(JobFailed, match="rank 1") as caught, pair[0].guard():
        raise RuntimeError("gloo: connection closed by peer")
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize(
    "echo",
    [
        "DataLoader worker (pid 7) is killed by signal: Terminated.",
        "[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1",
    ],
)
def test_an_echo_waits_for_the_record_of_its_cause(echo: str, pair: list[FailureWatch]) -> None:
    timer = threading.Timer(1.0, pair[1].report, [RECORD])
    timer.start()
    with pytest.raises(JobFailed, match="rank 5, phase 'push'"), pair[0].guard():
        raise RuntimeError(echo)


def test_the_end_of_a_phase_waits_for_the_record_of_a_lost_peer(
    pair: list[FailureWatch], store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(self: NodeGroups, value: object) -> list:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(NodeGroups, "all_gather", closed)
    (topology, _) = job((8,), ranks=2)
    groups = NodeGroups(topology, max_wait_s=1.0)  # without a process group
    groups._alone, groups._store = False, store
    timer = threading.Timer(1.0, pair[1].report, [RECORD])
    timer.start()
    with pytest.raises(JobFailed, match="rank 5, phase 'push'"):
        groups.exchange(pair[0], None)


def busy(seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(0.01)


def test_a_main_thread_that_runs_python_is_interrupted(pair: list[FailureWatch]) -> None:
    def fail_soon() -> None:
        time.sleep(0.3)
        pair[1].report(RECORD)

    threading.Thread(target=fail_soon).start()
    with pytest.raises(JobFailed, match="rank 5, phase 'push'"), pair[0].guard():
        busy(10)


STUCK_ALONE = """
import threading, time
from grpo.job.watch import FailureWatch
from tests.unit.job.made_up_jobs import job

watch = FailureWatch(None, node=0, rank=0, host="a", local_pids={})
threading.Timer(0.3, lambda: watch.report(watch.make_record("the engine refused"))).start()
with watch.guard(), watch.during("push group"):
    time.sleep(120)  # as NCCL: nothing of Python gets through
"""


def test_a_lone_process_that_is_stuck_is_ended_with_the_cause() -> None:
    ended = subprocess.run([sys.executable, "-c", STUCK_ALONE], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "phase 'push group': the engine refused" in ended.stderr


def test_a_lone_main_thread_that_runs_python_is_interrupted() -> None:
    watch = alone()
    threading.Timer(0.3, watch.report, [RECORD]).start()
    with pytest.raises(JobFailed, match="rank 5, phase 'push'"), watch.guard():
        busy(10)


def test_what_holds_the_main_thread_too_long_is_the_failure() -> None:
    watch = alone()
    with watch.guard(), watch.within(30.0, lambda: "too early"):
        pass
    stuck = watch.within(0.1, lambda: "the group did not open")
    with pytest.raises(JobFailed, match="the group did not open"), watch.guard(), stuck:
        busy(10)
    watch.stop()  # it has no thread


class GoneStore:
    """As it is once its host has ended."""

    def __getattr__(self, name: str) -> Any:
        def fail(*_: Any) -> None:
            raise dist.DistNetworkError("Connection reset by peer")

        return fail


def test_a_store_that_is_gone_in_training_ends_it_and_afterwards_does_not(pair: list[FailureWatch]) -> None:
    training, done = pair
    done._store = GoneStore()  # type: ignore[assignment]
    assert done._stopped.wait(10)
    assert done.record is None
    threading.Timer(0.1, setattr, [training, "_store", GoneStore()]).start()
    with pytest.raises(JobFailed, match="the job's store is gone, and with it the launcher"), training.guard():
        busy(10)


def test_a_record_is_kept_where_no_store_takes_it(pair: list[FailureWatch]) -> None:
    pair[0]._main_store = GoneStore()  # type: ignore[assignment]
    pair[0].report(RECORD)
    assert pair[0].record == RECORD
    assert pair[1].record is None


def test_a_rank_that_has_left_has_not_been_killed(pair: list[FailureWatch]) -> None:
    pair[1]._main_store.set(_LEFT_KEY.format(rank=1), "1")
    pair[0]._look_at_dead_rank(1)
    assert pair[0].record is None


def test_torchs_own_errors_may_be_echoes() -> None:
    assert _may_be_an_echo(dist.DistNetworkError("reset"))
    assert not _may_be_an_echo(RuntimeError("no such kernel"))
