"""Two nodes with an engine each: every node for itself, balanced between them, and sampling ahead."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract import CONTRACT_S, STARTUP_S, expect_the_contract, inner_process, the_record
from tests.finished import MAX_GAP, completions_by_engine, finish, finish_on_policy, lines_of
from tests.launching import ROOT, Job, accelerate_command, free_port, kill, start, start_tiny_job, tiny_job_script
from tests.tiny_models import save_tiny_model

STRADDLING = {"per_device_train_batch_size": 6}  # groups of 4: the second one lies on both nodes


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama-untied", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def unbalanced(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, list[dict]]:
    """Three steps in which every node samples for itself: the job, which has ended, and what it logged."""
    out = tmp_path_factory.mktemp("unbalanced")
    job = start_tiny_job(model, out, nodes=2, ranks_per_node=1, config=STRADDLING)
    return job, finish_on_policy(job)


def test_a_group_straddles_both_nodes(unbalanced: tuple[Job, list[dict]]) -> None:
    job, steps = unbalanced
    samples = [lines_of(job, f"samples-{rank}.jsonl") for rank in (0, 1)]
    for line, first, second in zip(steps, *samples, strict=True):
        assert first["prompts"][4:] == second["prompts"][:2]
        straddling = [tuple(ids) for ids in first["completion_ids"][4:] + second["completion_ids"][:2]]
        assert len(set(straddling)) == 4, f"two samples of one group are the same: {straddling}"
        rewards = [sum(ids) % 7 for ids in first["completion_ids"] + second["completion_ids"]]
        assert line["reward"] == pytest.approx(sum(rewards) / len(rewards), abs=1e-5)
    logs = {path.name for path in (job.output_dir / "logs").iterdir()}
    assert logs == {f"engine-node{node}-0.attempt-0.log" for node in (0, 1)}


@pytest.fixture(scope="module")
def balanced(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Job, str]]:
    """`vllm_balance_nodes` where one node seems to be five times as fast; its engine dies in the fourth generation.

    The job, and its output after everybody has gone.
    """
    out = tmp_path_factory.mktemp("balanced")
    config = {**STRADDLING, "vllm_balance_nodes": True, "max_steps": 4}
    script = tiny_job_script(model, out, config=config, hold="generation-3")
    script[0] = str(ROOT / "tests" / "jobs" / "balance_job.py")
    job = start(accelerate_command(script, nodes=2, ranks_per_node=1, port=free_port()), out, nodes=2)
    try:
        job.wait_for("at-generation-3", STARTUP_S)
        everyone = job.processes()
        (host,) = job.rank(0)["hosts"]
        inner_process(host).suspend()  # so that it has not answered yet when it dies
        (out / "go-on").touch()
        for rank in (0, 1):
            job.wait_for(f"at-waits-3-{rank}", CONTRACT_S)
        kill(host)  # it samples for the other node, too
        yield job, expect_the_contract(job, time.monotonic(), everyone)
    finally:
        job.end()


def test_balanced_completions_come_back_to_their_rows_and_are_the_same_as_without(
    unbalanced: tuple[Job, list[dict]], balanced: tuple[Job, str]
) -> None:
    job, _ = balanced
    for line in job.metrics():
        assert line["sampling/sampling_logp_difference/max"] < MAX_GAP, job.fail(str(line))
    for rank in (0, 1):
        name = f"samples-{rank}.jsonl"
        assert lines_of(job, name) == lines_of(unbalanced[0], name)
        assert len(lines_of(job, name)) == 3
        # Of 2 and 4 completions, the slow node's requests, the second is sampled by the fast one.
        assert lines_of(job, f"moves-{rank}.jsonl") == [[{"source": 1, "target": 0, "requests": [1]}]] * 4
    sent = [completions_by_engine(job, rank)[:3] for rank in (0, 1)]  # without the one that it dies in
    assert sent == [[[10]] * 3, [[2]] * 3]


def test_a_dead_engine_on_one_node_ends_both(balanced: tuple[Job, str]) -> None:
    job, output = balanced
    the_record(job, output, says=["node 0", "generate", "was killed by signal 9"])


def test_two_nodes_sample_ahead_with_an_evaluation_in_between(tiny_model: Path, tmp_path: Path) -> None:
    """With a learning rate of 0 old completions are as likely as new ones: a row at a wrong place would show."""
    config = {
        **STRADDLING,
        "generation_lookahead": 1,
        "learning_rate": 0.0,
        "max_steps": 5,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "per_device_eval_batch_size": 4,
    }
    job = start_tiny_job(tiny_model, tmp_path / "out", nodes=2, ranks_per_node=1, config=config)
    steps = finish(job)
    assert [line["rollout/policy_lag"] for line in steps] == [0, 1, 1, 1, 1], job.fail(str(steps))
    assert [line["rollout/policy_lag_steps"] for line in steps] == [0, 1, 1, 1, 1]
    for line in steps:
        assert line["sampling/sampling_logp_difference/max"] < MAX_GAP, job.fail(str(line))
        assert line["sampling/importance_sampling_ratio/clipped_share"] == 0
        assert line["engine/policy_version"] == max(line["step"] - 2, 0)
    for line in steps[1:]:
        assert 0 <= line["rollout/wait_share_max"] <= 1
        assert 0 <= line["engine/idle_share_max"] <= 1
    evaluations = [line for line in map(json.loads, (job.output_dir / "metrics.jsonl").open()) if "eval_reward" in line]
    assert [line["step"] for line in evaluations] == [2, 4, 5]
    for line in evaluations:
        assert line["eval_rollout/policy_lag"] == 0
