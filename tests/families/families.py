"""Small configurations, one for each family of checkpoints, most used first; names do not depend on sizes."""

from dataclasses import dataclass
from typing import Any

_TEXT: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
_EXPERTS = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
_ROUTED = {
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "use_qk_norm": False,
}
_SLIDING = {"layer_types": ["sliding_attention", "full_attention"]}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
}
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [12, 10, 10]}}
CLIP = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
_QWEN_TOWER = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 256,
    "patch_size": 8,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 16,
}
_GLM_TOWER = {
    "depth": 1,
    "hidden_size": 64,
    "num_heads": 2,
    "out_hidden_size": 256,
    "intermediate_size": 64,
    "image_size": 56,
    "patch_size": 14,
}


@dataclass(frozen=True, slots=True)
class Family:
    """One kind of checkpoint."""

    model_type: str
    """transformers' name of its configuration."""
    models: str
    """As people call them."""
    settings: dict[str, Any]
    reason: str = ""
    """Why the names cannot be looked at here, or why local mode refuses it."""


def _with_tower(text: dict[str, Any], tower: dict[str, Any]) -> dict[str, Any]:
    return {"text_config": text, "vision_config": tower}


FAMILIES = (
    Family("qwen3_moe", "Qwen3-30B-A3B, -235B-A22B", _TEXT | _EXPERTS),
    Family("qwen3", "Qwen3", _TEXT),
    Family("qwen2", "Qwen2.5", _TEXT),
    Family("qwen3_5", "Qwen3.5, Qwen3.6", _with_tower(_TEXT | _LINEAR, _QWEN_TOWER)),
    Family(
        "qwen3_5_moe",
        "Qwen3.5-35B-A3B, -397B-A17B",
        _with_tower(_TEXT | _EXPERTS | _LINEAR | {"shared_expert_intermediate_size": 64}, _QWEN_TOWER),
    ),
    Family("llama", "Llama 3", _TEXT),
    Family("gemma3", "Gemma 3", _with_tower(_TEXT | _SLIDING, CLIP) | {"mm_tokens_per_image": 4}),
    Family("gemma4", "Gemma 4", _with_tower(_TEXT | _SLIDING, CLIP)),
    Family("mistral", "Mistral 7B", _TEXT),
    Family(
        "mistral3",
        "Mistral Small 3, Ministral 3",
        _with_tower({"model_type": "mistral", **_TEXT}, {"model_type": "pixtral", **CLIP}),
    ),
    Family("qwen3_vl", "Qwen3-VL", _with_tower(_TEXT | _MROPE, _QWEN_TOWER | {"deepstack_visual_indexes": [0]})),
    Family(
        "qwen3_vl_moe",
        "Qwen3-VL-30B-A3B",
        _with_tower(_TEXT | _EXPERTS | _MROPE, _QWEN_TOWER | {"deepstack_visual_indexes": [0]}),
    ),
    Family("qwen2_5_vl", "Qwen2.5-VL", {}, reason="vLLM's class loads a processor that needs torchvision"),
    Family(
        "qwen3_next",
        "Qwen3-Next-80B-A3B",
        _TEXT | _EXPERTS | _LINEAR | {"shared_expert_intermediate_size": 64, "decoder_sparse_step": 1},
    ),
    Family("glm4_moe", "GLM-4.5, 4.6, 4.7", _TEXT | _ROUTED),
    Family("glm4v", "GLM-4.1V, GLM-4.6V-Flash", _with_tower(_TEXT | {"attention_bias": True}, _GLM_TOWER)),
    Family("glm4v_moe", "GLM-4.5V, GLM-4.6V", _with_tower(_TEXT | _ROUTED, _GLM_TOWER)),
    Family(
        "deepseek_v3",
        "DeepSeek-V3, Kimi K2",
        _TEXT
        | _ROUTED
        | {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32},
    ),
    Family("gpt_oss", "gpt-oss", _TEXT | _SLIDING | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    Family("phi3", "Phi-3, Phi-4", _TEXT | {"original_max_position_embeddings": 512}),
    Family("gemma2", "Gemma 2", _TEXT),
    Family("olmo3", "OLMo 3", _TEXT | _SLIDING),
    Family("smollm3", "SmolLM3", _TEXT),
    Family("granite", "Granite 3", _TEXT),
    Family(
        "granitemoehybrid",
        "Granite 4",
        _TEXT
        | {
            "layer_types": ["mamba", "attention"],
            "num_local_experts": 0,
            "mamba_n_heads": 8,
            "mamba_d_head": "auto",
            "shared_intermediate_size": 256,
        },
    ),
    Family("falcon_h1", "Falcon-H1", _TEXT | {"mamba_d_ssm": 256, "mamba_n_heads": 4, "mamba_d_head": 64}),
    Family(
        "lfm2",
        "LFM2",
        _TEXT
        | {
            "layer_types": ["conv", "full_attention"],
            "conv_dim": 256,
            "block_dim": 256,
            "block_ff_dim": 256,
            "block_multiple_of": 64,
            "block_auto_adjust_ff_dim": False,
            "block_ffn_dim_multiplier": 1.0,
        },
    ),
    Family(
        "llama4",
        "Llama 4",
        _with_tower(
            _TEXT | {"num_local_experts": 4, "intermediate_size_mlp": 256, "num_experts_per_tok": 1},
            CLIP
            | {
                "image_size": 56,
                "patch_size": 14,
                "vision_output_dim": 64,
                "projector_input_dim": 64,
                "projector_output_dim": 64,
            },
        ),
    ),
    Family(
        "llava",
        "LLaVA",
        _with_tower({"model_type": "qwen2", **_TEXT}, {"model_type": "clip_vision_model", **CLIP}),
    ),
    Family("idefics3", "Idefics3, SmolVLM", _with_tower({"model_type": "llama", **_TEXT}, CLIP)),
    Family("internvl", "InternVL 3", {}, reason="vLLM's class needs torchvision"),
    Family("gemma3n", "Gemma 3n", {}, reason="transformers' class needs timm"),
)
TRAINED = {
    "qwen2": "test_numerics.py",
    "llama": "test_two_nodes.py",
    "gemma2": "test_numerics.py",
    "phi3": "test_numerics.py",
    "qwen3": "test_init.py",
    "glm4_moe": "test_numerics.py",
    "llava": "test_multimodal.py",
    "gemma3": "test_multimodal.py",
    "mistral3": "test_multimodal.py",
    "qwen3_5": "test_multimodal.py",
    "qwen3_vl": "test_images.py",
}
"""By model type: where in tests/multiprocess a tiny one is trained, and the engine verified at every step."""
