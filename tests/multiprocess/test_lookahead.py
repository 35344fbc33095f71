"""Sampling ahead with real engines."""

import json
from pathlib import Path

from tests.launching import start_tiny_job

JOB_S = 360


def test_two_nodes_sample_ahead_with_an_evaluation_in_between(tiny_model: Path, tmp_path: Path) -> None:
    """With a learning rate of 0 old completions are as likely as new ones: a row at a wrong place would show."""
    config = {
        "generation_lookahead": 1,
        "learning_rate": 0.0,
        "max_steps": 5,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "per_device_train_batch_size": 6,  # groups of 4: one lies on both nodes
        "per_device_eval_batch_size": 4,
    }
    job = start_tiny_job(tiny_model, tmp_path / "out", nodes=2, ranks_per_node=1, config=config)
    try:
        codes = job.wait(JOB_S)
        assert codes == [0, 0], job.fail(f"launchers exited {codes}")
        assert not job.traces(), job.fail("left something behind")
        lines = [json.loads(line) for line in (job.output_dir / "metrics.jsonl").read_text().splitlines()]
    finally:
        job.end()
    steps = [line for line in lines if "reward" in line]
    assert [line["rollout/policy_lag"] for line in steps] == [0, 1, 1, 1, 1], job.fail(str(steps))
    assert [line["rollout/policy_lag_steps"] for line in steps] == [0, 1, 1, 1, 1]
    evaluations = [line for line in lines if "eval_reward" in line]
    assert [line["step"] for line in evaluations] == [2, 4, 5]
    for line in steps:
        assert line["sampling/sampling_logp_difference/max"] < 1e-3, job.fail(str(line))
        assert line["sampling/importance_sampling_ratio/clipped_share"] == 0
        assert line["engine/policy_version"] == max(line["step"] - 2, 0)
    for line in steps[1:]:
        assert 0 <= line["rollout/wait_share_max"] <= 1
        assert 0 <= line["engine/idle_share_max"] <= 1
    for line in evaluations:
        assert line["eval_rollout/policy_lag"] == 0
