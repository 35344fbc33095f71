"""Adapters merged into weights: as PEFT itself merges them."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from grpo.weights.adapters import Lora
from tests.support.tiny_models import tiny_model


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": "all-linear"},
        {"target_modules": "all-linear", "use_rslora": True, "r": 8},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": ["q_proj"], "use_dora": True},
        {"target_modules": ["q_proj", "embed_tokens"], "use_dora": True},
    ],
    ids=["linear", "rsLoRA", "embedding", "DoRA", "DoRA of an embedding"],
)
def test_lora_merged_weights_match_peft(settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = get_peft_model(tiny_model("llama-untied"), LoraConfig(**{"r": 4, "lora_alpha": 16, **settings}))
    for name, parameter in model.named_parameters():
        if "lora_" in name and "magnitude" not in name:
            torch.nn.init.normal_(parameter, std=0.1)
        elif "magnitude" in name:
            parameter.data.mul_(1.3)
    layers = Lora(model, merges=True).layers()
    plain = dict(model.get_base_model().named_parameters())
    ours = {
        layer.weight: layer.merged(plain[layer.weight.replace(".weight", ".base_layer.weight")], layer.parts)
        for layer in layers
    }
    theirs = dict(model.merge_and_unload().named_parameters())
    assert ours
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name], rtol=1e-5, atol=1e-6)
