"""Random models that take a token's position from its place in the row, and how left pads change what they compute."""

import contextlib
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from grpo.weights.probe import probe_prompts
from grpo.weights.verifier import Verifier
from tests.support.tiny_models import VOCAB_SIZE

PADS = 8
OWN_POSITIONS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 8},
    "gpt_bigcode": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "rwkv": {"context_length": 128, "attention_hidden_size": 32},
}


def random_model(model_type: str, dropout: float = 0.1) -> PreTrainedModel:
    """Its positions move log-probabilities by some tenths, as those of a trained one do."""
    common: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "max_position_embeddings": 128,
    }
    common |= {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
    common |= {f"{where}_pdrop": dropout for where in ("attn", "embd", "resid")}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**common, **OWN_POSITIONS[model_type]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def verifier_of(model: nn.Module, **settings: Any) -> Verifier:
    return Verifier(
        **{
            "model": model,
            "clients": [],
            "probe": probe_prompts(VOCAB_SIZE, 40, (0, 1)),
            "dtype": torch.float32,
            "asked_limit": 1e9,  # pads are another matter
            "autocast": contextlib.nullcontext,
            "cast_lm_head_to_fp32": False,
            "timeout_s": 1.0,
            "largest": lambda mine: mine,
            **settings,
        }
    )


def scores(model: nn.Module, num_pads: int) -> torch.Tensor:
    """Log-probabilities as TRL asks for them, of a prompt with so many pads and a completion with pads behind it."""
    token_ids = torch.tensor([[0] * num_pads + [5, 9, 11, 7, 20, 31, 8] + [0] * 3])
    labels = token_ids.masked_fill(token_ids == 0, -100)
    mask = (token_ids != 0).long()
    found = model(input_ids=token_ids, attention_mask=mask, labels=labels, fused_lm_head=True).log_probs
    return found[0, num_pads : num_pads + 6]
