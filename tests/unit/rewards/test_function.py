"""A reward function that hangs ends the job, and shows where it hangs; also where Python code cannot run. One that only
the main thread may call is found out."""

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from signal import alarm as set_alarm
from signal import signal as set_handler
from typing import Any

import pytest

from grpo.faults import users_code
from grpo.faults.failure import JobFailed
from grpo.faults.signals import StopSignals
from grpo.faults.users_code import NeedsMainThreadError, Worker
from grpo.faults.watch import FailureWatch
from grpo.place.patches import stdlib
from grpo.record.timeline.recorder import Recorder
from grpo.rewards.function import RewardFunction
from tests.support.launching import ROOT

PATIENCE_S = 60.0


@pytest.fixture
def watch() -> FailureWatch:
    return FailureWatch(None, node=0, rank=0, host="a")


def function(func: Callable[..., Any], watch: FailureWatch, timeout_s: float = PATIENCE_S) -> RewardFunction:
    return RewardFunction(func, watch, timeout_s, Recorder(), beside=True)


def in_thread(func: RewardFunction) -> Any:
    return Worker("test").run(lambda: func.call_in_thread({"values": [1]}, ExitStack())).result(PATIENCE_S)


def waits_for_a_service(values: list[int]) -> list[float]:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        time.sleep(0.01)
    return []


async def judge(values: list[int]) -> list[float]:
    for _ in range(6000):
        await asyncio.sleep(0.01)
    return []


def test_reward_in_main_thread_over_timeout_fails_job(watch: FailureWatch) -> None:
    what = "phase 'reward': reward function waits_for_a_service .*GRPO-607"
    with pytest.raises(JobFailed, match=what) as failed, watch.guard():
        function(waits_for_a_service, watch, 0.3).call_here({"values": [1]})
    assert "within 0.3 s (reward_timeout) [GRPO-607]; it was here, the innermost call first:\n" in str(failed.value)
    assert "in waits_for_a_service\n" in str(failed.value)


def test_reward_in_worker_thread_over_timeout_fails_job(watch: FailureWatch) -> None:
    what = "phase 'reward': reward function waits .*GRPO-607"
    ends = threading.Event()

    def waits(values: list[int]) -> list[float]:
        ends.wait(PATIENCE_S)
        return []

    def trains() -> None:
        call = function(waits, watch, 0.3)
        future = Worker("test").run(lambda: call.call_in_thread({"values": [1]}, ExitStack()))
        while not future.done():
            watch.check()
            time.sleep(0.01)

    with pytest.raises(JobFailed, match=what) as failed, watch.guard(), watch.during("train"):
        trains()
    ends.set()
    assert "in waits\n" in str(failed.value)


def test_reward_coroutine_over_timeout_fails_job(watch: FailureWatch) -> None:
    with pytest.raises(JobFailed, match=r"reward function judge .*GRPO-607"), watch.guard():
        asyncio.run(function(judge, watch, 0.3).call_async({"values": [1]}, ExitStack()))


HELD = """
import ctypes
from grpo.faults import watch as watches
from grpo.place.timeouts import Timeouts
from grpo.rewards.function import RewardFunction
from grpo.place.patches import stdlib
from grpo.record.timeline.recorder import Recorder

watch = watches.FailureWatch(None, node=0, rank=0, host="a", timeouts=Timeouts(alone_grace_s=0.5))

def holds_the_lock(values):
    ctypes.PyDLL(None).sleep(120)

with watch.guard():
    RewardFunction(holds_the_lock, watch, 0.5, Recorder(), beside=True).call_here({"values": [1]})
"""


def test_reward_holding_gil_over_timeout_ends_process_with_stacks() -> None:
    ended = subprocess.run([sys.executable, "-c", HELD], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    assert "in holds_the_lock" in ended.stderr


CAUGHT = """
import time
from grpo.faults import watch as watches
from grpo.place.timeouts import Timeouts
from grpo.faults import users_code
from grpo.faults.failure import JobFailed
from grpo.faults.users_code import NeedsMainThreadError
from grpo.faults.users_code import Worker
from contextlib import ExitStack
from grpo.rewards.function import RewardFunction
from grpo.place.patches import stdlib
from grpo.record.timeline.recorder import Recorder

watch = watches.FailureWatch(None, node=0, rank=0, host="a", timeouts=Timeouts(alone_grace_s=0.5))
hangs = RewardFunction(lambda values: time.sleep(120), watch, 0.5, Recorder(), beside=True)
try:
    with watch.guard():
        Worker("test").run(lambda: hangs.call_in_thread({"values": [1]}, ExitStack()))
        while True:
            watch.check()
            time.sleep(0.01)
except JobFailed:
    time.sleep(2)
    print("goes on")
"""


def test_reward_timeout_with_caught_job_failed_keeps_process(watch: FailureWatch) -> None:
    ended = subprocess.run([sys.executable, "-c", CAUGHT], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.stdout == "goes on\n", ended.stderr


# -- what only the main thread may ------------------------------------------------------------------------------------


def sets_an_alarm(values: list[int]) -> list[float]:
    before = signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, before)
    return [1.0]


def takes_it_for_a_wrong_answer(values: list[int]) -> list[float]:
    try:
        return sets_an_alarm(values)
    except ValueError:
        return [0.0]


def hides_it(values: list[int]) -> list[float]:
    try:
        return sets_an_alarm(values)
    except ValueError as error:
        raise RuntimeError("cannot verify") from error


def sets_an_alarm_under_another_name(values: list[int]) -> list[float]:
    try:
        before = set_handler(signal.SIGALRM, signal.SIG_DFL)
        set_alarm(0)
        set_handler(signal.SIGALRM, before)
    except ValueError:
        return [0.0]
    return [1.0]


def has_its_handler_from_elsewhere(values: list[int]) -> list[float]:
    set_alarm(0)
    return [1.0]


def keeps_it_in_a_default(values: list[int], handler: Any = set_handler) -> list[float]:
    try:
        handler(signal.SIGALRM, handler(signal.SIGALRM, signal.SIG_DFL))
    except ValueError:
        return [0.0]
    return [1.0]


_connection = sqlite3.connect(":memory:")


def asks_a_connection_of_the_main_thread(values: list[int]) -> list[float]:
    return [float(*_connection.execute("SELECT 1").fetchone())]


def runs_a_loop(values: list[int]) -> list[float]:
    asyncio.get_event_loop()
    return [1.0]


@pytest.mark.parametrize(
    "func",
    [
        *(sets_an_alarm, takes_it_for_a_wrong_answer, hides_it, sets_an_alarm_under_another_name),
        *(has_its_handler_from_elsewhere, keeps_it_in_a_default, asks_a_connection_of_the_main_thread, runs_a_loop),
    ],
    ids=lambda func: func.__name__,
)
def test_reward_needing_main_thread_raises_in_worker(func: Any, watch: FailureWatch) -> None:
    with pytest.raises(NeedsMainThreadError):
        in_thread(function(func, watch))
    asyncio.set_event_loop(asyncio.new_event_loop())
    assert function(func, watch).call_here({"values": [1]}) == [1.0]


def test_reward_call_leaves_signals_of_main_thread_alone(watch: FailureWatch) -> None:
    begun, done = threading.Event(), threading.Event()

    def waits(values: list[int]) -> list[float]:
        begun.set()
        assert done.wait(PATIENCE_S)
        return [2.0]

    future = Worker("test").run(lambda: function(waits, watch).call_in_thread({"values": [1]}, ExitStack()))
    assert begun.wait(PATIENCE_S)
    assert sets_an_alarm([]) == [1.0]
    done.set()
    assert future.result(PATIENCE_S) == [2.0]
    assert set_alarm is signal.alarm is stdlib.SIGNALS["alarm"]


def in_a_fork(what: Callable[[], Any]) -> int:
    """The status of a forked child that does it: 0 where nothing is raised."""
    pid = os.fork()
    if pid == 0:
        threading.Timer(PATIENCE_S / 2, os._exit, [2]).start()
        try:
            what()
        except BaseException:  # noqa: BLE001  the parent's code is not for the child
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_process_forked_by_reward_may_set_signals(watch: FailureWatch) -> None:
    """As a pool of a judge's does, whose workers are the main thread of their process."""

    def scores(values: list[int]) -> list[float]:
        return [float(in_a_fork(lambda: sets_an_alarm(values)))]

    assert in_thread(function(scores, watch)) == [0.0]


def test_process_forked_during_patching_computes_reward(watch: FailureWatch) -> None:
    with users_code._patching:  # as another thread that begins or ends a call just then
        status = in_a_fork(lambda: in_thread(function(lambda values: [1.0], watch)))
    assert status == 0


def test_process_forked_by_reward_ends_on_sigterm(watch: FailureWatch) -> None:
    signals = StopSignals()
    signals.take()

    def scores(values: list[int]) -> list[float]:
        return [float(in_a_fork(lambda: os.kill(os.getpid(), signal.SIGTERM)))]

    try:
        assert in_thread(function(scores, watch)) == [-signal.SIGTERM]
    finally:
        signals.release()


def strikes_the_main_thread(values: list[int]) -> list[float]:
    signal.alarm(1)
    return [1.0]


def test_reward_alarm_in_worker_raises_and_sets_no_timer(watch: FailureWatch) -> None:
    with pytest.raises(NeedsMainThreadError, match=r"it calls signal\.alarm|signal only works in main thread"):
        in_thread(function(strikes_the_main_thread, watch))
    assert not 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 1


def test_reward_generator_runs_in_worker_thread(watch: FailureWatch) -> None:
    threads = []

    def scores(values: list[int]) -> Iterator[float]:
        threads.append(threading.current_thread().name)
        yield 1.0

    assert in_thread(function(scores, watch)) == [1.0]
    assert threads == ["test"]


def test_reward_error_with_circular_cause_is_raised(watch: FailureWatch) -> None:
    def fails(values: list[int]) -> list[float]:
        try:
            raise OSError("503; thread 7")
        except OSError as error:
            raise error from error

    with pytest.raises(OSError, match="503"):
        in_thread(function(fails, watch))


def test_reward_coroutine_with_system_exit_raises_runtime_error(watch: FailureWatch) -> None:
    async def leaves(values: list[int]) -> list[float]:
        raise SystemExit(3)

    with pytest.raises(RuntimeError, match=r"reward function leaves failed \[GRPO-623\]: SystemExit: 3"):
        asyncio.run(function(leaves, watch).call_async({"values": [1]}, ExitStack()))


def leaves(values: list[int]) -> list[float]:
    raise SystemExit


def test_reward_with_system_exit_raises_runtime_error(watch: FailureWatch) -> None:
    call = function(leaves, watch)
    for run in (lambda: call.call_here({"values": [1]}), lambda: in_thread(call)):
        with pytest.raises(RuntimeError, match=r"reward function leaves failed \[GRPO-623\]: SystemExit"):
            run()


def test_reward_with_sigint_raises_keyboard_interrupt(watch: FailureWatch) -> None:
    def waits(values: list[int]) -> list[float]:
        signal.raise_signal(signal.SIGINT)
        return []

    with pytest.raises(KeyboardInterrupt):
        function(waits, watch).call_here({"values": [1]})


def test_reward_timeout_after_closed_limit_does_not_fail_job(watch: FailureWatch) -> None:
    limit, begun, ends = ExitStack(), threading.Event(), threading.Event()

    def waits(values: list[int]) -> list[float]:
        begun.set()
        ends.wait(PATIENCE_S)
        return []

    call = function(waits, watch, 0.5)
    future = Worker("test").run(lambda: call.call_in_thread({"values": [1]}, limit))
    assert begun.wait(PATIENCE_S)
    limit.close()
    time.sleep(1.0)
    ends.set()
    assert future.result(PATIENCE_S) == []
    watch.check()


def test_reward_error_in_worker_is_raised_unchanged(watch: FailureWatch) -> None:
    def fails(values: list[int]) -> list[float]:
        raise KeyError("answer")

    with pytest.raises(KeyError, match="answer"):
        in_thread(function(fails, watch))
