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


def test_failure_record_bounds_cause_and_round_trips() -> None:
    long = FailureRecord(node=1, rank=5, host="b", phase="sync", cause=f"first{'x' * 100_000}last")
    assert len(long.cause) < 20_000
    assert long.cause.startswith("first")
    assert long.cause.endswith("last")
    assert FailureRecord(**long.as_dict()) == long
    assert str(JobFailed(RECORD)).startswith("the job failed on node 1 (b), rank 5, phase 'sync': EngineError: gone")


def test_guard_of_lone_process_raises_error_unchanged() -> None:
    watch = alone()
    with pytest.raises(ZeroDivisionError), watch.guard():
        raise ZeroDivisionError
    watch.check()


def test_during_nests_phases_and_keeps_phase_of_failure() -> None:
    watch = alone()
    with watch.during("train"):
        with watch.during("sync"):
            assert watch.phase == "sync"
        assert watch.phase == "train"
    with pytest.raises(ZeroDivisionError), watch.during("train"), watch.during("generate"):
        raise ZeroDivisionError
    assert watch.make_record("x").phase == "generate"


def test_report_keeps_first_record() -> None:
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


def test_guard_on_error_reaches_other_rank_with_first_cause(pair: list[FailureWatch]) -> None:
    with pytest.raises(ZeroDivisionError), pair[1].guard(), pair[1].during("train"):
        raise ZeroDivisionError("reward")
    wait_for_record(pair[0])
    with pytest.raises(JobFailed, match=r"rank 1, phase 'train': ZeroDivisionError: reward"):
        pair[0].check()
    # what the other rank meets as a consequence is reported as that
    with pytest.raises(JobFailed, match="rank 1") as caught, pair[0].guard():
        raise RuntimeError("gloo: connection closed by peer")
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_guard_on_system_exit_during_job_fails_job(pair: list[FailureWatch]) -> None:
    what = "rank 0, phase 'train': SystemExit: 0"
    with pytest.raises(JobFailed, match=what), pair[0].guard(), pair[0].during("train"):
        raise SystemExit(0)
    assert pair[0].record is not None


def test_guard_on_system_exit_after_leave_records_nothing(pair: list[FailureWatch]) -> None:
    pair[0].leave()
    with pytest.raises(SystemExit), pair[0].guard():
        raise SystemExit(0)
    assert pair[0].record is None


def test_guard_of_lone_process_on_system_exit_records_nothing() -> None:
    watch = alone()
    with pytest.raises(SystemExit), watch.guard():
        raise SystemExit(0)
    assert watch.record is None


def test_guard_on_local_job_failure_reports_to_other_ranks(pair: list[FailureWatch]) -> None:
    with pytest.raises(JobFailed, match="no answer from rank 1"), pair[0].guard():
        raise JobFailed(pair[0].make_record("no answer from rank 1"))
    assert pair[0].record is not None
    wait_for_record(pair[1])
    assert pair[1].record == pair[0].record


def test_make_record_of_job_failed_keeps_its_record() -> None:
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
def test_guard_on_echo_waits_for_record_of_cause(echo: str, pair: list[FailureWatch]) -> None:
    timer = threading.Timer(1.0, pair[1].report, [RECORD])
    timer.start()
    with pytest.raises(JobFailed, match="rank 5, phase 'sync'"), pair[0].guard():
        raise RuntimeError(echo)


def test_exchange_on_closed_connection_waits_for_record_of_peer(
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


def test_exchange_on_timeout_names_missing_rank(pair: list[FailureWatch], monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_guard_on_report_interrupts_python_in_main_thread(pair: list[FailureWatch]) -> None:
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


def test_guard_of_stuck_lone_process_ends_it_with_cause() -> None:
    ended = subprocess.run([sys.executable, "-c", STUCK_ALONE], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "phase 'weight sync group': the engine refused" in ended.stderr


def test_guard_of_lone_process_on_report_interrupts_python() -> None:
    watch = alone()
    threading.Timer(0.3, watch.report, [RECORD]).start()
    with pytest.raises(JobFailed, match="rank 5, phase 'sync'"), watch.guard():
        busy(10)


def test_guard_after_keyboard_interrupt_guards_again() -> None:
    watch = alone()
    with pytest.raises(KeyboardInterrupt), watch.guard():
        raise KeyboardInterrupt
    threading.Timer(0.3, watch.report, [RECORD]).start()
    with pytest.raises(JobFailed, match="rank 5, phase 'sync'"), watch.guard():
        busy(10)


def test_watch_for_second_trainer_replaces_first_watch(
    pair: list[FailureWatch], monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_within_past_limit_fails_job() -> None:
    watch = alone()
    with watch.guard(), watch.within(30.0, lambda: "too early"):
        pass
    stuck = watch.within(0.1, lambda: "the group did not open")
    with pytest.raises(JobFailed, match="the group did not open"), watch.guard(), stuck:
        busy(10)
    watch.stop()  # it has no thread


def test_echo_of_torch_network_error_is_true() -> None:
    assert may_be_an_echo(dist.DistNetworkError("reset"))
    assert not may_be_an_echo(RuntimeError("no such kernel"))
