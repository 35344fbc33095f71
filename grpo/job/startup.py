"""How long a job takes from its start to its first step, and what it saves that engines and trainer start together."""

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Startup:
    """One rank's way to the end of its first step. All seconds count from the start of its process, or are spans."""

    launch_to_first_step_s: float
    """The launcher's own start, which comes before, is not in it."""
    engine_s: float
    """What the slowest engine of the job took to start."""
    trainer_s: float
    """Own work until everything was ready for the first push but the engines: imports, data, model, process groups."""
    waited_for_engine_s: float
    """What was left to wait then: for the engines of all nodes, and for ranks that were slower than this one."""

    @property
    def one_after_the_other_s(self) -> float:
        """Launch to first step if the trainer had waited for the engines before it went on.

        A sum of parts that were measured while both started: where they compete for few cores, each is slower than it
        would be alone, and the sum is too large. `bench/startup.py` runs both.
        """
        return self.launch_to_first_step_s - self.waited_for_engine_s + self.engine_s

    def metrics(self) -> dict[str, float]:
        return {
            "startup/launch_to_first_step_s": self.launch_to_first_step_s,
            "startup/engine_s": self.engine_s,
            "startup/trainer_s": self.trainer_s,
            "startup/waited_for_engine_s": self.waited_for_engine_s,
            "startup/one_after_the_other_s": self.one_after_the_other_s,
        }


class StartupClock:
    """Follows the start of one rank. `waiting` and `engine_s` come first; `first_step` answers once."""

    engine_s = 0.0
    """What the slowest engine of the job took to start."""

    def __init__(self) -> None:
        self._trainer_s = 0.0
        self._waited_s = 0.0
        self._is_open = True

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around the wait for the engines, which all ranks enter when they are ready for the first push."""
        self._trainer_s = process_age_s()
        yield
        self._waited_s = process_age_s() - self._trainer_s

    def first_step(self) -> Startup | None:
        """At the end of a step: the report of the first one, None from then on."""
        if not self._is_open:
            return None
        self._is_open = False
        return Startup(
            launch_to_first_step_s=process_age_s(),
            engine_s=self.engine_s,
            trainer_s=self._trainer_s,
            waited_for_engine_s=self._waited_s,
        )


def process_age_s() -> float:
    """Seconds since this process was started, its interpreter and imports included. Linux."""
    # In clock ticks since boot, the 22nd field; the second one, a name in brackets, may hold anything.
    started_ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")
