"""What an estimate of `grpo plan` refuses, and what it only warns of."""

import pytest

from grpo.ops.plan.memory_budget import GIB
from tests.support.launching import ROOT
from tests.support.planned_cluster import LLAMA_8B, Cluster, lines_of


def test_weights_that_no_engine_can_hold(cluster: Cluster) -> None:
    big = LLAMA_8B | {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    }
    training = cluster.training(big | {"num_attention_heads": 64})  # Llama 70B: 141 GB of weights in bfloat16
    plan = cluster.read("--config_file", cluster.accelerate(8, 56), "--config", training)
    (error,) = plan["errors"]
    assert "an engine's weights alone take 131 GiB of each of its 1 GPUs" in error
    assert "set vllm_tensor_parallel_size to 2 or 4" in error


def test_no_size_is_named_that_leaves_no_rank(cluster: Cluster) -> None:
    huge = {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128}
    training = cluster.training(LLAMA_8B | huge)  # Llama 405B: 8 GPUs of 80 GiB hold no engine
    errors = cluster.read("--config_file", cluster.accelerate(8, 56), "--config", training)["errors"]
    assert any("no tensor parallel size of one node is enough" in error for error in errors)


@pytest.mark.parametrize(
    "model",
    [
        {"model_type": "gpt2", "n_embd": 128, "n_head": 4, "n_layer": 2},
        {"model_type": "opt", "ffn_dim": 256, "hidden_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2},
        {"model_type": "bloom", "hidden_size": 128, "n_head": 4, "n_layer": 2},
    ],
    ids=lambda model: model["model_type"],
)
def test_models_that_call_their_sizes_otherwise(cluster: Cluster, model: dict) -> None:
    plan = cluster.read("--num_processes", "7", "--config", cluster.training(model))
    assert plan["estimates"]["training"]["peak_bytes"] > 0
    assert not any("not understood" in warning for warning in plan["warnings"])


def test_a_configuration_that_is_not_understood_leaves_memory_out(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: object, **kwargs: object) -> None:
        raise AttributeError("'NewConfig' object has no attribute 'intermediate_size'")

    monkeypatch.setattr("grpo.ops.plan.planner.estimate", fails)
    plan = cluster.read("--num_processes", "7", "--config", cluster.training())
    assert plan["batch"]["generation_completions"]
    assert any("the memory of a llama is left out" in warning for warning in plan["warnings"])


def test_states_that_no_gpu_can_hold(cluster: Cluster) -> None:
    files = ["--config_file", ROOT / "configs" / "1node.yaml", "--config", cluster.training()]
    (error,) = cluster.read(*files, "--gpu-memory", "16GiB", "--", "--vllm_tensor_parallel_size", "1")["errors"][:1]
    assert "by estimate the states alone take 17.1 GiB" in error
    # 16 B x 8.03 B parameters over what a GPU has beside the bucket of 1 GB and the norms
    ranks = -(-16 * 8_030_261_248 // (16 * GIB - 10**9 - 2 * 65 * 4096))
    assert f"use {ranks} ranks at least, or set offload_optimizer_device: cpu" in error


def test_a_shortfall_of_the_estimate_is_a_warning(cluster: Cluster) -> None:
    training = cluster.training(per_device_train_batch_size=32, gradient_checkpointing=False)
    code, out = cluster.plan("--config_file", ROOT / "configs" / "1node.yaml", "--config", training)
    assert code == 0
    assert "WARNING: a training GPU has 80.0 GiB, and the estimate is" in out
    assert "set gradient_checkpointing: true" in out


def test_a_push_needs_room_beside_vllm(cluster: Cluster) -> None:
    training = cluster.training(vllm_gpu_memory_utilization=0.99)
    plan = cluster.read("--config_file", ROOT / "configs" / "1node.yaml", "--config", training)
    assert any("a push needs 1.96 GiB on an engine's GPU" in warning for warning in plan["warnings"])


def test_what_is_offloaded_is_shown_and_not_counted(cluster: Cluster) -> None:
    zero = {"zero_stage": 3, "offload_optimizer_device": "cpu", "offload_param_device": "none"}
    file = cluster.accelerate(1, 4, deepspeed_config=zero)
    training = cluster.read("--config_file", file, "--config", cluster.training())["estimates"]["training"]
    lines = lines_of(training)
    # bfloat16 gradient 2, master 4, Adam 8, float32 gradient 4: 18 B of each parameter of this rank's
    assert lines["offload"] == pytest.approx(18 * 8_030_261_248 / 4, rel=1e-6)
    assert lines["states"] == pytest.approx(2 * 8_030_261_248 / 4, rel=1e-6)
    assert training["peak_bytes"] < lines["offload"]


def test_a_model_without_attention_is_an_error(cluster: Cluster) -> None:
    (error,) = cluster.read("--num_processes", "7", "--config", cluster.training({"model_type": "mamba"}))["errors"]
    assert "is a mamba without attention heads: its memory cannot be estimated" in error
