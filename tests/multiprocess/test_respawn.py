"""Engines that are killed under a training job, and the job that goes on as if nothing had been."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.finished import MAX_GAP, finish, finish_on_policy, lines_of
from tests.launching import Job, start_tiny_job

STEPS = 5
Strikes = Sequence[tuple[str, int, str]]
"""Where, after how many steps, and what is killed."""


@pytest.fixture(scope="module")
def undisturbed(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    job = start_tiny_job(tiny_model, tmp_path_factory.mktemp("undisturbed"), config={"max_steps": STEPS})
    finish_on_policy(job, STEPS)
    return job


def respawns(job: Job) -> list[str]:
    return json.loads((job.output_dir / "run_state.json").read_text())["respawns"]


def test_the_same_samples_whatever_dies_and_when(undisturbed: Job, tiny_model: Path, tmp_path: Path) -> None:
    """Two ranks over ZeRO-3: what is sampled after a step shows the weights that the step has made."""
    strikes: Strikes = [("generate", 1, "host"), ("update_weights", 2, "inner"), ("reward", 3, "host")]
    job = start_tiny_job(tiny_model, tmp_path / "out", config={"max_steps": STEPS}, strikes=strikes)
    steps = finish(job)
    for rank in (0, 1):
        assert lines_of(job, f"samples-{rank}.jsonl") == lines_of(undisturbed, f"samples-{rank}.jsonl")
    assert [line["engine/respawns"] for line in steps] == [0, 1, 2, 2, 3], job.fail(str(steps))
    *repeats, last = [line["push/repeats"] for line in steps]
    assert repeats == [0, 0, 1, 1]
    assert last in (1, 2)  # the push may have begun before the death was seen
    assert [line["engine/requests_reissued"] > 0 for line in steps] == [False, True, False, False, False]
    assert {line["push/logprob_gap_max"] < MAX_GAP for line in steps if "push/logprob_gap_max" in line} == {True}
    told = respawns(job)
    for line, (step, phase, how) in zip(
        told, [(1, "generate", "signal 9"), (2, "push", "engine process died"), (4, "", "signal 9")], strict=True
    ):
        assert line.startswith(f"after step {step}: engine 0 of node 0 ("), told
        assert f"died in phase '{phase}" in line, told
        assert how in line, told


@pytest.mark.long
def test_one_of_two_engines_dies_while_it_samples_ahead(tiny_model: Path, tmp_path: Path) -> None:
    """The other one takes what it owed; it comes back with the next push."""
    config = {"max_steps": 4, "generation_lookahead": 1, "vllm_engines_per_node": 2, "vllm_standby": True}
    job = start_tiny_job(tiny_model, tmp_path / "out", config=config, strikes=[("generate", 1, "inner")])
    steps = finish(job)
    assert steps[-1]["engine/respawns"] == 1, job.fail(str(steps))
    assert sum(line["engine/requests_reissued"] for line in steps) > 0
    assert [line["rollout/policy_lag"] for line in steps] == [0, 1, 1, 1]
    assert [line["engine/policy_version"] for line in steps] == [0, 0, 1, 2]
    assert len(respawns(job)) == 1
