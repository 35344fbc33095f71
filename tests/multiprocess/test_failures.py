"""Whatever dies, everybody is gone within 30 s with one record, and nothing stays behind."""

import time
from pathlib import Path

import psutil
import pytest

from tests.launching import Job, kill, start_tiny_job_by_torchrun, wait_gone

STARTUP_S = 240
CONTRACT_S = 30

LONG_GENERATION = {
    "max_completion_length": 3000,
    "vllm_max_model_length": 3100,
    "generation_kwargs": {"ignore_eos": True},
    "dataloader_num_workers": 2,
}
QUICK = {"dataloader_num_workers": 2}


def inner_process(job: Job) -> int:
    """vLLM's engine process, a child of the host."""
    host = psutil.Process(job.rank(0)["hosts"][0])
    return next(child.pid for child in host.children() if "resource_tracker" not in " ".join(child.cmdline()))


def expect_the_contract(job: Job, event: float, everyone: list[psutil.Process]) -> str:
    """The launcher exits non-zero within the time, no process and no shared memory is left. The job's output."""
    codes = job.wait(CONTRACT_S - (time.monotonic() - event))
    left = wait_gone(everyone, max(0.1, CONTRACT_S - (time.monotonic() - event)))
    assert not left, job.fail(f"left behind: {[(p.pid, p.cmdline()) for p in left]}")
    assert all(code != 0 for code in codes), job.fail(f"launchers exited {codes}")
    left_behind = job.traces()
    assert not left_behind, job.fail(f"left behind: {left_behind}")
    return job.output()


# what to strike, in which phase, with which settings -> what the record must say
STRIKES = {
    "local-main-in-generation": ("rank0", "generate", LONG_GENERATION, ["rank 0", "generate", "died without a word"]),
    "other-rank-in-generation": ("rank1", "generate", LONG_GENERATION, ["rank 1", "generate", "died without a word"]),
    "host-in-generation": ("host", "generate", LONG_GENERATION, ["rank 0", "generate", "was killed by signal 9"]),
    "inner-in-generation": ("inner", "generate", LONG_GENERATION, ["rank 0", "generate", "engine process died"]),
    "local-main-in-push": ("rank0", "push", QUICK, ["rank 0", "push", "died without a word"]),
    "inner-in-push": ("inner", "push", QUICK, ["rank 0", "push", "engine process died"]),
    "host-in-push": ("host", "push", QUICK, ["rank 0", "push", "was killed by signal 9"]),
    "inner-while-training": ("inner", "train", {**QUICK, "generation_lookahead": 1}, ["rank 0", "engine process died"]),
    "other-rank-in-push": ("rank1", "push", QUICK, ["rank 1", "push", "died without a word"]),
}


@pytest.mark.parametrize("case", STRIKES)
def test_a_killed_process_ends_the_job_with_one_record(case: str, tiny_model: Path, tmp_path: Path) -> None:
    target, phase, config, record_parts = STRIKES[case]
    job = start_tiny_job_by_torchrun(tiny_model, tmp_path / "out", config=config, hold=phase)
    try:
        job.wait_for(f"at-{phase}", STARTUP_S)
        time.sleep(1.0)  # well inside the phase
        everyone = job.processes()
        assert len(everyone) > 5
        pid = {
            "rank0": lambda: job.rank(0)["pid"],
            "rank1": lambda: job.rank(1)["pid"],
            "host": lambda: job.rank(0)["hosts"][0],
            "inner": lambda: inner_process(job),
        }[target]()
        kill(pid)
        output = expect_the_contract(job, time.monotonic(), everyone)
    finally:
        job.end()
    records = {line.partition("the job failed on ")[2] for line in output.splitlines() if "the job failed on" in line}
    assert len(records) == 1, job.fail(f"not one record: {records}")
    for part in record_parts:
        assert part in next(iter(records)), job.fail(f"no {part!r} in {records}")


@pytest.mark.parametrize("target", ["host", "rank0"])
def test_a_kill_while_vllm_is_importing(target: str, tiny_model: Path, tmp_path: Path) -> None:
    job = start_tiny_job_by_torchrun(tiny_model, tmp_path / "out", config=QUICK, hold="importing")
    try:
        job.wait_for("at-importing", STARTUP_S)
        time.sleep(6.0)  # the host imports, or its engine process does
        everyone = job.processes()
        kill(job.rank("host")["pid"] if target == "host" else job.rank(0)["pid"])
        output = expect_the_contract(job, time.monotonic(), everyone)
    finally:
        job.end()
    assert "the job failed on" in output


@pytest.mark.parametrize(
    ("config", "hold", "record_parts"),
    [
        pytest.param(
            {"vllm_engine_kwargs": {"kv_cache_dtype": "no-such-type"}},
            "",
            ["rank 0", "start", "no-such-type"],
            id="engine-cannot-start",
        ),
        pytest.param(
            {**LONG_GENERATION, "vllm_generate_timeout": 2},
            "",
            ["generate", "after 2 s (vllm_generate_timeout)"],
            id="generation-past-its-deadline",
        ),
        pytest.param(QUICK, "reward-error", ["rank 1", "train", "went wrong"], id="reward-raises-on-one-rank"),
    ],
)
def test_a_failure_raises_everywhere(
    config: dict, hold: str, record_parts: list[str], tiny_model: Path, tmp_path: Path
) -> None:
    job = start_tiny_job_by_torchrun(tiny_model, tmp_path / "out", config=config, hold=hold)
    try:
        job.wait_for("ranks/0.json", STARTUP_S)
        everyone: list[psutil.Process] = []
        deadline = time.monotonic() + STARTUP_S
        while any(launcher.poll() is None for launcher in job.launchers) and time.monotonic() < deadline:
            everyone = job.processes() or everyone
            time.sleep(0.2)
        output = expect_the_contract(job, time.monotonic(), everyone)
    finally:
        job.end()
    for part in record_parts:
        assert part in output, job.fail(f"no {part!r}")
    assert "JobFailed" in output or "EngineError" in output
