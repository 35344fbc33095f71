"""Calls of the user's code in the main thread, and what gets into them from outside."""

import signal
import threading
import time
from collections.abc import Callable

import pytest

from grpo.faults import deadlines
from grpo.faults.deadlines import DeadlinePassed, interrupted_after, raise_in_main_thread
from grpo.faults.failure import FailureRecord, JobFailed

LONG_S = 60.0
RECORD = FailureRecord(node=1, rank=3, host="far", phase="train", cause="a fault elsewhere")


def sleeps() -> None:
    try:
        time.sleep(LONG_S)
    except Exception:  # noqa: BLE001  as users write it
        time.sleep(LONG_S)


def computes() -> None:
    while True:
        pass


def catches_everything() -> None:
    while not caught:
        try:
            time.sleep(LONG_S)
        except BaseException as error:  # noqa: BLE001  as users write it
            caught.append(error)
    raise ValueError("its own")


caught: list[BaseException] = []


@pytest.mark.parametrize("call", [sleeps, computes, threading.Event().wait, catches_everything])
def test_interrupted_after_deadline_stops_any_call(call: Callable[[], object]) -> None:
    caught.clear()
    before, begun = signal.getsignal(signal.SIGUSR2), time.monotonic()
    with pytest.raises(DeadlinePassed), interrupted_after(0.05):
        call()
    assert time.monotonic() - begun < LONG_S / 2
    assert signal.getsignal(signal.SIGUSR2) is before
    assert not [thread for thread in threading.enumerate() if thread.name == "grpo-interrupt"]


def test_interrupted_after_first_interrupt_strikes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "AGAIN_S", 0.05)
    interrupts: list[BaseException] = []

    def call() -> None:
        while len(interrupts) < 3:
            try:
                time.sleep(LONG_S)
            except BaseException as error:  # noqa: BLE001  as users write it
                interrupts.append(error)

    with pytest.raises(DeadlinePassed), interrupted_after(0.05):
        call()
    assert len(interrupts) == 3


def test_interrupted_after_with_call_ending_in_time_does_nothing() -> None:
    with interrupted_after(LONG_S):
        pass
    with pytest.raises(ZeroDivisionError), interrupted_after(LONG_S):
        1 / 0  # noqa: B018


def test_interrupted_after_deadline_clears_alarm_of_call() -> None:
    signal.setitimer(signal.ITIMER_REAL, 0)  # of a test's own deadline

    def call() -> None:
        signal.setitimer(signal.ITIMER_REAL, LONG_S)
        time.sleep(LONG_S)

    with pytest.raises(DeadlinePassed), interrupted_after(0.05):
        call()
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_raise_in_main_thread_ends_system_call() -> None:
    begun, never = time.monotonic(), threading.Event()

    def call() -> None:
        threading.Timer(0.2, raise_in_main_thread, [RECORD]).start()
        never.wait(LONG_S)

    with pytest.raises(JobFailed, match="a fault elsewhere"), interrupted_after(LONG_S):
        call()
    assert time.monotonic() - begun < LONG_S / 2


def test_interrupted_after_outside_main_thread_does_nothing() -> None:
    done: list[bool] = []

    def call() -> None:
        with interrupted_after(0.01):
            time.sleep(0.05)
            done.append(True)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert done == [True]
