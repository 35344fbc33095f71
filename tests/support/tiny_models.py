"""Models of a few hundred thousand parameters, one for each way in which checkpoints and engines differ."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

VOCAB_SIZE = 512  # more than one vLLM padding unit of 64, and more than the characters
CHARACTERS = "0123456789+= abcdefghijklmnopqrstuvwxyz"

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}

# family -> (transformers model type, what is special about it)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "llama-untied": ("llama", {"tie_word_embeddings": False}),
    "gemma2-tied": ("gemma2", {"tie_word_embeddings": True, "head_dim": 32, "query_pre_attn_scalar": 32}),
    "phi3-fused": ("phi3", {"tie_word_embeddings": False}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True, "head_dim": 32}),
    "qwen3-moe": (
        "qwen3_moe",
        {
            "tie_word_embeddings": False,
            "head_dim": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
    ),
    # Its router's bias is a buffer, large enough to choose other experts (`save_tiny_model`), and the engine holds
    # bias and router in float32 whatever its dtype.
    "glm4-moe": (
        "glm4_moe",
        {
            "tie_word_embeddings": False,
            "head_dim": 32,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "n_shared_experts": 1,
            "first_k_dense_replace": 0,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
}


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character."""
    vocabulary = {"<pad>": 0, "<eos>": 1} | {char: index + 2 for index, char in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def tiny_config(family: str) -> PretrainedConfig:
    model_type, special = FAMILIES[family]
    return CONFIG_MAPPING[model_type](**{**_COMMON, **special})


def tiny_model(family: str) -> PreTrainedModel:
    """Random, in float32; routers' biases from -0.5 to 0.5."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(family), dtype=torch.float32)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.linspace(-0.5, 0.5, len(buffer))[torch.randperm(len(buffer))])
    return model


CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }} {% endfor %}{% if add_generation_prompt %}= {% endif %}"
)


def save_tiny_model(family: str, folder: Path, *, chat: bool = False) -> Path:
    """A random model with its tokenizer, as a plain Hugging Face folder."""
    model = tiny_model(family)
    model.save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    if chat:
        tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder
