"""SIGUSR1 and SIGTERM as requests to stop."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from grpo.faults.signals import StopSignals


@pytest.fixture
def signals() -> Iterator[StopSignals]:
    taken = StopSignals()
    taken.take()
    yield taken
    taken.release()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_sigusr1_requests_stop_and_requeue(signals: StopSignals) -> None:
    assert signals.request is None
    os.kill(os.getpid(), signal.SIGUSR1)
    assert signals.request is not None
    assert signals.request.why == "got SIGUSR1"
    assert signals.request.requeue


def test_sigusr1_ignored_by_launcher_requests_stop() -> None:
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signals = StopSignals()
    signals.take()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert signals.request is not None
    signals.release()
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    signal.signal(signal.SIGUSR1, before)


def test_sigterm_while_training_requests_stop(signals: StopSignals) -> None:
    signals.open()
    os.kill(os.getpid(), signal.SIGTERM)
    assert signals.request is not None
    assert signals.request.why == "got SIGTERM"


@pytest.mark.parametrize("where", ["before", "after"])
def test_sigterm_outside_training_ends_process(where: str) -> None:
    code = "import os, signal; from grpo.faults.signals import StopSignals\ns = StopSignals(); s.take()\n"
    code += "s.open(); s.close()\n" if where == "after" else ""
    code += "os.kill(os.getpid(), signal.SIGTERM); import time; time.sleep(5)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGTERM


def test_stop_signals_keep_handler_of_script(signals: StopSignals) -> None:
    assert signals.holds(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *_: None)
    assert not signals.holds(signal.SIGTERM)
    later = StopSignals()
    later.take()
    assert not later.holds(signal.SIGTERM)
    later.release()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_stop_signals_of_newest_trainer_take_request(signals: StopSignals) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        beside, later = StopSignals(), StopSignals()
        beside.take(theirs.fileno())
        later.take(ours.fileno())
        os.kill(os.getpid(), signal.SIGUSR1)
        assert later.request is not None
        assert beside.request is signals.request is None
        assert theirs.recv(1) == bytes([signal.SIGUSR1])  # by what was written into `ours`
        later.release()


def test_stop_signals_in_forked_worker_request_nothing(signals: StopSignals) -> None:
    pid = os.fork()
    if pid == 0:
        os.kill(os.getpid(), signal.SIGUSR1)  # ignored
        os.kill(os.getpid(), signal.SIGTERM)  # ends it
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
    assert signals.request is None


def test_stop_signals_in_other_thread_or_with_foreign_wakeup_take_none(signals: StopSignals) -> None:
    later = StopSignals()
    with ThreadPoolExecutor() as threads:
        threads.submit(later.take).result()
    assert later._taken == {}
    with socket.socketpair()[0] as theirs, socket.socketpair()[0] as ours:
        theirs.setblocking(False)
        ours.setblocking(False)
        before = signal.set_wakeup_fd(theirs.fileno())
        later.take(ours.fileno())
        assert signal.set_wakeup_fd(before) == theirs.fileno()
    assert later._taken == {}
