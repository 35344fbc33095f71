"""The report of a start, by numbers worked out by hand and by a real process."""

import subprocess
import sys
import time

import pytest

from grpo.place import startup
from grpo.place.startup import StartupClock


def test_startup_clock_reports_times_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ages = iter([18.0, 33.0, 40.0])
    monkeypatch.setattr(startup, "process_age_s", lambda: next(ages))
    clock = StartupClock()
    with clock.waiting():
        pass
    clock.engine_s = 25.0
    # 40 s, of which 15 s were waiting; if the engines' 25 s came on top of all own work it would be 25 + 25.
    assert clock.first_step() == {
        "startup/launch_to_first_step_s": 40.0,
        "startup/engine_s": 25.0,
        "startup/trainer_s": 18.0,
        "startup/waited_for_engine_s": 15.0,
        "startup/one_after_the_other_s": 50.0,
    }
    assert clock.first_step() == {}


def test_process_age_counts_from_process_start() -> None:
    code = "import time; time.sleep(1); from grpo.place.startup import process_age_s; print(process_age_s())"
    began = time.monotonic()
    age_s = float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout)
    assert 1.0 < age_s < time.monotonic() - began + 0.02  # of a clock tick
