"""Weights of four bits: what a weight sync sends of them is what their layers compute with, bit for bit."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from grpo.model.four_bit import compute_in, four_bit_weights, is_four_bit, quantises_head
from grpo.weights.adapters import Lora
from grpo.weights.buckets import packed_bytes, packed_places
from grpo.weights.source import GatheredSource
from tests.support.tiny_models import save_tiny_model, tiny_config, tiny_model

MB = 2**20
FAMILIES = ("qwen2-tied", "llama-untied", "phi3-fused", "qwen3-tied", "qwen3-moe")


def quantised(family: str, folder: Path, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    save_tiny_model(family, folder)
    config = BitsAndBytesConfig(load_in_4bit=True, **settings)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=config)


def sent_by(source: GatheredSource) -> dict[str, torch.Tensor]:
    taken = {}
    for bucket in source.plan().buckets:
        places = packed_places(torch.empty(packed_bytes(bucket.metas), dtype=torch.uint8), bucket.metas)
        source.fill(bucket, places)
        taken |= dict(zip([meta.name for meta in bucket.metas], places, strict=True))
    return taken


def four_bit_layers(model: nn.Module) -> dict[str, Linear4bit]:
    return {name: each for name, each in model.named_modules() if isinstance(each, Linear4bit)}


@pytest.mark.parametrize("engine", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("kind", "double", "loaded"), [("nf4", True, torch.float32), ("fp4", False, torch.bfloat16)])
@pytest.mark.parametrize("family", FAMILIES)
def test_sent_four_bit_weights_match_layer_products(
    family: str, kind: str, double: bool, loaded: torch.dtype, engine: torch.dtype, tmp_path: Path
) -> None:
    plain = AutoModelForCausalLM.from_config(tiny_config(family)).state_dict()
    model = quantised(family, tmp_path, loaded, bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=double)
    compute_in(model, engine)
    layers = four_bit_layers(model)
    assert layers
    sent = sent_by(GatheredSource(model, wire_dtype=engine, bucket_bytes=MB // 16))
    for name, layer in layers.items():
        weight = sent[f"{name}.weight"]
        assert (weight.dtype, weight.shape) == (engine, plain[f"{name}.weight"].shape), name
        rows = torch.eye(layer.in_features, dtype=engine)
        bias = torch.zeros(layer.out_features, dtype=engine) if layer.bias is None else layer.bias
        for layer.training in (True, False):
            with torch.no_grad():
                assert torch.equal(layer(rows), rows @ weight.T + bias), name


def test_four_bit_source_sends_checkpoint_names_and_finds_writes(tmp_path: Path) -> None:
    model = quantised("qwen2-tied", tmp_path)
    wrapped = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    compute_in(wrapped, torch.float32)
    before = tiny_model("qwen2-tied").state_dict()
    source = GatheredSource(model, wire_dtype=torch.float32, bucket_bytes=MB, lora=Lora(wrapped, merges=False))
    sent = sent_by(source)
    base = {name: tensor for name, tensor in sent.items() if "lora_" not in name}
    assert base.keys() == before.keys() - {"lm_head.weight"}
    assert all(base[name].shape == before[name].shape for name in base)
    source.mark_sent()
    assert source.plan().is_adapters
    assert source.written(by_sums=True) == []
    wrapped.eval()
    with torch.no_grad():  # as a verification does
        wrapped(torch.arange(20)[None])
    assert source.written(by_sums=True) == []
    layer = model.model.layers[1].mlp.up_proj.base_layer
    layer.weight.data[7] += 1
    assert source.written(by_sums=True) == ["model.layers.1.mlp.up_proj.weight"]
    source.forget_sent()
    assert not source.plan().is_adapters


def test_four_bit_training_after_no_grad_forward_has_gradients(tmp_path: Path) -> None:
    """On a CPU with AVX-512 for bfloat16 a layer packs itself there, unless it is kept from it."""
    model = quantised("llama-untied", tmp_path)
    wrapped = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    compute_in(wrapped, torch.float32)
    before = {name: layer.weight.data.clone() for name, layer in four_bit_layers(model).items()}
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        expected = wrapped.eval()(tokens).logits
    loss = wrapped.train()(tokens, labels=tokens)
    assert torch.equal(loss.logits, expected)
    loss.loss.backward()
    trained = [parameter for parameter in wrapped.parameters() if parameter.requires_grad]
    assert all(parameter.grad is not None and parameter.grad.abs().max() > 0 for parameter in trained)
    for name, layer in four_bit_layers(model).items():
        assert torch.equal(layer.weight.data, before[name])


def test_compute_in_keeps_adapters_in_float32(tmp_path: Path) -> None:
    model = get_peft_model(quantised("qwen2-tied", tmp_path), LoraConfig(r=4, target_modules=["q_proj"]))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.data = parameter.data.bfloat16()  # as TRL does
    compute_in(model, torch.bfloat16)
    assert {parameter.dtype for parameter in trained} == {torch.float32}
    assert model.get_base_model().model.layers[0].self_attn.k_proj.bias.dtype == torch.bfloat16
    plain = tiny_model("qwen2-tied").bfloat16()
    compute_in(plain, torch.float32)
    assert plain.dtype == torch.bfloat16


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_four_bit_weights_count_matches_held_bytes(family: str, double: bool, tmp_path: Path) -> None:
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=double)
    with torch.device("meta"):
        counted = four_bit_weights(AutoModelForCausalLM.from_config(tiny_config(family)), config)
    weights = [each for each in quantised(family, tmp_path, bnb_4bit_use_double_quant=double).parameters()]
    held = [each.quant_state for each in weights if is_four_bit(each)]
    assert counted.elements == sum(state.shape.numel() for state in held)
    assert counted.largest == max(state.shape.numel() for state in held)
    scales = sum(state.absmax.nbytes + (state.state2.absmax.nbytes if double else 0) for state in held)
    assert counted.num_bytes == sum(each.nbytes for each in weights if is_four_bit(each)) + scales


def test_quantises_head_with_skip_list_without_head_is_true() -> None:
    model = tiny_model("llama-untied")
    asked = BitsAndBytesConfig(load_in_4bit=True)
    assert not quantises_head(model, asked)
    other = copy.deepcopy(asked)
    other.llm_int8_skip_modules = ["o_proj"]
    assert quantises_head(model, other)
    other.llm_int8_skip_modules = ["o_proj", "lm_head"]
    assert not quantises_head(model, other)
