"""The push's own gather of ZeRO-3 shards against DeepSpeed's, element by element, on real ranks over gloo."""

import json
from pathlib import Path

import pytest

from grpo.weights.buckets import NUM_BUFFERS
from tests.launching import ROOT, start, torchrun_command

JOB = ROOT / "tests" / "jobs" / "push_gather_job.py"
NONE_PERSISTENT = {"stage3_param_persistence_threshold": 0}
SOME_PERSISTENT = {"stage3_param_persistence_threshold": 1000}  # norms and biases


def cases(ranks: int) -> dict[str, dict]:
    last = ranks - 1
    return {
        "float32": {"dtype": "float32", "wire": "bfloat16", "zero": NONE_PERSISTENT, "receivers": [0]},
        "persistent": {"dtype": "float32", "wire": "bfloat16", "zero": SOME_PERSISTENT, "receivers": [0, last]},
        "no cast": {"dtype": "float32", "wire": "float32", "zero": SOME_PERSISTENT, "receivers": [last]},
        "bfloat16": {"dtype": "bfloat16", "wire": "bfloat16", "zero": SOME_PERSISTENT, "receivers": [0]},
        "offloaded": {
            "dtype": "float32",
            "wire": "bfloat16",
            "zero": {**SOME_PERSISTENT, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}},
            "receivers": [0],
        },
        "experts": {
            "family": "qwen3-moe",
            "dtype": "float32",
            "wire": "bfloat16",
            "zero": SOME_PERSISTENT,
            "receivers": [0],
        },
    }


@pytest.mark.parametrize("ranks", [2, 3])
def test_own_gather_is_deepspeeds(ranks: int, tmp_path: Path) -> None:
    wanted = cases(ranks)
    settings = tmp_path / "settings.json"
    settings.write_text(json.dumps({"out": str(tmp_path), "cases": wanted, "layers": 24}))
    job = start(
        lambda _: torchrun_command([str(JOB), str(settings)], ranks=ranks),
        tmp_path / "out",
        env={"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )
    try:
        assert job.wait(300) == [0], job.fail("the job did not finish")
        found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(ranks)]
    finally:
        job.end()

    for name, case in wanted.items():
        for rank, results in enumerate(found):
            result = results[name]
            assert result["different"] == [], f"{name}, rank {rank}"
            assert (result["compared"] > 100_000) == (rank in case["receivers"]), f"{name}, rank {rank}: {result}"
            assert result["own"] == result["parameters"], f"{name}: some went through DeepSpeed's gather"
            assert result["detected"].pop("as it is")
            assert not any(result["detected"].values()), f"{name}: {result['detected']}"
            assert len(result["detected"]) == 6
            assert (result["persistent"] > 0) == (case["zero"] is not NONE_PERSISTENT)
    # A model's sizes are even: two ranks need no padding, three nearly always.
    assert all((found[0][name]["padded"] > 20) == (ranks == 3) for name in wanted)

    for rank, results in enumerate(found):
        broken = results["broken wire"]
        assert broken["walked"] == 2 * broken["buckets"] > 20  # by every rank, so that none is left in a gather
        first, second = broken["errors"]
        assert ("NCCL error" in first, "ended by an earlier failure" in second) == (rank == 0, rank == 0), broken
        assert (broken["fresh error"], broken["different"]) == ("", [])
        assert (broken["arrived"] > 20) == (rank == 0)

    for rank, results in enumerate(found):
        memory = results["memory"]
        assert memory["model"] > 10 * memory["bucket"]
        # Rank 0: packed buffers, and the others' shards while it puts a bucket together. The others: a cast shard.
        # Some more is the transport's and the allocator's; it does not grow with the model.
        buckets = 1 + NUM_BUFFERS if rank == 0 else 1 / ranks
        assert memory["grown"] < buckets * memory["bucket"] + 4 * 2**20, f"rank {rank}: {memory}"
    assert found[0]["memory"]["grown"] > NUM_BUFFERS * found[0]["memory"]["bucket"]  # it is measured


def test_shards_travel_both_ways_and_leave_no_memory_behind(tmp_path: Path) -> None:
    job = start(
        lambda _: torchrun_command([str(ROOT / "tests" / "jobs" / "gather_ways_job.py")], ranks=3),
        tmp_path / "out",
        env={"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )
    try:
        assert job.wait(300) == [0], job.fail("a rank found other weights, or kept the memory")
    finally:
        job.end()
