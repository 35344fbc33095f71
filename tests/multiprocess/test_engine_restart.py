"""A job under which engines are killed, and that is stopped and resumed before: it goes on as if nothing had been."""

import contextlib
import json
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.finished import JOB_S, MAX_GAP, finish, finish_on_policy, lines_of
from tests.support.launching import Job, kill, start_tiny_job, start_tiny_job_by_torchrun, wait_gone
from tests.support.tiny_models import save_tiny_model

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]  # three starts of the whole stack and of an engine
STEPS = 7
# Without NCCL, asked for by name; seven steps of the rate that others take three of would end among weights so large
# that two orders of adding up differ.
CONFIG = {"max_steps": STEPS, "ddp_backend": "gloo", "vllm_sync_backend": "shm", "learning_rate": 4e-3}
Strikes = Sequence[tuple[str, int, str]]
"""Where, after how many steps, and what is killed."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a tied head that is no module."""
    return save_tiny_model("gemma2-tied", tmp_path_factory.mktemp("model") / "gemma2")


@pytest.fixture(scope="module")
def undisturbed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Two ranks over ZeRO-3."""
    job = start_tiny_job_by_torchrun(model, tmp_path_factory.mktemp("undisturbed"), config=CONFIG)
    finish_on_policy(job, STEPS)
    return job


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """How the first attempt had ended, before the second one began."""

    folder: Path
    output: str
    state: dict


@pytest.fixture(scope="module")
def stopped(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    """The same, with SIGTERM to all, as `scancel` sends it, in the second generation."""
    out = tmp_path_factory.mktemp("stopped")
    longer = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "120"}
    job = start_tiny_job_by_torchrun(model, out, config=CONFIG, hold="generation-1", env=longer)
    try:
        job.wait_for("at-generation-1", JOB_S)
        everyone = job.processes()
        for process in everyone:
            process.send_signal(signal.SIGTERM)
        with contextlib.suppress(ProcessLookupError):  # vLLM may take the signal calmly and answer first, or end by it
            kill(job.rank(0)["hosts"][0])
        (out / "go-on").touch()
        job.wait(60)
        assert not wait_gone(everyone, 10), job.fail("left behind")
    finally:
        job.end()
    return Stopped(folder=out, output=job.output(), state=state_of(job))


@pytest.fixture(scope="module")
def resumed(model: Path, stopped: Stopped) -> Job:
    """The same folder, to the end; three engines die under it."""
    strikes: Strikes = [("generate", 3, "host"), ("update_weights", 4, "inner"), ("reward", 5, "host")]
    config = {**CONFIG, "resume_from_checkpoint": "auto"}
    job = start_tiny_job_by_torchrun(model, stopped.folder, config=config, strikes=strikes)
    finish(job)
    return job


def state_of(job: Job) -> dict:
    return json.loads((job.output_dir / "run_state.json").read_text())


def asked(job: Job, step: int) -> list:
    """What the engine was asked for before optimizer step `step`, over all attempts: prompts, counts and seeds."""
    return [line for line in lines_of(job, "asked-0.jsonl") if line["step"] == step]


def test_sigterm_to_all_processes_keeps_finished_steps(undisturbed: Job, stopped: Stopped, resumed: Job) -> None:
    """The same prompts and seeds again."""
    for job in (undisturbed, resumed):
        assert [job.rank(rank)["backend"] for rank in (0, 1)] == ["gloo", "gloo"]
    parts, state = stopped.folder, stopped.state
    assert (state["state"], state["step"], state["requeue"]) == ("stopped", 1, True), stopped.output
    assert state["why"] == "got SIGTERM"
    assert state["checkpoint"] == str(parts / "checkpoint-1")
    assert (parts / "checkpoint-1" / "complete.json").exists()
    assert "the job failed" not in stopped.output

    assert state_of(resumed)["attempt"] == 1
    assert {path.name for path in (parts / "logs").glob("engine-*")} == {
        f"engine-node0-0.attempt-{k}.log" for k in (0, 1)
    }
    wanted = asked(undisturbed, 1)
    everything = asked(resumed, 1)
    dropped, again = everything[: -len(wanted)], everything[-len(wanted) :]
    assert again == wanted
    assert dropped  # as far as it went
    assert dropped == wanted[: len(dropped)]
    assert asked(resumed, 2) == asked(undisturbed, 2)
    gaps = [line["sampling/sampling_logp_difference/max"] for line in resumed.metrics() if line["step"] > 1]
    assert len(gaps) == STEPS - 1
    assert max(gaps) < MAX_GAP
    assert not (parts / "stop").exists()


def test_samples_after_engine_deaths_and_resume_match_undisturbed_run(undisturbed: Job, resumed: Job) -> None:
    """What is sampled after a step shows the weights that the step has made; and the stop has left none out."""
    steps = resumed.metrics()
    assert [line["step"] for line in steps] == [*range(1, STEPS + 1)]
    for rank in (0, 1):
        assert lines_of(resumed, f"samples-{rank}.jsonl") == lines_of(undisturbed, f"samples-{rank}.jsonl")
    assert [line["engine/restarts"] for line in steps] == [0, 0, 0, 1, 2, 2, 3], resumed.fail(str(steps))
    *repeats, last = [line["weight_sync/repeats"] for line in steps]
    assert repeats == [0, 0, 0, 0, 1, 1]
    assert last in (1, 2)  # the weight sync may have begun before the death was seen
    reissued = [line["step"] for line in steps if line["engine/requests_reissued"] > 0]
    assert reissued == [4]
    assert {
        line["weight_sync/logprob_gap_max"] < MAX_GAP for line in steps if "weight_sync/logprob_gap_max" in line
    } == {True}
    reported = state_of(resumed)["restarts"]
    for line, (step, phase, how) in zip(
        reported, [(3, "generate", "signal 9"), (4, "sync", "[GRPO-405]"), (6, "", "signal 9")], strict=True
    ):
        assert line.startswith(f"after step {step}: engine 0 of node 0 ("), reported
        assert f"died in phase '{phase}" in line, reported
        assert how in line, reported


def test_death_of_one_of_two_engines_with_lookahead_reissues_requests(tiny_model: Path, tmp_path: Path) -> None:
    """The other one takes what it owed; it comes back with the next weight sync."""
    config = {"max_steps": 4, "generation_lookahead": 1, "vllm_engines_per_node": 2, "vllm_standby": True}
    job = start_tiny_job(tiny_model, tmp_path / "out", config=config, strikes=[("generate", 1, "inner")])
    steps = finish(job)
    assert steps[-1]["engine/restarts"] == 1, job.fail(str(steps))
    assert sum(line["engine/requests_reissued"] for line in steps) > 0
    assert [line["rollout/policy_lag"] for line in steps] == [0, 1, 1, 1]
    assert [line["engine/policy_version"] for line in steps] == [0, 0, 1, 2]
    assert len(state_of(job)["restarts"]) == 1
