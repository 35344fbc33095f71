"""The advice from sizes and lengths, against numbers worked out by hand."""

from types import SimpleNamespace
from typing import Any

import pytest

from grpo.ops import MOST_AHEAD
from grpo.ops.plan.speed import MEAN_LENGTH, DepthAdvice, best_depth, best_reserved, generate_s
from tests.support.launching import ROOT
from tests.support.planned_cluster import Cluster

PARAMETERS = 8_030_261_248
MEAN_TOKENS = 512 + MEAN_LENGTH * 1024
ATTENTION = 2 * 32 * 32 * 128 * MEAN_TOKENS  # layers, heads, their size, tokens
ONE_NODE = ROOT / "configs" / "1node.yaml"


def advice(cluster: Cluster, *words: str, **settings: Any) -> dict[str, Any]:
    return cluster.read("--config_file", ONE_NODE, *words, "--config", cluster.training(**settings))["advice"]


def test_advice_seconds_match_hand_calculation(cluster: Cluster) -> None:
    """224 completions of 1024 tokens behind 512 of a prompt: all at once on one engine."""
    found = advice(cluster)
    kv = 2 * 32 * 8 * 128 * 2
    token_s = (2 * PARAMETERS + 224 * kv * 1024) / (2e12 * 0.6)
    assert token_s > 2 * PARAMETERS * 224 / (312e12 * 0.5), "memory is what it waits for"
    assert found["generate_s"] == pytest.approx(1024 * token_s)
    operations = 224 * MEAN_TOKENS * (3 + 1 + 1) * (2 * PARAMETERS + ATTENTION)  # checkpointing; old log-probabilities
    assert found["train_s"] == pytest.approx(operations / (7 * 312e12 * 0.35))
    assert (found["gpus_per_node"], found["reserved"], found["overlapped"]) == (8, 1, False)


def test_train_seconds_with_engine_logprobs_save_one_pass(cluster: Cluster) -> None:
    both = [advice(cluster, old_logprobs=which)["train_s"] for which in ("trainer", "engine")]
    assert both[1] == pytest.approx(both[0] * 4 / 5)


def test_advice_seconds_scale_with_gpu_speed_flags(cluster: Cluster) -> None:
    slow, fast = advice(cluster), advice(cluster, "--gpu-tflops", "624", "--gpu-tbps", "4")
    assert fast["train_s"] == pytest.approx(slow["train_s"] / 2)
    assert fast["generate_s"] == pytest.approx(slow["generate_s"] / 2)


def test_generate_seconds_with_fast_memory_are_compute_bound(cluster: Cluster) -> None:
    found = advice(cluster, "--gpu-tbps", "1000")
    assert found["generate_s"] == pytest.approx(1024 * 2 * PARAMETERS * 224 / (312e12 * 0.5))


def test_generate_seconds_with_few_sequences_grow_in_waves(cluster: Cluster) -> None:
    few = advice(cluster, vllm_engine_kwargs={"max_num_seqs": 56})
    assert few["generate_s"] == pytest.approx(4 * advice(cluster, "--gpu-tbps", "2")["generate_s"], rel=0.6)
    assert few["generate_s"] > 1.5 * advice(cluster)["generate_s"]


def test_advice_with_long_completions_reserves_more_gpus(cluster: Cluster) -> None:
    long = {"max_completion_length": 15360, "vllm_max_model_length": 16384, "per_device_train_batch_size": 1}
    found = advice(cluster, gradient_accumulation_steps=32, generation_lookahead=1, **long)
    assert found["reserve"] > 1
    now, then = (max(found[f"{when}generate_s"], found[f"{when}train_s"]) for when in ("", "reserve_"))
    assert then < 0.8 * now
    training = cluster.training(gradient_accumulation_steps=32, generation_lookahead=1, **long)
    _, out = cluster.plan("--config_file", ONE_NODE, "--config", training)
    line = next(line for line in out.splitlines() if line.startswith("advice, by estimate: "))
    assert line.startswith(f"advice, by estimate: reserve {found['reserve']} of 8 GPUs instead of 1: ")
    assert " of sampling beside " in line
    assert " would become " in line


def seconds_of(lookahead: int, max_num_seqs: int) -> float:
    """Of a batch of 224 completions that one engine samples."""
    job: Any = SimpleNamespace(
        args=SimpleNamespace(max_completion_length=1024, vllm_tensor_parallel_size=1),
        batch=SimpleNamespace(node_completions=(224,), node_samples=(224,), sequence_tokens=1536),
        shape=SimpleNamespace(engine_parameters=PARAMETERS, parameters_read=lambda tokens: PARAMETERS),
        hardware=SimpleNamespace(tbps=2.0, tflops=312.0),
    )
    engine: Any = SimpleNamespace(
        sequences_at_once=1000, max_num_seqs=max_num_seqs, weights_bytes=2 * PARAMETERS, kv_bytes_per_token=131072
    )
    return generate_s(job, engine, engines=1, lookahead=lookahead)


def test_generate_s_with_lookahead_divides_longest_completion() -> None:
    """With 4 and completions of a quarter of the longest in the mean, as many are sampled at any time as with 1."""
    assert seconds_of(4, 1000) == pytest.approx(seconds_of(1, 1000) / 4)
    assert seconds_of(2, 1000) < seconds_of(1, 1000) / 2  # half as many at any time
    assert seconds_of(8, 56) == pytest.approx(seconds_of(4, 56))  # every place is taken: more batches only wait


def test_advice_combines_lookahead_and_reserved_gpus(cluster: Cluster) -> None:
    long = {"max_completion_length": 15360, "vllm_max_model_length": 16384, "per_device_train_batch_size": 1}
    found = advice(cluster, gradient_accumulation_steps=32, generation_lookahead=1, **long)
    deeper = found["deeper"]
    assert 2 <= deeper["lookahead"] <= MOST_AHEAD
    assert deeper["reserve"] < found["reserve"]
    assert deeper["step_s"] < 0.7 * max(found["reserve_generate_s"], found["reserve_train_s"])
    training = cluster.training(gradient_accumulation_steps=32, generation_lookahead=1, **long)
    _, out = cluster.plan("--config_file", ONE_NODE, "--config", training)
    line = next(line for line in out.splitlines() if line.startswith("advice, by estimate: "))
    assert f"; with generation_lookahead {deeper['lookahead']} reserve {deeper['reserve']}: " in line


def test_advice_with_tp2_engines_reserves_whole_engines(cluster: Cluster) -> None:
    training = cluster.training(vllm_tensor_parallel_size=2)
    found = cluster.read("--config_file", ROOT / "configs" / "4node_tp2.yaml", "--config", training)["advice"]
    assert found["reserved"] == 2
    assert found["reserve"] % 2 == 0


def test_advice_without_gpus_or_with_uneven_nodes_is_none(cluster: Cluster) -> None:
    assert cluster.read("--config_file", ROOT / "configs" / "cpu.yaml")["advice"] is None
    uneven = cluster.read(
        "--config_file", cluster.accelerate(4, 24), "--gpus-per-node", "8,8,7,8", "--config", cluster.training()
    )
    assert uneven["advice"] is None


def test_plan_with_zero_gpu_tflops_exits_2(cluster: Cluster) -> None:
    with pytest.raises(SystemExit) as caught:
        cluster.plan("--num_processes", "7", "--gpu-tflops", "0")
    assert caught.value.code == 2


@pytest.mark.parametrize(
    ("seconds", "reserved", "best"),
    [({1: 100, 2: 60, 3: 61}, 1, 2), ({1: 100, 2: 96}, 1, 1), ({1: 96, 2: 100}, 2, 2), ({}, 1, 1)],
)
def test_best_reserved_changes_only_for_five_percent_gain(seconds: dict[int, float], reserved: int, best: int) -> None:
    assert best_reserved(lambda count: seconds.get(count, 1.0), reserved=reserved, choices=list(seconds)) == best


def test_best_depth_with_equal_steps_prefers_fewest_batches() -> None:
    """Sampling takes 120 s on one GPU, of which a batch's longest completion alone takes 60; training 35 on 7 of 8."""

    def step_s(count: int, ahead: int) -> float:
        return max(120 / count, 60 / ahead, 35 * 7 / (8 - count))

    assert best_depth(step_s, now_s=60.0, choices=range(1, 8)) == DepthAdvice(lookahead=2, reserve=3, step_s=49.0)
    assert best_depth(step_s, now_s=51.0, choices=range(1, 8)) is None  # not worth it
    alone = best_depth(lambda count, ahead: max(120 / count, 200 / ahead, 20.0), now_s=200.0, choices=range(1, 8))
    assert alone == DepthAdvice(lookahead=8, reserve=5, step_s=25.0)
