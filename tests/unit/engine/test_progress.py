"""What tells a slow engine from a stuck one; a count and stacks, of processes that say nothing."""

import faulthandler
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from grpo.engine import progress
from grpo.engine.progress import EngineProgress, StallWatch, count_steps
from grpo.faults.stacks import STACKS_SIGNAL
from tests.support.launching import ROOT

LOOK_S = 2.0


def looks(watch: StallWatch, seconds: float, *, steps: int = 7, slowest_s: float = 1.0, **more: bool | int) -> list:
    """What so many seconds of looks find, in which no step ends."""
    said = {"owes": True, "answers": 0, "is_first": False, **more}
    found = (watch.look(LOOK_S, steps=steps, slowest_s=slowest_s, **said) for _ in range(round(seconds / LOOK_S)))
    return [each for each in found if each is not None]


@pytest.mark.parametrize(
    ("timeout_s", "on_cpu", "is_first", "slowest_s", "limit_s"),
    [
        (None, False, False, 0.05, 120.0),
        (None, False, False, 30.0, 300.0),
        (None, False, True, 0.05, 600.0),
        (None, True, False, 0.05, 600.0),
        (None, True, True, 90.0, 900.0),
        (20.0, True, True, 0.05, 20.0),
        (20.0, False, False, 6.0, 60.0),
    ],
)
def test_stall_watch_limit_matches_table(
    timeout_s: float | None, on_cpu: bool, is_first: bool, slowest_s: float, limit_s: float
) -> None:
    watch = StallWatch(timeout_s, on_cpu=on_cpu)
    assert watch.limit_s(slowest_s=slowest_s, is_first=is_first) == limit_s
    assert not looks(watch, limit_s + LOOK_S, slowest_s=slowest_s, is_first=is_first)  # the first one has just seen it
    assert looks(watch, LOOK_S, slowest_s=slowest_s, is_first=is_first) == [limit_s + LOOK_S]


def test_stall_watch_limit_grows_with_slowest_step() -> None:
    assert not looks(StallWatch(20.0, on_cpu=False), 40.0, slowest_s=4.0)
    assert looks(StallWatch(20.0, on_cpu=False), 40.0, slowest_s=1.0)[0] == 22.0


def test_stall_watch_with_chunked_prefill_finds_no_stall() -> None:
    watch = StallWatch(20.0, on_cpu=False)
    assert not [found for chunk in range(100) for found in looks(watch, 18.0, steps=7 + chunk)]


def test_stall_watch_with_answers_after_last_step_finds_no_stall() -> None:
    watch = StallWatch(20.0, on_cpu=False)
    assert not [found for answers in range(100) for found in looks(watch, 18.0, answers=answers)]


def test_stall_watch_with_nothing_owed_starts_anew() -> None:
    watch = StallWatch(20.0, on_cpu=False)
    assert not looks(watch, 18.0)
    assert not looks(watch, 500.0, owes=False)  # a weight sync, whose calls have a limit of their own
    assert not looks(watch, 20.0), "it begins anew"
    assert looks(watch, 4.0)


def test_stall_watch_without_step_count_finds_no_stall() -> None:
    assert not looks(StallWatch(20.0, on_cpu=False), 500.0, steps=0)


def test_engine_progress_of_forked_process_counts_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    count: list[Callable[[float], None]] = []
    monkeypatch.setattr(progress, "report_steps", count.append)
    memory = EngineProgress()
    assert memory.read() == (0, 0.0)
    count_steps(memory.fd)
    faulthandler.unregister(STACKS_SIGNAL)

    def work() -> None:
        for seconds in (0.5, 2.5, 1.0):
            count[0](seconds)
        os._exit(0)

    core = multiprocessing.get_context("fork").Process(target=work)
    core.start()
    core.join()
    assert memory.read() == (3, 2.5)


STUCK = """
import ctypes, sys, threading
from grpo.engine import progress
progress.report_steps = lambda on_end: None
progress.count_steps(int(sys.argv[1]))

def never_ends():
    print("in it", flush=True)
    ctypes.PyDLL(None).read(0, ctypes.create_string_buffer(1), 1)  # with the interpreter's lock

threading.Thread(target=threading.Event().wait, daemon=True).start()
never_ends()
"""


def test_engine_progress_stacks_with_gil_held_name_stuck_function() -> None:
    memory = EngineProgress()
    with subprocess.Popen(
        [sys.executable, "-c", STUCK, str(memory.fd)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=[memory.fd],
    ) as stuck:
        assert stuck.stdout is not None
        assert stuck.stdout.readline() == "in it\n"
        for _ in range(2):  # it goes on
            head, _thread, first, *others = memory.stacks([stuck.pid, os.getpid()]).splitlines()
            assert head.startswith(f"process {stuck.pid} (")
            assert first.endswith("in never_ends"), (first, others)
            assert any("threading.py" in line and "wait" in line for line in others)
            assert not any(line.startswith("process ") for line in others), "this one would end by the signal"
        assert stuck.poll() is None
    assert memory.read() == (0, 0.0)
