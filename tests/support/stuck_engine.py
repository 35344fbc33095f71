"""An engine with a fault of the test's own: vLLM loads this beside our plugin, from the test's folder."""

import os
from pathlib import Path

from tests.support.launching import ROOT

FOR_EVER = 10**6
_PLUGIN = """
import ctypes, os, time
from pathlib import Path

from tests.support.memory_groups import eat_all_memory

WISH = Path(os.environ["NEXT_STEP_TAKES"])
DEADLY = int(os.environ["DIES_OF_TOKENS"])


def register():
    from vllm.v1.core.sched.scheduler import Scheduler

    schedule = Scheduler.schedule

    def take_long(*args, **kwargs):
        output = schedule(*args, **kwargs)
        if any(len(request.prompt_token_ids) == DEADLY for request in output.scheduled_new_reqs):
            os._exit(7)
        if WISH.exists() and output.total_num_scheduled_tokens:
            wish = WISH.read_text()
            WISH.unlink()
            if wish == "all memory":
                eat_all_memory()
            until = time.monotonic() + float(wish)
            while time.monotonic() < until:  # again: a signal ends it
                ctypes.PyDLL(None).sleep(1)  # with the interpreter's lock
        return output

    if schedule.__name__ == "schedule":
        Scheduler.schedule = take_long
"""


class NextStep:
    """What the next step of any engine takes that runs with these `variables`.

    Args:
        dies_of: a prompt with so many tokens ends it.
    """

    def __init__(self, folder: Path, *, dies_of: int = 0) -> None:
        (folder / "slow_steps.py").write_text(_PLUGIN)
        (folder / "slow_steps-0.dist-info").mkdir()
        (folder / "slow_steps-0.dist-info" / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: slow-steps\nVersion: 0\n"
        )
        entry = "[vllm.general_plugins]\nslow_steps = slow_steps:register\n"
        (folder / "slow_steps-0.dist-info" / "entry_points.txt").write_text(entry)
        self._wish = folder / "next-step-takes"
        self.variables = {
            "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]),
            "NEXT_STEP_TAKES": str(self._wish),
            "DIES_OF_TOKENS": str(dies_of),
        }

    def takes(self, seconds: float) -> None:
        self._wishes(str(seconds))

    def takes_all_memory(self) -> None:
        self._wishes("all memory")

    def _wishes(self, what: str) -> None:
        new = self._wish.with_suffix(".new")
        new.write_text(what)
        new.rename(self._wish)

    @property
    def has_begun(self) -> bool:
        return not self._wish.exists()
