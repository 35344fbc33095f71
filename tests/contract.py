"""The failure contract as tests hold jobs to it: everybody is gone in time, with one record, and nothing stays."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tests.launching import Job, wait_gone

if TYPE_CHECKING:
    import psutil

STARTUP_S = 240  # until a job is where a test wants it; it takes about 25 s alone
CONTRACT_S = 30  # promised, from the death on


def inner_process(host: int) -> "psutil.Process":
    """vLLM's engine process, a child of the engine host with this pid."""
    import psutil

    children = psutil.Process(host).children()
    return next(child for child in children if "resource_tracker" not in " ".join(child.cmdline()))


def expect_the_contract(job: Job, event: float, everyone: list["psutil.Process"]) -> str:
    """The launcher exits non-zero within the time, no process and no shared memory is left. The job's output.

    Args:
        event: when the failure came, by `time.monotonic`.
    """
    codes = job.wait(CONTRACT_S - (time.monotonic() - event))
    left = wait_gone(everyone, max(0.1, CONTRACT_S - (time.monotonic() - event)))
    assert not left, job.fail(f"left behind: {[(p.pid, p.cmdline()) for p in left]}")
    assert all(code != 0 for code in codes), job.fail(f"launchers exited {codes}")
    left_behind = job.traces()
    assert not left_behind, job.fail(f"left behind: {left_behind}")
    return job.output()


def the_record(job: Job, output: str, *, says: Sequence[str]) -> str:
    """The one failure record that all ranks tell."""
    records = {line.partition("the job failed on ")[2] for line in output.splitlines() if "the job failed on" in line}
    assert len(records) == 1, job.fail(f"not one record: {records}")
    (record,) = records
    for part in says:
        assert part in record, job.fail(f"no {part!r} in {record}")
    return record
