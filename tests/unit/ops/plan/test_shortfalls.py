"""What an estimate of `grpo plan` refuses, and what it only warns of."""

import re

import pytest

from tests.support.launching import ROOT
from tests.support.planned_cluster import LLAMA_8B, Cluster, lines_of


def test_plan_with_weights_beyond_engine_suggests_tensor_parallel(cluster: Cluster) -> None:
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


def test_plan_with_weights_beyond_node_suggests_no_tensor_parallel(cluster: Cluster) -> None:
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
def test_plan_of_config_with_other_size_names_estimates_memory(cluster: Cluster, model: dict) -> None:
    plan = cluster.read("--num_processes", "7", "--config", cluster.training(model))
    assert plan["estimates"]["training"]["peak_bytes"] > 0
    assert not any("not understood" in warning for warning in plan["warnings"])


def test_plan_of_unsupported_config_leaves_memory_unknown(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object, **kwargs: object) -> None:
        raise AttributeError("'NewConfig' object has no attribute 'intermediate_size'")

    monkeypatch.setattr("grpo.ops.plan.planner.estimate", fails)
    plan = cluster.read("--config_file", ROOT / "configs" / "1node.yaml", "--config", cluster.training())
    assert plan["batch"]["generation_completions"]
    assert any("the memory of a llama is left out" in reason for reason in plan["unknown"])
    assert (plan["memory"], plan["works"]) == ("unknown", False)


def test_plan_with_permanent_memory_beyond_gpu_does_not_fit(cluster: Cluster) -> None:
    """States of 17.1 GiB alone would; beside the reference model, a bucket and the context they do not."""
    files = ["--config_file", ROOT / "configs" / "1node.yaml", "--gpu-memory", "21GiB"]
    training = cluster.training(beta=0.04, per_device_train_batch_size=1, gradient_accumulation_steps=8)
    plan = cluster.read(*files, "--config", training)
    error = next(error for error in plan["errors"] if "training GPU" in error)
    parts = "ZeRO-3 states 17.1 GiB, reference model (beta is not 0) 2.14 GiB, CUDA context 2.00 GiB, gradient bucket"
    assert f"a training GPU always holds 22.2 GiB, and has 21.0 GiB ({parts} 954 MiB" in error
    assert "per_device_train_batch_size" not in error, "a smaller batch would not help"
    assert plan["memory"] == "does not fit"
    assert plan["verdict"].startswith("does not fit: ")


def test_plan_advice_for_shortfall_fits_when_followed(cluster: Cluster) -> None:
    """Offload and more nodes are enough by themselves; a plan that follows them fits."""
    words = ["--gpu-memory", "24GiB", "--config", cluster.training(vllm_tensor_parallel_size=2)]
    plan = cluster.read("--config_file", cluster.accelerate(1, 6), *words)
    (error,) = plan["errors"]
    assert "(forward and backward, whatever the batch size): " in error
    assert "set offload_optimizer_device: cpu" in error
    nodes, ranks = map(int, re.findall(r"num_machines: (\d+), num_processes: (\d+)", error)[0])
    assert (nodes > 1, ranks) == (True, 6 * nodes)
    assert cluster.read("--config_file", cluster.accelerate(nodes, ranks), *words)["memory"] != "does not fit"
    assert cluster.read("--config_file", cluster.accelerate(nodes - 1, ranks - 6), *words)["memory"] == "does not fit"
    offload = {"zero_stage": 3, "offload_optimizer_device": "cpu"}
    file = cluster.accelerate(1, 6, deepspeed_config=offload)
    assert cluster.read("--config_file", file, *words)["memory"] != "does not fit"


def test_plan_advice_for_large_shortfall_combines_changes(cluster: Cluster) -> None:
    training = cluster.training(beta=0.04, vllm_tensor_parallel_size=2)
    words = ["--gpu-memory", "13GiB", "--config", training]
    errors = cluster.read("--config_file", cluster.accelerate(1, 6), *words)["errors"]
    error = next(error for error in errors if "training GPU" in error)
    assert "no one change is enough: set offload_optimizer_device: cpu" in error
    hopeless = cluster.read("--config_file", cluster.accelerate(1, 6), "--gpu-memory", "3GiB", "--config", training)
    assert any("no setting is enough: take GPUs with more memory" in error for error in hopeless["errors"])


def test_plan_with_batch_beyond_memory_warns_and_names_largest_fit(cluster: Cluster) -> None:
    training = cluster.training(per_device_train_batch_size=32, gradient_checkpointing=False)
    code, out = cluster.plan("--config_file", ROOT / "configs" / "1node.yaml", "--config", training)
    assert code == 0
    assert out.startswith("may not fit: ")
    assert "WARNING: a training GPU has 80.0 GiB, and the estimate is" in out
    assert "set gradient_checkpointing: true" in out
    (size,) = re.findall(r"lower per_device_train_batch_size to (\d+) \(and raise gradient_accumulation_steps\)", out)
    for count, fits in ((int(size), "fits"), (int(size) + 1, "may not fit")):
        flags = ["--", "--per_device_train_batch_size", str(count), "--num_generations", "2"]
        flags += ["--gradient_accumulation_steps", "2"]
        plan = cluster.read("--config_file", ROOT / "configs" / "1node.yaml", "--config", training, *flags)
        assert plan["memory"] == fits


def test_plan_with_kv_cache_below_one_sequence_fails(cluster: Cluster) -> None:
    training = cluster.training(vllm_gpu_memory_utilization=0.25)  # 20 GiB: 15 of weights, 3 of overhead
    files = ["--config_file", ROOT / "configs" / "1node.yaml", "--config", training]
    flags = ["--prompt-tokens", "100000", "--", "--vllm_max_model_length", "101024"]
    errors = cluster.read(*files, *flags)["errors"]
    assert any("left for its KV cache, and one sequence of 101024 tokens takes 12.3 GiB" in error for error in errors)


def test_plan_with_high_vllm_utilization_warns_of_weight_sync(cluster: Cluster) -> None:
    training = cluster.training(vllm_gpu_memory_utilization=0.99)
    plan = cluster.read("--config_file", ROOT / "configs" / "1node.yaml", "--config", training)
    assert any("a weight sync needs 1.96 GiB on an engine's GPU" in warning for warning in plan["warnings"])


def test_plan_with_offload_shows_host_memory_outside_peak(cluster: Cluster) -> None:
    zero = {"zero_stage": 3, "offload_optimizer_device": "cpu", "offload_param_device": "none"}
    file = cluster.accelerate(1, 4, deepspeed_config=zero)
    training = cluster.read("--config_file", file, "--config", cluster.training())["estimates"]["training"]
    lines = lines_of(training)
    # bfloat16 gradient 2, master 4, Adam 8, float32 gradient 4: 18 B of each parameter of this rank's
    assert lines["offload"] == pytest.approx(18 * 8_030_261_248 / 4, rel=1e-6)
    assert lines["states"] == pytest.approx(2 * 8_030_261_248 / 4, rel=1e-6)
    assert training["peak_bytes"] < lines["offload"]


def test_plan_of_model_without_attention_fails(cluster: Cluster) -> None:
    (error,) = cluster.read("--num_processes", "7", "--config", cluster.training({"model_type": "mamba"}))["errors"]
    assert "is a mamba without attention heads: its memory cannot be estimated" in error
