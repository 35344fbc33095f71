"""The weight sync's own gather of ZeRO-3 shards against DeepSpeed's, element by element, on real ranks over gloo."""

import json

import pytest

from grpo.weights.buckets import NUM_BUFFERS
from tests.support.launching import ROOT, start, torchrun_command

RANKS = 3
JOB = ROOT / "tests" / "jobs" / "sync_gather_job.py"
NONE_PERSISTENT = {"stage3_param_persistence_threshold": 0}
SOME_PERSISTENT = {"stage3_param_persistence_threshold": 1000}  # norms and biases


_WANTED: dict[str, dict] = {
    "float32": {"dtype": "float32", "wire": "bfloat16", "zero": NONE_PERSISTENT, "receivers": [0]},
    "persistent": {"dtype": "float32", "wire": "bfloat16", "zero": SOME_PERSISTENT, "receivers": [0, RANKS - 1]},
    "no cast": {"dtype": "float32", "wire": "float32", "zero": SOME_PERSISTENT, "receivers": [RANKS - 1]},
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
    "routers": {
        "family": "glm4-moe",
        "dtype": "float32",
        "wire": "bfloat16",
        "zero": SOME_PERSISTENT,
        "receivers": [0],
        "float32": [".mlp.gate."],  # a weight and a bias, which is a buffer, in each of two layers
        "whole": True,
        "by_deepspeed": 2,
    },
}
CASES = {name: {"float32": [], "whole": False, "by_deepspeed": 0, **case} for name, case in _WANTED.items()}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What each rank of the one job found."""
    folder = tmp_path_factory.mktemp("gather")
    settings = folder / "settings.json"
    settings.write_text(json.dumps({"out": str(folder), "cases": CASES, "layers": 24}))
    job = start(
        lambda _: torchrun_command([str(JOB), str(settings)], ranks=RANKS),
        folder,
        env={"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )
    try:
        assert job.wait(300) == [0], job.fail("the job did not finish")
    finally:
        job.end()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


def test_sync_gather_matches_deepspeed_gather(found: list[dict]) -> None:
    for name, case in CASES.items():
        for rank, results in enumerate(found):
            result = results[name]
            assert result["different"] == [], f"{name}, rank {rank}"
            assert (result["compared"] > 100_000) == (rank in case["receivers"]), f"{name}, rank {rank}: {result}"
            by_deepspeed = result["parameters"] - result["own"]
            assert by_deepspeed == case["by_deepspeed"], f"{name}: {by_deepspeed} went through DeepSpeed's gather"
            plain = [what for what, is_plain in result["detected"].items() if is_plain]
            assert (plain, len(result["detected"])) == (["as it is"], 1 + 6), name
            assert (result["persistent"] > 0) == (case["zero"] is not NONE_PERSISTENT)
    assert all(found[0][name]["padded"] > 20 for name in CASES)  # three ranks nearly always need it


def test_sync_gather_with_broken_wire_walks_all_buckets_on_all_ranks(found: list[dict]) -> None:
    for rank, results in enumerate(found):
        broken = results["broken wire"]
        assert broken["walked"] == 2 * broken["buckets"] > 20  # by every rank, so that none is left in a gather
        first, second = broken["errors"]
        assert ("NCCL error" in first, "ended by an earlier failure" in second) == (rank == 0, rank == 0), broken
        assert (broken["fresh error"], broken["different"]) == ("", [])
        assert (broken["arrived"] > 20) == (rank == 0)


def test_weight_sync_memory_stays_within_buckets(found: list[dict]) -> None:
    for rank, results in enumerate(found):
        memory = results["memory"]
        assert memory["model"] > 10 * memory["bucket"]
        # Rank 0: packed buffers, and the others' shards while it puts a bucket together. The others: a cast shard.
        # Some more is the transport's and the allocator's; it does not grow with the model.
        buckets = 1 + NUM_BUFFERS if rank == 0 else 1 / RANKS
        assert memory["grown"] < buckets * memory["bucket"] + 4 * 2**20, f"rank {rank}: {memory}"
    assert found[0]["memory"]["grown"] > NUM_BUFFERS * found[0]["memory"]["bucket"]  # it is measured


def test_shard_gather_in_both_ways_is_exact_and_frees_memory(found: list[dict]) -> None:
    assert [rank["ways"] for rank in found] == [4] * RANKS  # two ways, to one receiver and to two


def test_writes_to_frozen_parameters_are_detected_by_shard_holders(found: list[dict]) -> None:
    norm = ["model.norm.weight"]
    for rank, results in enumerate(found):
        seen = {"a step": [], "by a gather": norm, "to a shard": norm if rank == 1 else []}
        assert results["frozen"] == seen, f"rank {rank}"


def test_padding_verifier_with_one_differing_rank_corrects_all_ranks(found: list[dict]) -> None:
    """In training, too, whose forwards ZeRO-3 gathers ahead in the order that it has seen."""
    for rank, results in enumerate(found):
        changed = results["padding"]
        assert changed["before"] > 0.1, f"rank {rank}: the fault is TRL's own"
        assert max(changed["after 1"], changed["after 2"]) < 1e-5, f"rank {rank}: {changed}"
