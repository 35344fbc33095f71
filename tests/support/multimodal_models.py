"""Multimodal checkpoints of a few hundred thousand parameters, made on the spot, with their processors."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3ImageProcessorPil,
    Gemma3Processor,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2VLImageProcessorPil,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from grpo.model.text_part import placeholder_ids
from tests.families.families import CLIP
from tests.support.tiny_models import VOCAB_SIZE, tiny_tokenizer

ROOT = Path(__file__).resolve().parents[2]
STAND_IN = Path(__file__).with_name("torchvision_stand_in")
OF_TOWER = "vision_tower."
_TEXT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": None,
}
_QWEN_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 8,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 16,
}
# Parts and plain text alike, as this year's templates take them.
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for p in m['content'] %}"
    "{% if p['type'] == 'image' %}<image>{% else %}{{ p['text'] }}{% endif %}{% endfor %}{% endif %} {% endfor %}"
    "{% if add_generation_prompt %}= {% endif %}"
)


def _with_tokens(*special: str, **named: str) -> PreTrainedTokenizerFast:
    """Tiny tokenizer with more tokens; of those with a name it keeps the id."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [*special, *named.values()]})
    tokenizer._set_model_specific_special_tokens(named)
    return tokenizer


def _llava() -> tuple[PretrainedConfig, type[PreTrainedModel], Any]:
    """CLIP beside Qwen2, heads untied; the tower's names in the checkpoint are not those in memory."""
    tokenizer = _with_tokens("<image>")
    image = tokenizer.convert_tokens_to_ids("<image>")
    config = LlavaConfig(
        text_config=Qwen2Config(**_TEXT, tie_word_embeddings=False),
        vision_config=CLIPVisionConfig(**CLIP, projection_dim=64),
        image_token_id=image,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        tie_word_embeddings=False,
    )
    processor = LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}),
        tokenizer=tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
        chat_template=CHAT_TEMPLATE,
    )
    return config, LlavaForConditionalGeneration, processor


def _qwen3_5() -> tuple[PretrainedConfig, type[PreTrainedModel], Any]:
    """A layer of linear attention and one of attention; vLLM's kernel for the first takes heads of 128 and bfloat16."""
    tokenizer = _with_tokens("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    ids = tokenizer.convert_tokens_to_ids
    config = Qwen3_5Config(
        text_config={
            **_TEXT,
            "head_dim": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "tie_word_embeddings": True,
        },
        vision_config={"depth": 1, **_QWEN_TOWER},
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
        tie_word_embeddings=True,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return config, Qwen3_5ForConditionalGeneration, tokenizer


def _gemma3() -> tuple[PretrainedConfig, type[PreTrainedModel], Any]:
    """SigLIP beside Gemma 3, tied; a sliding layer and a full one."""
    marks = {"image_token": "<image>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    tokenizer = _with_tokens("\n", "\n\n", "\n\n\n", "\n\n\n\n", **marks)  # vLLM's processor looks for them
    ids = tokenizer.convert_tokens_to_ids
    config = Gemma3Config(
        text_config={
            **_TEXT,
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 16,
        },
        vision_config={**CLIP, "vision_use_head": False},  # as on the hub: nothing reads it
        image_token_index=ids("<image>"),
        boi_token_index=ids("<start_of_image>"),
        eoi_token_index=ids("<end_of_image>"),
        mm_tokens_per_image=4,
    )
    size = {"height": 32, "width": 32}
    processor = Gemma3Processor(
        image_processor=Gemma3ImageProcessorPil(size=size, image_mean=[0.5] * 3, image_std=[0.5] * 3),
        tokenizer=tokenizer,
        image_seq_length=4,
        chat_template=CHAT_TEMPLATE.replace("<image>", "<start_of_image>"),
    )
    return config, Gemma3ForConditionalGeneration, processor


def _qwen3_vl() -> tuple[PretrainedConfig, type[PreTrainedModel], Any]:
    """Three positions for each token of an image (M-RoPE), and features of the tower in several layers. Processor and
    engine need torchvision."""
    tokenizer = _with_tokens(
        "<|vision_start|>", "<|vision_end|>", image_token="<|image_pad|>", video_token="<|video_pad|>"
    )
    ids = tokenizer.convert_tokens_to_ids
    config = Qwen3VLConfig(
        text_config={
            **_TEXT,
            "head_dim": 32,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
        },
        vision_config={"depth": 2, **_QWEN_TOWER, "deepstack_visual_indexes": [0]},
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
        tie_word_embeddings=True,
    )
    size = {"shortest_edge": 32 * 32, "longest_edge": 64 * 64}
    processor = Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessorPil(patch_size=8, temporal_patch_size=2, merge_size=2, size=size),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(patch_size=8, temporal_patch_size=2, merge_size=2, size=size),
        chat_template=CHAT_TEMPLATE.replace("<image>", "<|vision_start|><|image_pad|><|vision_end|>"),
    )
    return config, Qwen3VLForConditionalGeneration, processor


def _mistral3() -> tuple[PretrainedConfig, type[PreTrainedModel], Any]:
    """Pixtral beside Mistral, heads untied."""
    tokenizer = _with_tokens("[IMG]")
    config = Mistral3Config(
        text_config={"model_type": "mistral", **_TEXT, "head_dim": 32, "tie_word_embeddings": False},
        vision_config={"model_type": "pixtral", **CLIP},
        image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"),
        vision_feature_layer=-1,
        tie_word_embeddings=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return config, Mistral3ForConditionalGeneration, tokenizer


MAKERS: dict[str, Callable[[], tuple[PretrainedConfig, type[PreTrainedModel], Any]]] = {
    "llava": _llava,
    "qwen3_5": _qwen3_5,
    "gemma3": _gemma3,
    "mistral3": _mistral3,
}
WITH_TORCHVISION = {"qwen3_vl": _qwen3_vl}
"""Not only their engines need it, but those who make them too."""


def _say_no_placeholder(model: PreTrainedModel) -> None:
    """As checkpoints have learnt: tokens that stand for images have no probability. Engines leave them out, and the
    trainer's log-probabilities count them."""
    embeddings, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    with torch.no_grad():
        embeddings[:, 0] = 0.1
        for name, parameter in model.get_decoder().named_parameters():
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                parameter[0] = 0  # what is in place 0 stays there, whatever follows
        head[[*placeholder_ids(model.config)], 0] = -10.0  # embeddings too, where they are tied: of no use


def engines_environment() -> dict[str, str]:
    """In which a job's engines can load them without torchvision."""
    return {"PYTHONPATH": f"{ROOT}:{STAND_IN}"}


def save_multimodal_model(family: str, folder: Path) -> Path:
    """A random model in float32 with its processor or tokenizer, as a plain Hugging Face folder.

    Towers stand in it under the names that checkpoints on the hub have, which transformers gives back only to models
    that it has loaded so (5.17).
    """
    config, model_class, processor = (MAKERS | WITH_TORCHVISION)[family]()
    torch.manual_seed(0)
    model = model_class(config).float()
    for parameter in model.parameters():
        if parameter.ndim == 2 and not parameter.any():
            torch.nn.init.normal_(parameter, std=0.02)  # Gemma's projector, with which all pictures would be the same
    _say_no_placeholder(model)
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    if OF_TOWER + "embeddings.patch_embedding.weight" in weights:
        named = {name.replace(OF_TOWER, f"{OF_TOWER}vision_model."): tensor for name, tensor in weights.items()}
        save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    processor.save_pretrained(folder)
    return folder


def towers_of(folder: Path) -> dict[str, torch.Tensor]:
    """Under the names of the checkpoint."""
    files = sorted(folder.glob("model*.safetensors"))
    weights = {name: tensor for file in files for name, tensor in load_file(file).items()}
    return {name: tensor for name, tensor in weights.items() if "language_model" not in name and "lm_head" not in name}
