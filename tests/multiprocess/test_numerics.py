"""Engine and trainer compute the same, step after step, after large weight changes, in every layout.

Real ranks with ZeRO-3 and real engines, in float32, with buckets much smaller than the model: where a push that reuses
its buffer too early goes wrong without a word.
"""

import json
from pathlib import Path

import pytest

from tests.launching import Job, start_tiny_job, start_tiny_job_by_torchrun
from tests.tiny_models import save_tiny_model

JOB_S = 360
MAX_GAP = 1e-3


def run(job: Job, num_steps: int = 3) -> list[dict]:
    try:
        codes = job.wait(JOB_S)
        assert codes == [0] * len(codes), job.fail(f"launchers exited {codes}")
        steps = job.metrics()
        assert not job.traces(), job.fail("left something behind")
    finally:
        job.end()
    assert [line["step"] for line in steps] == [*range(1, num_steps + 1)], job.fail("not every step was logged")
    assert job.output().count("the first push is proved: ") == 1, job.fail("the first proof is not told")
    for line in steps:
        assert line["push/logprob_gap_limit"] == 1e-4  # a tenth of float32's, once the first gap is known
        assert line["sampling/sampling_logp_difference/max"] < MAX_GAP, job.fail(str(line))
        assert line["push/logprob_gap_max"] < MAX_GAP, job.fail(str(line))
        assert line["engine/policy_version"] == line["step"] - 1
        for name in ("rollout/generate_s", "rollout/tokens_per_s_min", "push/send_s", "push/bytes"):
            assert line[name] > 0, job.fail(f"{name} is missing or 0 in {line}")
    return steps


def samples(job: Job, rank: int) -> list[dict]:
    lines = (job.output_dir / "ranks" / f"samples-{rank}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return save_tiny_model(request.param, tmp_path / request.param)


@pytest.mark.parametrize("model", ["gemma2-tied"], indirect=True)
def test_tied_head_without_a_module(model: Path, tmp_path: Path) -> None:
    """Without NCCL, asked for by name."""
    job = start_tiny_job(model, tmp_path / "out", config={"ddp_backend": "gloo", "vllm_sync_backend": "shm"})
    run(job)
    assert [job.rank(rank)["backend"] for rank in (0, 1)] == ["gloo", "gloo"]


@pytest.mark.parametrize("model", ["qwen2-tied"], indirect=True)
def test_tied_head_with_tensor_parallel_2(model: Path, tmp_path: Path) -> None:
    run(start_tiny_job(model, tmp_path / "out", config={"vllm_tensor_parallel_size": 2}))


@pytest.mark.parametrize("model", ["glm4-moe"], indirect=True)
def test_experts_that_travel_at_once_and_a_router_with_a_bias(model: Path, tmp_path: Path) -> None:
    """The bias, a buffer, is large enough to choose other experts; two workers load their parts of all experts."""
    config = {"vllm_tensor_parallel_size": 2, "max_steps": 5}
    run(start_tiny_job(model, tmp_path / "out", config=config), num_steps=5)


@pytest.mark.parametrize("model", ["phi3-fused"], indirect=True)
def test_fused_projections_with_two_engines_on_a_node_under_ddp(model: Path, tmp_path: Path) -> None:
    job = start_tiny_job_by_torchrun(model, tmp_path / "out", config={"vllm_engines_per_node": 2}, zero3=False)
    run(job)
    requests = [json.loads(line) for line in (job.output_dir / "ranks" / "requests-0.jsonl").read_text().splitlines()]
    assert requests == [[8, 8]] * 3  # 2 ranks x 8 completions are 4 groups of 4: both engines get two each time
    for rank in (0, 1):  # in order: TRL scores a completion against the prompt of its row
        for step in samples(job, rank):
            assert len(step["prompts"]) == len(step["completion_ids"]) == 8
            assert step["prompts"][:4] == [step["prompts"][0]] * 4


@pytest.mark.parametrize("model", ["llama-untied"], indirect=True)
def test_two_nodes_with_a_group_straddling_both(model: Path, tmp_path: Path) -> None:
    job = start_tiny_job(model, tmp_path / "out", nodes=2, ranks_per_node=1, config={"per_device_train_batch_size": 6})
    steps = run(job)
    for line, first, second in zip(steps, samples(job, 0), samples(job, 1), strict=True):
        assert first["prompts"][4:] == second["prompts"][:2]  # groups of 4: the second one lies on both nodes
        straddling = [tuple(ids) for ids in first["completion_ids"][4:] + second["completion_ids"][:2]]
        assert len(set(straddling)) == 4, f"two samples of one group are the same: {straddling}"
        rewards = [sum(ids) % 7 for ids in first["completion_ids"] + second["completion_ids"]]
        assert line["reward"] == pytest.approx(sum(rewards) / len(rewards), abs=1e-5)
    logs = {path.name for path in (tmp_path / "out" / "logs").iterdir()}
    assert logs == {f"engine-node{node}-0.attempt-0.log" for node in (0, 1)}
