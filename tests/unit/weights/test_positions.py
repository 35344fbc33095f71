"""Left pads must not change what the trainer computes: models that count positions from the start of the row."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from trl.trainer.utils import add_fused_lm_head

from tests.support.engines import Script
from tests.support.own_positions import PADS, random_model, scores, verifier_of
from tests.support.scripted_trainer import make_trainer, use_scripted_engines
from tests.support.tiny_models import tiny_model, tiny_tokenizer


@pytest.mark.parametrize("model_type", ["gpt2", "gpt_neo", "gpt_bigcode"])
def test_verifier_gives_position_ids_to_pad_sensitive_models(model_type: str) -> None:
    model, reference = random_model(model_type), random_model(model_type)
    for each in (model, reference):
        add_fused_lm_head(each)
    wanted = scores(model, 0)
    assert (scores(model, PADS) - wanted).abs().mean() > 0.1, "the fault is TRL's own"
    verifier_of(model, reference=reference).verify(1, engines_work=False)
    for each in (model, reference):
        torch.testing.assert_close(scores(each, PADS), wanted, rtol=0, atol=1e-5)
        torch.testing.assert_close(scores(each, 0), wanted, rtol=0, atol=0)
    position_ids = torch.arange(2 * PADS)[None] + 1
    own = {"position_ids": position_ids, "attention_mask": torch.ones_like(position_ids)}
    given = model(input_ids=position_ids + 3, **own).logits
    assert not torch.equal(given, model(input_ids=position_ids + 3).logits), "those that are given are taken"


def test_position_ids_with_peft_and_checkpointing_reach_gradients() -> None:
    model = random_model("gpt2")
    add_fused_lm_head(model)
    wrapped = get_peft_model(model, LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False))
    base = wrapped.get_base_model()
    base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    base.enable_input_require_grads()
    wrapped.train()
    parameters = [parameter for name, parameter in wrapped.named_parameters() if "lora_" in name]
    settings: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-6}
    for module in wrapped.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    wanted = torch.autograd.grad(scores(wrapped, 0).sum(), parameters)
    verifier_of(base).verify(1, engines_work=False)
    found = torch.autograd.grad(scores(wrapped, PADS).sum(), parameters)
    torch.testing.assert_close(found, wanted, **settings)


@pytest.mark.parametrize("family", ["llama-untied", "qwen3-moe"])
def test_verifier_leaves_pad_insensitive_models_unchanged(family: str) -> None:
    model = tiny_model(family)
    add_fused_lm_head(model)
    before = scores(model, PADS)
    verifier_of(model, has_routers=family == "qwen3-moe").verify(1, engines_work=False)
    assert torch.equal(scores(model, PADS), before)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_verifier_with_bfloat16_rounding_adds_no_position_hook() -> None:
    model = tiny_model("llama-untied").to(torch.bfloat16)
    verifier_of(model).verify(1, engines_work=False)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_verifier_of_model_without_position_ids_raises() -> None:
    model = random_model("rwkv")
    with pytest.raises(ValueError, match=r"of a rwkv depend .*\[GRPO-211\]: with 8 of them .* takes no position_ids"):
        verifier_of(model).verify(1, engines_work=False)


def test_verifier_of_model_unmended_by_positions_raises_and_unhooks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model("gpt2")
    forward = type(model.transformer).forward

    def blind(self: nn.Module, *args: Any, position_ids: Any = None, **kwargs: Any) -> Any:
        seen = torch.ones_like(kwargs["attention_mask"])
        return forward(self, *args, position_ids=position_ids, **{**kwargs, "attention_mask": seen})

    monkeypatch.setattr(type(model.transformer), "forward", blind)
    with pytest.raises(ValueError, match=r"of a gpt2 depend .*\[GRPO-211\].* with position_ids by"):
        verifier_of(model).verify(1, engines_work=False)
    assert not model.transformer._forward_pre_hooks


def test_verifier_mends_by_largest_difference_of_all_ranks() -> None:
    """One whose own scores agree mends its model, too: the others score once more, and wait for it."""
    model, asked = tiny_model("llama-untied"), []
    of_others = iter([0.5, 1e-7])

    def largest(mine: float) -> float:
        asked.append(mine)
        return max(mine, next(of_others))

    verifier_of(model, largest=largest).verify(1, engines_work=False)
    assert len(asked) == 2
    assert max(asked) < 1e-5
    assert model.model._forward_pre_hooks


def test_trl_logps_of_padded_prompts_match_unpadded_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real trainer: what it computes in a batch is what it computes of each row alone."""
    folder = tmp_path / "gpt2"
    model = random_model("gpt2")
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    script: Script = use_scripted_engines(monkeypatch)
    settings: dict[str, Any] = {"max_steps": 1, "vllm_max_logprob_gap": 1e9, "beta": 0.1, "disable_dropout": True}
    trainer = make_trainer(
        folder, tmp_path / "run", script.story, prompts=["1=", "23+45+67+8=", "2=", "3+4="], **settings
    )
    apart: list[float] = []
    scored = type(trainer)._get_per_token_logps_and_entropies

    def compared(
        self: Any, model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int, *args: Any, **more: Any
    ):
        found = scored(self, model, input_ids, attention_mask, logits_to_keep, *args, **more)
        for row, (ids, is_token) in enumerate(zip(input_ids, attention_mask, strict=True)):
            plain = ids[is_token.bool()]
            logps = model(input_ids=plain[None]).logits[0, :-1].log_softmax(-1).gather(-1, plain[1:, None])[:, 0]
            count = int(is_token[-logits_to_keep:].sum())
            apart.append((found[0][row, :count] - logps[-count:]).abs().max().item())
        return found

    monkeypatch.setattr(type(trainer), "_get_per_token_logps_and_entropies", compared)
    try:
        trainer.train()
    finally:
        trainer.close()
    assert len(apart) >= 16, "of the policy and of the reference model"
    np.testing.assert_allclose(apart, 0, atol=1e-4)
