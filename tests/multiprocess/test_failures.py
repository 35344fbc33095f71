"""Whatever dies, everybody is gone within 30 s with one record, and nothing stays behind.

Of the whole stack what only it shows: ranks in a push, in training or waiting for completions when something dies. A
rank's death beside a collective needs no engine (`echo_job.py`), an engine's no ranks (`tests/engine/test_deaths.py`);
an engine that dies while it samples, on one node of two, is in `test_two_nodes.py`.
"""

import time
from pathlib import Path

import pytest

from tests.contract import STARTUP_S, expect_the_contract, inner_process, the_record
from tests.launching import ROOT, Job, kill, start, start_tiny_job_by_torchrun, torchrun_command

LONG_GENERATION = {
    "max_completion_length": 3000,
    "vllm_max_model_length": 3100,
    "generation_kwargs": {"ignore_eos": True},
    "dataloader_num_workers": 2,
}
QUICK = {"dataloader_num_workers": 2}

# what to strike, in which phase, with which settings -> what the record must say
STRIKES = {
    "other-rank-in-generation": ("rank1", "generate", LONG_GENERATION, ["rank 1", "generate", "died without a word"]),
    "local-main-in-push": ("rank0", "push", QUICK, ["rank 0", "push", "died without a word"]),
    "host-in-push": ("host", "push", QUICK, ["rank 0", "push", "was killed by signal 9"]),
    "inner-while-training": ("inner", "train", {**QUICK, "generation_lookahead": 1}, ["rank 0", "engine process died"]),
}


@pytest.mark.parametrize("case", STRIKES)
def test_a_killed_process_ends_the_job_with_one_record(case: str, tiny_model: Path, tmp_path: Path) -> None:
    target, phase, config, record_parts = STRIKES[case]
    job = start_tiny_job_by_torchrun(tiny_model, tmp_path / "out", config=config, hold=phase)
    try:
        job.wait_for(f"at-{phase}", STARTUP_S)
        everyone = job.processes()
        assert len(everyone) > 5
        pid = {
            "rank0": lambda: job.rank(0)["pid"],
            "rank1": lambda: job.rank(1)["pid"],
            "host": lambda: job.rank(0)["hosts"][0],
            "inner": lambda: inner_process(job.rank(0)["hosts"][0]).pid,
        }[target]()
        kill(pid)
        output = expect_the_contract(job, time.monotonic(), everyone)
    finally:
        job.end()
    the_record(job, output, says=record_parts)


def until_it_ends(job: Job, timeout_s: float) -> str:
    """Of a job that ends by itself, with a failure: its output."""
    everyone = job.processes()
    deadline = time.monotonic() + timeout_s
    while any(launcher.poll() is None for launcher in job.launchers) and time.monotonic() < deadline:
        everyone = job.processes() or everyone
        time.sleep(0.2)
    return expect_the_contract(job, time.monotonic(), everyone)


def test_a_reward_that_raises_on_one_rank_raises_everywhere(tiny_model: Path, tmp_path: Path) -> None:
    job = start_tiny_job_by_torchrun(tiny_model, tmp_path / "out", config=QUICK, hold="reward-error")
    try:
        job.wait_for("ranks/0.json", STARTUP_S)
        output = until_it_ends(job, STARTUP_S)
    finally:
        job.end()
    for part in ("rank 1", "train", "went wrong", "the job failed on"):
        assert part in output, job.fail(f"no {part!r}")


# -- two ranks over gloo, without engines: one dies or fails, the other one sits in a collective ----------------------


def start_echo_job(out: Path, *, rank: int, phase: str, fails: bool = False) -> Job:
    script = [str(ROOT / "tests" / "jobs" / "echo_job.py"), str(out), str(rank), phase, *(["fails"] if fails else [])]
    return start(lambda _: torchrun_command(script), out, env={"PYTHONPATH": str(ROOT)}, builds_extension=False)


@pytest.mark.parametrize(("rank", "phase"), [(0, "generate"), (1, "push")])
def test_a_killed_rank_ends_the_others_out_of_a_collective(rank: int, phase: str, tmp_path: Path) -> None:
    job = start_echo_job(tmp_path / "out", rank=rank, phase=phase)
    try:
        pids = [int(job.wait_for(f"at-{phase}-{each}", STARTUP_S).read_text()) for each in (0, 1)]
        everyone = job.processes()
        kill(pids[rank])
        output = expect_the_contract(job, time.monotonic(), everyone)
    finally:
        job.end()
    the_record(job, output, says=[f"rank {rank}", phase, "died without a word"])


def test_what_one_rank_says_at_the_end_of_a_phase_raises_everywhere(tmp_path: Path) -> None:
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
