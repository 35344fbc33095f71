"""Engine and trainer compute the same, step after step, after large weight changes, in every layout of one node.

Real ranks with ZeRO-3 and real engines, in float32, with buckets much smaller than the model: where a weight sync that
reuses its buffer too early goes wrong without a word. Two nodes are in `test_two_nodes.py`.
"""

from pathlib import Path

import pytest

from tests.support.finished import completions_by_engine, finish_on_policy, lines_of
from tests.support.launching import start_tiny_job, start_tiny_job_by_torchrun
from tests.support.tiny_models import save_tiny_model


@pytest.fixture
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return save_tiny_model(request.param, tmp_path / request.param)


@pytest.mark.parametrize("model", ["gemma2-tied", pytest.param("qwen2-tied", marks=pytest.mark.long)], indirect=True)
def test_weight_sync_with_tied_head_and_tp_2_stays_on_policy(model: Path, tmp_path: Path) -> None:
    """The first one's head is no module. Without NCCL, asked for by name."""
    config = {"vllm_tensor_parallel_size": 2, "ddp_backend": "gloo", "vllm_sync_backend": "shm"}
    job = start_tiny_job(model, tmp_path / "out", config=config)
    finish_on_policy(job)
    assert [job.rank(rank)["backend"] for rank in (0, 1)] == ["gloo", "gloo"]


@pytest.mark.long
@pytest.mark.parametrize("model", ["glm4-moe"], indirect=True)
def test_weight_sync_with_experts_and_router_bias_stays_on_policy(model: Path, tmp_path: Path) -> None:
    """The bias, a buffer, is large enough to choose other experts; two workers load their parts of all experts."""
    config = {"vllm_tensor_parallel_size": 2, "max_steps": 5}
    finish_on_policy(start_tiny_job(model, tmp_path / "out", config=config), num_steps=5)


@pytest.mark.long
@pytest.mark.parametrize("model", ["phi3-fused"], indirect=True)
def test_two_engines_under_ddp_with_fused_projections_stay_on_policy(model: Path, tmp_path: Path) -> None:
    job = start_tiny_job_by_torchrun(model, tmp_path / "out", config={"vllm_engines_per_node": 2}, zero3=False)
    finish_on_policy(job)
    # 2 ranks x 8 completions are 4 groups of 4: both engines get two each time
    assert completions_by_engine(job, 0) == [[8, 8]] * 3
    for rank in (0, 1):  # in order: TRL scores a completion against the prompt of its row
        for step in lines_of(job, f"samples-{rank}.jsonl"):
            assert len(step["prompts"]) == len(step["completion_ids"]) == 8
            assert step["prompts"][:4] == [step["prompts"][0]] * 4
