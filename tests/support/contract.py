"""The failure contract as tests hold jobs to it: everybody is gone in time, with one record, and nothing stays."""

import re
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from grpo.engine.plugin import HOST_MARK
from tests.support.launching import Job, wait_gone

if TYPE_CHECKING:
    import psutil

STARTUP_S = 240  # until a job is where a test wants it; it takes about 25 s alone
CONTRACT_S = 30  # promised, from the death on
REPORTED, _LOGS_END = "the job failed on ", "; the last lines of "
_RECORD_LINES = 6
_BY_RANK = re.compile(
    r"^(?:\[rank(?P<rank>\d+)\]: .*|\[grpo\] rank (?P<ended>\d+) ends: |\[grpo\] the sentinel of node \d+ kills rank "
    r"(?P<killed>\d+) .*)the job failed on (?P<record>.*)$",
    re.MULTILINE,
)


def inner_process(host: int) -> "psutil.Process":
    """vLLM's engine process under the engine host with this pid. StopIteration: it has not begun its work."""
    return _at_work(host, host)


def worker_process(host: int) -> "psutil.Process":
    """The first of its workers. StopIteration: as above."""
    return _at_work(host, inner_process(host).pid)


def _at_work(host: int, parent: int) -> "psutil.Process":
    """A child of `parent` that has said that it is there: others are about to become something else."""
    import psutil

    # Of the host: the others have overwritten theirs with a title.
    records = Path(psutil.Process(host).environ()[HOST_MARK]) / "inner"
    return next(child for child in psutil.Process(parent).children() if (records / str(child.pid)).exists())


def expect_the_contract(
    job: Job, event: float, everyone: list["psutil.Process"], *, within_s: float = CONTRACT_S
) -> str:
    """The launcher exits non-zero within the time, no process and no shared memory is left. The job's output.

    Args:
        event: when the failure came, by `time.monotonic`.
    """
    codes = job.wait(within_s - (time.monotonic() - event))
    left = wait_gone(everyone, max(0.1, within_s - (time.monotonic() - event)))
    assert not left, job.fail(f"left behind: {[(p.pid, p.cmdline()) for p in left]}")
    assert all(code != 0 for code in codes), job.fail(f"launchers exited {codes}")
    left_behind = job.traces()
    assert not left_behind, job.fail(f"left behind: {left_behind}")
    return job.output()


def until_it_ends(job: Job, timeout_s: float) -> str:
    """Of a job that ends by itself, with a failure: its output. The contract holds from its launchers' end on."""
    everyone = job.processes()
    deadline = time.monotonic() + timeout_s
    while any(launcher.poll() is None for launcher in job.launchers) and time.monotonic() < deadline:
        everyone = job.processes() or everyone
        time.sleep(0.2)
    return expect_the_contract(job, time.monotonic(), everyone)


def records_by_rank(output: str) -> dict[int, set[str]]:
    """First lines of the records that each rank has printed, or that its node's sentinel has printed for it."""
    found: dict[int, set[str]] = {}
    for match in _BY_RANK.finditer(output):
        found.setdefault(int(match["rank"] or match["ended"] or match["killed"]), set()).add(match["record"])
    return found


def records_in(output: str) -> list[str]:
    """Those that a job's output tells, each once.

    Records differ by their first line, behind which a launcher says what follows. Some have more, as what pydantic says
    of a wrong value.
    """
    lines, found = output.splitlines(), {}
    for number, line in enumerate(lines):
        if REPORTED in line:
            first = line.partition(REPORTED)[2]
            found[first] = "\n".join([first, *lines[number + 1 : number + _RECORD_LINES]]).partition(_LOGS_END)[0]
    own = [first for first in sorted(found) if not any(first != one and first.startswith(one) for one in found)]
    return [found[first] for first in own]


def the_record(job: Job, output: str, *, says: Sequence[str], ranks: Collection[int] = ()) -> str:
    """The one failure record that all ranks tell.

    Args:
        ranks: those that have to print it, each for itself.
    """
    by_rank = records_by_rank(output)
    records = {line.partition("the job failed on ")[2] for line in output.splitlines() if "the job failed on" in line}
    assert len(records) == 1, job.fail(f"not one record: {records}")
    assert by_rank.keys() >= set(ranks), job.fail(f"rank {sorted(set(ranks) - by_rank.keys())} has no record")
    (record,) = records
    for part in says:
        assert part in record, job.fail(f"no {part!r} in {record}")
    return record
