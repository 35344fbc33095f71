"""How long a job takes from its start to its first step, and what it saves that engines and trainer start together."""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path


class StartupClock:
    """Follows the start of one rank. `waiting` and `engine_s` come first; `first_step` answers once.

    All seconds count from the start of this process, or are spans.
    """

    engine_s = 0.0
    """What the slowest engine of the job took to start."""

    def __init__(self) -> None:
        self._trainer_s = 0.0
        self._waited_s = 0.0
        self._is_open = True

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around the wait for the engines, which all ranks enter when they are ready for the first weight sync."""
        self._trainer_s = process_age_s()
        yield
        self._waited_s = process_age_s() - self._trainer_s

    def first_step(self) -> dict[str, float]:
        """At the end of a step: the metrics of the first one, nothing from then on."""
        if not self._is_open:
            return {}
        self._is_open = False
        first_step_s = process_age_s()
        return {
            # Without the launcher's own start, which comes before.
            "startup/launch_to_first_step_s": first_step_s,
            "startup/engine_s": self.engine_s,
            # Own work until everything was ready for the first weight sync but the engines: imports, data, model,
            # groups.
            "startup/trainer_s": self._trainer_s,
            # What was left to wait then: for the engines of all nodes, and for ranks that were slower than this one.
            "startup/waited_for_engine_s": self._waited_s,
            # If the trainer had waited for the engines before it went on. A sum of parts that were measured while both
            # started: where they compete for few cores, each is slower than it would be alone, and the sum is too
            # large. `bench/startup.py` runs both.
            "startup/one_after_the_other_s": first_step_s - self._waited_s + self.engine_s,
        }


def process_age_s() -> float:
    """Seconds since this process was started, its interpreter and imports included. Linux."""
    # In clock ticks since boot, the 22nd field; the second one, a name in brackets, may hold anything.
    started_ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")
