"""What a cell has shown, held against what is promised: when all were gone, who reported which record, what is left."""

import json
import re
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from tests.faults.matrix import NODES, Cell, Expected
from tests.support.contract import REPORTED, records_by_rank, records_in
from tests.support.launching import Job
from tests.support.left_over import left_over, processes_in

PATIENCE_S = 45.0  # beyond the promise: what is late is measured, too
FINISH_S = 180.0  # of a job that goes on
POLL_S = 0.2
_LOG = re.compile(r"rank-node\d+-(\d+)\.attempt-\d+\.log")
_DIED = re.compile(r"the process of rank (\d+) .*\[GRPO-601\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a cell has shown."""

    wrong: list[str]
    """What was not as expected; empty when all was."""
    seconds: float | None
    """From the fault to the job's last process, or to the next step; None: not in the time."""
    record: str
    left: list[str]
    """Lines of `left_over`."""
    commit: str = ""
    """Of the working tree in which it was seen, with `-dirty` where files differed."""
    date: str = ""
    code: str = ""
    """See `stamps.code_of`."""


def until_gone(job: Job, deadline: float, spared: set[int], *, spares_held: bool = False) -> float | None:
    """When the last process was gone, those spared aside, by `time.monotonic`; None: not by the deadline.

    Args:
        spares_held: also those that the kernel holds in a call.
    """
    while left := processes_in(job.temporary).keys() - spared:
        if spares_held and all(_is_held(pid) for pid in left):
            break
        if time.monotonic() > deadline:
            return None
        for launcher in job.launchers:
            launcher.poll()
        time.sleep(POLL_S)
    return time.monotonic()


def _is_held(pid: int) -> bool:
    """Whether one of its threads waits where no signal ends it."""
    states = (path.read_text().rpartition(")")[2].split()[0] for path in Path(f"/proc/{pid}/task").glob("*/stat"))
    try:
        return "D" in states
    except OSError:
        return False


def records(job: Job) -> list[str]:
    """Those that the ranks tell; of a mistake before the first step the one that is kept for the scheduler."""
    if found := records_in(job.output()):
        return found
    state = job.output_dir / "run" / "run_state.json"
    kept = json.loads(state.read_text()) if state.exists() else {"state": "nothing is kept"}
    return [kept["why"].splitlines()[0]] if kept["state"] == "failed" else []


def ranks_of(layout: str) -> range:
    """The ranks of a job."""
    return range(max(2, NODES[layout]))


def silent_ranks(job: Job, struck: Collection[int], ranks: Collection[int] = (0, 1)) -> list[int]:
    """Ranks without a record, on the screen or in their logs, that should have one.

    Args:
        struck: ranks that the fault itself has taken.
    """
    output = job.output()
    reported = {*records_by_rank(output), *(int(number) for number in _DIED.findall(output)), *struck}
    for path in (job.output_dir / "run" / "logs").glob("rank-*.log"):
        if REPORTED in path.read_text(errors="replace") and (match := _LOG.fullmatch(path.name)):
            reported.add(int(match[1]))
    return [rank for rank in ranks if rank not in reported]


def judge(
    expected: Expected,
    job: Job,
    seconds: float | None,
    running: dict[int, str],
    left: list[str],
    *,
    struck: Collection[int],
    spares: bool,
    ranks: Collection[int] = (0, 1),
) -> Result:
    """Of a job that is to end.

    Args:
        seconds: from the fault to its last process.
        running: what ran then, those spared aside.
        struck: see `silent_ranks`.
    """
    found, wrong = records(job), []
    if seconds is None:
        wrong.append(f"processes run after {expected.within_s + PATIENCE_S:.0f} s: {running}")
    elif seconds > expected.within_s:
        wrong.append(f"took {seconds:.0f} s")
    if len(found) != expected.records:
        wrong.append(f"{len(found)} records" if found else "no record")
    wrong += [f"rank {rank} reported nothing" for rank in silent_ranks(job, struck, ranks)]
    for words in expected.says:
        if not any(word in record for word in words.split("|") for record in found):
            wrong.append(f"the record has no {words}")
    if seconds is not None and not spares and any(launcher.poll() == 0 for launcher in job.launchers):
        wrong.append("a launcher ended well")
    return Result(
        wrong=wrong + [f"left: {line}" for line in left],
        seconds=None if seconds is None else round(seconds, 1),
        record=_first_lines(found),
        left=left,
    )


def judge_going_on(cell: Cell, job: Job, run: Path, began: float) -> Result:
    """Of a job that is to train on: the next step, all steps, a good end."""
    assert cell.expected is not None
    before = len(_steps(run))
    next_step = None
    while any(launcher.poll() is None for launcher in job.launchers) and time.monotonic() - began < FINISH_S:
        if next_step is None and len(_steps(run)) > before:
            next_step = time.monotonic() - began
        time.sleep(POLL_S)
    codes, steps, wrong = [launcher.poll() for launcher in job.launchers], _steps(run), []
    if next_step is None and len(steps) > before:
        next_step = time.monotonic() - began
    if any(codes) or None in codes:
        wrong.append(f"launchers ended with {codes}")
    if next_step is None or next_step > cell.expected.within_s:
        wrong.append("no step in the time")
    if steps != sorted(set(steps)) or steps[-1:] != [4]:
        wrong.append(f"steps {steps}")
    left = [] if None in codes else sorted(left_over(job.temporary, job.orphans_before))
    return Result(
        wrong=wrong + [f"left: {line}" for line in left],
        seconds=None if next_step is None else round(next_step, 1),
        record=_first_lines(records(job)),
        left=left,
    )


def _first_lines(found: list[str]) -> str:
    return " / ".join(record.splitlines()[0] for record in found)


def _steps(run: Path) -> list[int]:
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [each["step"] for each in map(json.loads, lines) if "reward" in each]
