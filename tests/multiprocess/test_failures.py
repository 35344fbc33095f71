"""Whatever dies, everybody is gone within 30 s with one record, and nothing stays behind.

A rank's death beside a collective needs no engine (`echo_job.py`), an engine's no ranks (`test_deaths.py`); engines
that come back, and one that may not, are in `test_two_nodes.py`, as is a reward that raises; deaths of ranks and
launchers of the whole stack are cells of `tests/faults/matrix.py`.

Here: two ranks over gloo, without engines: one dies or fails, the other one sits in a collective.
"""

import time
from pathlib import Path

import pytest

from tests.support.contract import STARTUP_S, expect_the_contract, the_record, until_it_ends
from tests.support.launching import ROOT, Job, kill, start, torchrun_command


def start_echo_job(out: Path, *, rank: int, phase: str, fails: bool = False) -> Job:
    script = [str(ROOT / "tests" / "jobs" / "echo_job.py"), str(out), str(rank), phase, *(["fails"] if fails else [])]
    return start(lambda _: torchrun_command(script), out, env={"PYTHONPATH": str(ROOT)})


@pytest.mark.parametrize(("rank", "phase"), [(0, "generate"), (1, "sync")])
def test_kill_of_rank_ends_other_rank_in_collective_with_one_record(rank: int, phase: str, tmp_path: Path) -> None:
    job = start_echo_job(tmp_path / "out", rank=rank, phase=phase)
    try:
        pids = [int(job.wait_for(f"at-{phase}-{each}", STARTUP_S).read_text()) for each in (0, 1)]
        everyone = job.processes()
        kill(pids[rank])
        output = expect_the_contract(job, time.monotonic(), everyone)
    finally:
        job.end()
    the_record(job, output, says=[f"rank {rank}", phase, "[GRPO-601]"], ranks=[1 - rank])


def test_failure_of_one_rank_in_phase_raises_on_all_ranks(tmp_path: Path) -> None:
    job = start_echo_job(tmp_path / "out", rank=0, phase="engine start", fails=True)
    try:
        output = until_it_ends(job, STARTUP_S)
    finally:
        job.end()
    for rank in (0, 1):
        said = (tmp_path / "out" / f"raised-{rank}").read_text()
        assert said.startswith("JobFailed: "), said
        for part in ("rank 0", "engine start", "no-such-type"):
            assert part in said
    assert "no-such-type" in output
