"""Startup time of a job, until its first step, and the time saved by starting engines and trainer in parallel."""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path


class StartupClock:
    """Timer for the start of one rank. Use `waiting` and `engine_s` first, then `first_step`, which returns metrics
    once.

    All values are in seconds, since the start of this process or as durations.
    """

    engine_s = 0.0
    """Startup time of the job's slowest engine."""

    def __init__(self) -> None:
        self._trainer_s = 0.0
        self._waited_s = 0.0
        self._is_open = True

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Context manager around the wait for engines. All ranks enter it when they are ready for the first weight
        sync."""
        self._trainer_s = process_age_s()
        yield
        self._waited_s = process_age_s() - self._trainer_s

    def first_step(self) -> dict[str, float]:
        """Return startup metrics at the end of the first step; {} afterwards."""
        if not self._is_open:
            return {}
        self._is_open = False
        first_step_s = process_age_s()
        return {
            # Excludes the launcher's own start, which comes before.
            "startup/launch_to_first_step_s": first_step_s,
            "startup/engine_s": self.engine_s,
            # This rank's own work until only the engines were missing for the first weight sync: imports, data, model,
            # groups.
            "startup/trainer_s": self._trainer_s,
            # The remaining wait: for the engines of all nodes, and for slower ranks.
            "startup/waited_for_engine_s": self._waited_s,
            # Estimate for a trainer that waits for the engines before it goes on. It adds parts measured while both
            # started; with few cores each is slower than it would be alone, so the sum is too large. `bench/startup.py`
            # runs both.
            "startup/one_after_the_other_s": first_step_s - self._waited_s + self.engine_s,
        }


def process_age_s() -> float:
    """Seconds since this process started, including its interpreter and imports. Linux."""
    # Field 22: clock ticks since boot. Field 2, a name in brackets, may contain anything.
    started_ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")
