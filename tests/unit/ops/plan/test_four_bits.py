"""`grpo plan` of a base of four bits, against numbers worked out by hand."""

from typing import Any

import pytest

from tests.support.planned_cluster import BASE, HIDDEN, KEYS, LAYERS, MLP, QWEN_7B, Cluster, lines_of

LINEAR = LAYERS * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * KEYS + 3 * HIDDEN * MLP)  # but for the head
LORA = {"use_peft": True, "lora_r": 16, "lora_target_modules": "all-linear", "load_in_4bit": True}


def plan(cluster: Cluster, zero: int, *words: str, **settings: Any) -> dict[str, Any]:
    file = cluster.accelerate(1, 7, deepspeed_config={"zero_stage": zero})
    return cluster.read("--config_file", file, "--config", cluster.training(QWEN_7B, **LORA | settings), *words)


@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize(("double", "each"), [(False, 0.5 + 4 / 64), (True, 0.5 + 1 / 64 + 4 / (64 * 256))])
def test_four_bit_base_counts_half_byte_and_scales(cluster: Cluster, zero: int, double: bool, each: float) -> None:
    found = plan(cluster, zero, use_bnb_nested_quant=double)
    assert found["errors"] == []
    memory = lines_of(found["estimates"]["training"])
    assert memory["base"] == pytest.approx(each * LINEAR + 2 * (BASE - LINEAR), rel=1e-6)
    assert each == pytest.approx(0.55, abs=0.04)
    assert memory["dequantised"] == memory["sync_dequantised"] == 2 * HIDDEN * MLP


def test_four_bit_base_syncs_as_unquantised_base(cluster: Cluster) -> None:
    found = plan(cluster, 2)["estimates"]
    without = plan(cluster, 2, load_in_4bit=False)["estimates"]
    for name in ("first_sync", "sync", "engine"):
        assert found[name] == without[name], name
    assert found["first_sync"]["engine_bytes"] > 2 * BASE


def test_four_bit_base_without_deepspeed_keeps_rest_in_float32(cluster: Cluster) -> None:
    training = cluster.training(QWEN_7B, **LORA, bf16=True)
    found = cluster.read("--num_processes", "1", "--gpus-per-node", "2", "--config", training)
    assert found["errors"] == []
    memory = lines_of(found["estimates"]["training"])
    assert memory["base"] == pytest.approx(0.5625 * LINEAR + 4 * (BASE - LINEAR), rel=1e-6)


def test_four_bit_quantization_config_matches_load_in_4bit(cluster: Cluster) -> None:
    inside = {"quantization_config": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}}
    found = plan(cluster, 2, load_in_4bit=False, model_init_kwargs=inside)
    assert found["errors"] == []
    assert found["estimates"]["training"] == plan(cluster, 2)["estimates"]["training"]
    (error,) = plan(cluster, 2, model_init_kwargs=inside)["errors"]
    assert "give one of the two" in error


def test_four_bit_base_with_dora_or_zero3_is_refused(cluster: Cluster) -> None:
    (error,) = plan(cluster, 2, use_dora=True)["errors"]
    assert "vLLM has no DoRA [GRPO-218]" in error
    (error,) = plan(cluster, 3)["errors"]
    assert "set zero_stage to 2" in error


def test_quantised_checkpoint_is_refused(cluster: Cluster) -> None:
    own = {**QWEN_7B, "quantization_config": {"quant_method": "gptq", "bits": 4}}
    errors = cluster.read("--num_processes", "1", "--gpus-per-node", "2", "--config", cluster.training(own))["errors"]
    assert any("by 'gptq' [GRPO-217]" in error for error in errors)
