"""`grpo plan` of LoRA jobs, against numbers worked out by hand and against autograd."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import PretrainedConfig

from grpo.config.models import AdapterSlot
from grpo.ops.plan.lora import PlannedLora
from grpo.ops.plan.model_shape import meta_model, shape_of
from grpo.ops.plan.speed import MEAN_LENGTH
from grpo.ops.plan.sync_memory import sync_lines, sync_shape
from grpo.ops.plan.training_memory import saved_bytes_per_token
from grpo.ops.plan.zero_memory import Sharding
from grpo.preflight.lora import LoraChoice, wrapped_without_weights
from tests.support.activations import micro_batch, saved_by_autograd
from tests.support.launching import ROOT
from tests.support.planned_cluster import BASE, HIDDEN, KEYS, LAYERS, MLP, QWEN_7B, VOCABULARY, Cluster, lines_of
from tests.support.tiny_models import tiny_config

ONE_NODE = ROOT / "configs" / "1node.yaml"
# In and out of each linear layer of a decoder layer: q and o, k and v, gate and up and down.
SIDES = 2 * (2 * HIDDEN) + 2 * (HIDDEN + KEYS) + 3 * (HIDDEN + MLP)
ADAPTERS = 40_370_176  # of rank 16 on all of them
LORA = {"use_peft": True, "lora_r": 16, "lora_target_modules": "all-linear"}


def plan(cluster: Cluster, *words: str, **settings: Any) -> dict[str, Any]:
    training = cluster.training(QWEN_7B, **LORA | settings)
    return cluster.read("--config_file", ONE_NODE, "--config", training, *words)


def test_lora_plan_counts_optimizer_states_of_adapters_only(cluster: Cluster) -> None:
    assert LAYERS * 16 * SIDES == ADAPTERS
    found = plan(cluster, beta=0.04)
    assert found["model"]["num_parameters"] == found["model"]["frozen"]["elements"] == BASE
    assert found["model"]["trained"]["elements"] == ADAPTERS
    assert found["lora"] == {
        "way": "adapter",
        "why": "",
        "slot": {
            "rank": 16,
            "layers": ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"],
            "number": 1,
        },
    }
    memory = lines_of(found["estimates"]["training"])
    assert memory["states"] == pytest.approx(16 * ADAPTERS / 7, rel=1e-4)
    assert memory["base"] == pytest.approx(2 * BASE / 7, rel=1e-4)
    assert memory["reduce_bucket"] == 1_000_000_000, "DeepSpeed makes it as large as its setting says"
    assert memory["reduce_copy"] == 2 * ADAPTERS
    assert memory["step_gradients"] == pytest.approx(6 * ADAPTERS / 7, rel=1e-4)
    # Up to 100,000 elements: norms and biases; A of six layers; B of three of HIDDEN, and two of KEYS.
    small = LAYERS * (2 * HIDDEN + HIDDEN + 2 * KEYS) + HIDDEN
    assert memory["persistent"] == 2 * (small + LAYERS * 16 * (6 * HIDDEN + 3 * HIDDEN + 2 * KEYS))
    assert memory["gather_buffers"] == 2 * (10**9 - VOCABULARY * HIDDEN)
    assert "head_gradient" not in memory, "the head is frozen"
    assert memory["logits"] == 4096 * 32768 * 2 + 8 * 1024 * HIDDEN * (2 + 4 + 2)
    assert "reference" not in memory, "it is the base"


def test_lora_weight_sync_after_first_sends_adapters_only(cluster: Cluster) -> None:
    found = plan(cluster)["estimates"]
    assert found["sync"]["gathered_bytes_per_node"] == found["sync"]["engine_bytes"] == 80_740_352
    assert found["first_sync"]["engine_bytes"] == 2 * BASE + 80_740_352
    engine = found["engine"]
    assert engine["adapters_bytes"] == 2 * 80_740_352  # vLLM's slot, and the adapter that came
    assert engine["kv_cache_bytes"] == int(80 * 2**30 * 0.9) - 2 * BASE - 2 * 80_740_352 - 3 * 2**30
    full = cluster.read("--config_file", ONE_NODE, "--config", cluster.training(QWEN_7B))["estimates"]
    assert (full["first_sync"], full["sync"]["engine_bytes"]) == (None, 2 * BASE)
    assert full["engine"]["adapters_bytes"] == 0


def test_lora_slot_rounds_rank_up_to_vllm_rank(cluster: Cluster) -> None:
    engine = plan(cluster, lora_r=20)["estimates"]["engine"]
    assert engine["adapters_bytes"] == 2 * LAYERS * SIDES * (32 + 20)


def test_lora_plan_verbose_prints_sync_of_adapters(cluster: Cluster) -> None:
    _, out = cluster.plan("--config_file", ONE_NODE, "--config", cluster.training(QWEN_7B, **LORA), "--verbose")
    assert "LoRA of rank 16 on down_proj, gate_proj, " in out
    assert "the engines get the base once, then adapters alone. 40,370,176 parameters are trained." in out
    assert "an engine's first weight sync" in out
    assert "every other weight sync" in out


@pytest.mark.parametrize(("dtype", "element"), [("float32", 4), ("bfloat16", 2)])
def test_lora_without_deepspeed_keeps_base_in_loaded_dtype(cluster: Cluster, dtype: str, element: int) -> None:
    training = cluster.training(QWEN_7B, **LORA, dtype=dtype, bf16=True)
    found = cluster.read("--num_processes", "1", "--gpus-per-node", "2", "--config", training)
    memory = lines_of(found["estimates"]["training"])
    assert (memory["base"], memory["states"]) == (element * BASE, 16 * ADAPTERS)
    assert not any("plain DDP" in warning for warning in found["warnings"])


@pytest.mark.parametrize(
    ("zero", "states", "base", "on_host"),
    [
        ({"zero_stage": 1}, 4 + 12 / 4, 2, 0),
        ({"zero_stage": 2}, 2 + 14 / 4, 2, 0),
        ({"zero_stage": 3, "offload_param_device": "cpu"}, 14 / 4, 0, 2 * (BASE + ADAPTERS)),
    ],
)
def test_lora_memory_matches_zero_stage(
    cluster: Cluster, zero: dict[str, Any], states: float, base: float, on_host: int
) -> None:
    file = cluster.accelerate(1, 4, deepspeed_config=zero)
    found = cluster.read("--config_file", file, "--config", cluster.training(QWEN_7B, **LORA))["estimates"]
    memory = lines_of(found["training"])
    assert memory["states"] == pytest.approx(states * ADAPTERS, rel=1e-4)
    assert memory["base"] == pytest.approx(base * BASE, rel=1e-4)
    assert memory.get("offload", 0) == pytest.approx(on_host / 4, rel=1e-4)


def test_lora_with_dora_is_merged_for_sync(cluster: Cluster) -> None:
    file = cluster.accelerate(1, 7, deepspeed_config={"zero_stage": 2})
    training = cluster.training(QWEN_7B, **LORA, use_dora=True)
    found = cluster.read("--config_file", file, "--config", training)
    assert (found["lora"]["way"], found["lora"]["why"]) == ("merge", "vLLM has no DoRA")
    outputs = 2 * HIDDEN + 2 * KEYS + 2 * MLP + HIDDEN  # a magnitude each
    assert found["model"]["trained"]["elements"] == ADAPTERS + LAYERS * outputs
    assert found["estimates"]["engine"]["adapters_bytes"] == 0
    assert found["estimates"]["first_sync"]["engine_bytes"] == 2 * BASE
    # Embedding, head and norms stay behind; the biases go with their layers.
    behind = 2 * VOCABULARY * HIDDEN + (2 * LAYERS + 1) * HIDDEN
    assert found["estimates"]["sync"]["engine_bytes"] == 2 * (BASE - behind)


def test_lora_with_dora_and_zero3_is_refused(cluster: Cluster) -> None:
    (error,) = plan(cluster, use_dora=True)["errors"]
    assert error.startswith("use_dora with ZeRO-3")
    training = cluster.training(QWEN_7B, **LORA, use_dora=True, deepspeed=str(ROOT / "configs" / "zero3.json"))
    (error,) = cluster.read("--num_processes", "7", "--config", training)["errors"]
    assert error.startswith("use_dora with ZeRO-3")


def test_lora_dropout_warns(cluster: Cluster) -> None:
    (warning,) = plan(cluster, lora_dropout=0.1)["warnings"]
    assert "lora_dropout is 0.1" in warning


def test_lora_memory_shortfall_names_frozen_base(cluster: Cluster) -> None:
    (error,) = plan(cluster, "--gpu-memory", "2GiB")["errors"][:1]
    assert "always holds 5.07 GiB, and has 2.00 GiB (the frozen base 2.03 GiB, CUDA context 2.00 GiB, " in error


def test_lora_train_seconds_skip_gradients_of_frozen_weights(cluster: Cluster) -> None:
    found = plan(cluster)["advice"]
    tokens = 512 + MEAN_LENGTH * 1024
    attention = 2 * LAYERS * HIDDEN * tokens
    operations = 224 * tokens * (4 * 2 * BASE + 5 * attention)  # checkpointing; old log-probabilities
    assert found["train_s"] == pytest.approx(operations / (7 * 312e12 * 0.35))


def test_lora_plan_of_unreachable_model_still_checks_settings(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    found = plan(cluster, model_name_or_path="nobody/no-such-model", sync_ref_model=True, beta=0.1)
    assert any("sync_ref_model: with LoRA" in error for error in found["errors"])
    assert found["lora"] is None


def test_lora_plan_with_other_error_reports_both(cluster: Cluster) -> None:
    found = plan(cluster, per_device_train_batch_size=3, gradient_accumulation_steps=1, sync_ref_model=True)
    assert len(found["errors"]) == 2
    assert any("must be divisible" in error for error in found["errors"])
    assert any("sync_ref_model: with LoRA" in error for error in found["errors"])


# -- counted on small models -------------------------------------------------------------------------------------------


def planned(config: PretrainedConfig, *, way: Any, **settings: Any) -> PlannedLora:
    lora = LoraConfig(task_type="CAUSAL_LM", **{"r": 8, "target_modules": "all-linear"} | settings)
    choice = LoraChoice(way=way, why="", slot=AdapterSlot(rank=8, layers=()))
    return PlannedLora(choice=choice, wrapped=wrapped_without_weights(meta_model(config), lora))


def test_shape_of_lora_counts_modules_to_save() -> None:
    config = tiny_config("llama-untied")
    shape = shape_of(config, "llama", wrapped=planned(config, way="merge", modules_to_save=["lm_head"]).wrapped)
    head = 512 * 128
    # 2 layers of q and o, k and v, gate and up and down; the head is there twice, and PEFT keeps the frozen one
    adapters = 2 * 8 * (2 * 256 + 2 * (128 + 64) + 3 * (128 + 256))
    assert (shape.trained.elements, shape.frozen.elements) == (adapters + head, shape.num_parameters)
    assert shape.trains_head
    (layer,) = shape.layers
    assert layer.adapter_ranks == 7 * 8
    some = planned(config, way="adapter", target_modules=["q_proj"], layers_to_transform=[1]).wrapped
    assert [layer.adapter_ranks for layer in shape_of(config, "llama", wrapped=some).layers] == [0, 8]


def test_sync_shape_with_lora_merge_counts_converted_and_merged_bytes() -> None:
    config = tiny_config("llama-untied")
    sizes = {"dtype": torch.bfloat16, "bucket_bytes": 2**20}
    alone, merged = (sync_shape(config, **sizes, lora=planned(config, way=way)) for way in ("adapter", "merge"))
    assert (alone.converted_bytes, alone.merge_bytes) == (0, 0)
    adapters = 2 * 8 * (2 * 256 + 2 * (128 + 64) + 3 * (128 + 256))
    assert alone.later_bytes == 2 * adapters
    weights = 2 * (2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 256)
    assert merged.later_bytes == 2 * weights
    assert merged.converted_bytes == 2 * 2 * (weights + adapters)  # one bucket has them all
    assert merged.merge_bytes == 4 * 4 * 128 * 256
    sharding = Sharding(stage=3, world_size=1, dtype_bytes=2)
    lines = sync_lines(merged, sharding, backend="nccl", has_gpus=True, gathers_on_device=True)
    assert {line.key: line.holder for line in lines} == {
        "sync_packed": "local main",
        "sync_converted": "local main",
        "sync_merge": "local main",
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen2-tied", "llama-untied", "gemma2-tied", "phi3-fused", "qwen3-tied"])
def test_saved_bytes_per_token_with_lora_matches_autograd(family: str, dtype: torch.dtype) -> None:
    sequences, tokens = 2, 128
    few, many = tiny_config(family), tiny_config(family)
    many.num_hidden_layers = 2 * few.num_hidden_layers
    if getattr(many, "layer_types", None):
        many.layer_types = few.layer_types * 2
    saved = [saved_by_autograd(config, dtype, sequences, tokens, adapt=adapted) for config in (few, many)]
    (layer,) = (shape := shape_of(few, family, wrapped=planned(few, way="adapter").wrapped)).layers
    batch = micro_batch(sequences, tokens, dtype_bytes=dtype.itemsize, flash_attention=False)
    estimate = layer.count * saved_bytes_per_token(shape, layer, batch)
    assert estimate * sequences * tokens == pytest.approx(saved[1] - saved[0], rel=0.12)


def adapted(model: Any) -> None:
    """As TRL does under ZeRO-3."""
    lora = LoraConfig(task_type="CAUSAL_LM", r=8, target_modules="all-linear")
    get_peft_model(model, lora, autocast_adapter_dtype=False)
    model.enable_input_require_grads()
