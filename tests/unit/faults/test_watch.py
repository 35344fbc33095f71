"""The failure record and the watch of a single process; the watch between ranks is in tests/multiprocess."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from grpo.faults import sentinel_start
from grpo.faults.failure import FailureRecord, JobFailed
from grpo.faults.kinds import may_be_an_echo
from grpo.faults.liveness import NodePlace
from grpo.faults.sentinel_link import SentinelLink
from grpo.faults.sentinel_start import _started, start_sentinel, watch_for
from grpo.faults.signals import StopSignals
from grpo.faults.watch import FailureWatch
from grpo.groups.node_groups import NodeGroups
from grpo.place.timeouts import Timeouts
from tests.support.made_up_jobs import job

TIMEOUT_S = 5.0
RECORD = FailureRecord(node=1, rank=5, host="b", phase="sync", cause="EngineError: gone\nits log")


def alone() -> FailureWatch:
    return FailureWatch(None, node=0, rank=0, host="a")


def test_the_record_reads_well_and_has_a_bounded_length() -> None:
    long = FailureRecord(node=1, rank=5, host="b", phase="sync", cause=f"first{'x' * 100_000}last")
    assert len(long.cause) < 20_000
    assert long.cause.startswith("first")
    assert long.cause.endswith("last")
    assert FailureRecord(**long.as_dict()) == long
    assert str(JobFailed(RECORD)).startswith("the job failed on node 1 (b), rank 5, phase 'sync': EngineError: gone")


def test_alone_errors_raise_as_they_are() -> None:
    watch = alone()
    with pytest.raises(ZeroDivisionError), watch.guard():
        raise ZeroDivisionError
    watch.check()


def test_phases_nest_and_stay_at_the_failure() -> None:
    watch = alone()
    with watch.during("train"):
        with watch.during("sync"):
            assert watch.phase == "sync"
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
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FailureWatch]]:
    """Two ranks' watches in one process, on one sentinel; they cannot end it."""
    ended: list[int] = []
    monkeypatch.setattr(FailureWatch, "_end", lambda self, code: (ended.append(code), self.stop()))
    monkeypatch.setattr(StopSignals, "take", lambda self, waker=None: None)
    before = signal.getsignal(signal.SIGTERM)
    pids = {0: os.getpid(), 1: os.getpid()}
    settings = {"node": 0, "host": "a", "num_nodes": 1, "pids": pids, "agent": None, "timeout_s": TIMEOUT_S}
    name, _ = start_sentinel(settings)
    place = NodePlace(node=0, rank=0, host="a", pid=0)
    links = [SentinelLink(name, rank, place, timeout_s=TIMEOUT_S) for rank in pids]
    watches = [FailureWatch(link, node=0, rank=rank, host="a") for rank, link in enumerate(links)]
    yield watches
    for watch in watches:
        watch.stop()
    assert _started[-1].wait(20) == 0
    assert signal.getsignal(signal.SIGTERM) is before


def wait_for_record(watch: FailureWatch) -> None:
    deadline = time.monotonic() + 10
    while watch.record is None and time.monotonic() < deadline:
        time.sleep(0.05)


def test_a_failure_reaches_the_other_rank_and_keeps_its_first_cause(pair: list[FailureWatch]) -> None:
    with pytest.raises(ZeroDivisionError), pair[1].guard(), pair[1].during("train"):
        raise ZeroDivisionError("reward")
    wait_for_record(pair[0])
    with pytest.raises(JobFailed, match=r"rank 1, phase 'train': ZeroDivisionError: reward"):
        pair[0].check()
    # what the other rank meets as a consequence is reported as that
    with pytest.raises(JobFailed, match="rank 1") as caught, pair[0].guard():
        raise RuntimeError("gloo: connection closed by peer")
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_rank_that_leaves_amid_the_job_fails_it(pair: list[FailureWatch]) -> None:
    what = "rank 0, phase 'train': SystemExit: 0"
    with pytest.raises(JobFailed, match=what), pair[0].guard(), pair[0].during("train"):
        raise SystemExit(0)
    assert pair[0].record is not None


def test_a_rank_that_leaves_a_job_that_was_stopped_is_done(pair: list[FailureWatch]) -> None:
    pair[0].leave()
    with pytest.raises(SystemExit), pair[0].guard():
        raise SystemExit(0)
    assert pair[0].record is None


def test_a_lone_process_may_leave() -> None:
    watch = alone()
    with pytest.raises(SystemExit), watch.guard():
        raise SystemExit(0)
    assert watch.record is None


def test_a_failure_that_only_this_rank_has_seen_reaches_the_others(pair: list[FailureWatch]) -> None:
    with pytest.raises(JobFailed, match="no answer from rank 1"), pair[0].guard():
        raise JobFailed(pair[0].make_record("no answer from rank 1"))
    assert pair[0].record is not None
    wait_for_record(pair[1])
    assert pair[1].record == pair[0].record


def test_a_failure_that_has_a_record_gets_no_other() -> None:
    watch = alone()
    assert watch.make_record(JobFailed(RECORD)) == RECORD
    watch.fail(JobFailed(RECORD))
    assert watch.record == RECORD


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
    with pytest.raises(JobFailed, match="rank 5, phase 'sync'"), pair[0].guard():
        raise RuntimeError(echo)


def test_the_end_of_a_phase_waits_for_the_record_of_a_lost_peer(
    pair: list[FailureWatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(self: NodeGroups, value: object) -> list:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(NodeGroups, "all_gather", closed)
    (topology, _) = job((8,), ranks=2)
    groups = NodeGroups(topology, max_wait_s=1.0)  # without a process group
    groups._alone = False
    timer = threading.Timer(1.0, pair[1].report, [RECORD])
    timer.start()
    with pytest.raises(JobFailed, match="rank 5, phase 'sync'"):
        groups.exchange(pair[0], None)


def test_who_does_not_come_to_the_end_of_a_phase_is_named(
    pair: list[FailureWatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(self: NodeGroups, value: object) -> list:
        raise RuntimeError("Timed out waiting 60000ms for recv operation to complete")

    monkeypatch.setattr(NodeGroups, "all_gather", late)
    pair[0]._timeouts = Timeouts(blame_s=0.1)
    (topology, _) = job((8,), ranks=2)
    groups = NodeGroups(topology, max_wait_s=1.0)  # without a process group
    groups._alone = False
    pair[1].enter("reading data")
    with pytest.raises(JobFailed, match=r"ranks 1 \(node 0, in phase 'reading data'\) .*GRPO-610"):
        groups.exchange(pair[0], None)
    assert [pair[1].note_exchange() for _ in range(2)] == [1, 2]  # now all have come
    with pytest.raises(RuntimeError, match="Timed out"):
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
    with pytest.raises(JobFailed, match="rank 5, phase 'sync'"), pair[0].guard():
        busy(10)


STUCK_ALONE = """
import threading, time
from grpo.faults.sentinel_start import watch_for
from grpo.faults.watch import FailureWatch
from tests.support.made_up_jobs import job

watch = FailureWatch(None, node=0, rank=0, host="a")
threading.Timer(0.3, lambda: watch.report(watch.make_record("the engine refused"))).start()
with watch.guard(), watch.during("weight sync group"):
    time.sleep(120)  # as NCCL: nothing of Python gets through
"""


def test_a_lone_process_that_is_stuck_is_ended_with_the_cause() -> None:
    ended = subprocess.run([sys.executable, "-c", STUCK_ALONE], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "phase 'weight sync group': the engine refused" in ended.stderr


def test_a_lone_main_thread_that_runs_python_is_interrupted() -> None:
    watch = alone()
    threading.Timer(0.3, watch.report, [RECORD]).start()
    with pytest.raises(JobFailed, match="rank 5, phase 'sync'"), watch.guard():
        busy(10)


def test_after_an_interrupted_cell_of_a_notebook_the_next_one_is_guarded() -> None:
    watch = alone()
    with pytest.raises(KeyboardInterrupt), watch.guard():
        raise KeyboardInterrupt
    threading.Timer(0.3, watch.report, [RECORD]).start()
    with pytest.raises(JobFailed, match="rank 5, phase 'sync'"), watch.guard():
        busy(10)


def test_a_second_trainers_watch_is_the_only_one(pair: list[FailureWatch], monkeypatch: pytest.MonkeyPatch) -> None:
    (topology, *_) = job((8,), ranks=1)
    monkeypatch.setattr(sentinel_start, "_current", None)
    monkeypatch.setattr(sentinel_start, "link_to_sentinel", lambda *_, **__: None)
    monkeypatch.setattr(sentinel_start, "FailureWatch", lambda *_, **__: next(made))
    hook, made = sys.excepthook, iter([pair[1], alone()])
    assert hook == pair[1]._report_unhandled
    watch_for(topology, {})
    assert sys.excepthook == hook
    watch_for(topology, {})
    assert sys.excepthook == pair[0]._report_unhandled
    assert not pair[1]._thread.is_alive()


def test_what_holds_the_main_thread_too_long_is_the_failure() -> None:
    watch = alone()
    with watch.guard(), watch.within(30.0, lambda: "too early"):
        pass
    stuck = watch.within(0.1, lambda: "the group did not open")
    with pytest.raises(JobFailed, match="the group did not open"), watch.guard(), stuck:
        busy(10)
    watch.stop()  # it has no thread


def test_torchs_own_errors_may_be_echoes() -> None:
    assert may_be_an_echo(dist.DistNetworkError("reset"))
    assert not may_be_an_echo(RuntimeError("no such kernel"))
