"""`grpo plan` of prompts with images, against numbers worked out by hand."""

from typing import Any

import pytest

from tests.support.planned_cluster import LLAMA_8B, Cluster, lines_of

CLIP = {  # openai/clip-vit-large-patch14-336
    "model_type": "clip_vision_model",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
    "projection_dim": 768,
}
LLAVA = {
    "model_type": "llava",
    "architectures": ["LlavaForConditionalGeneration"],
    "text_config": LLAMA_8B,
    "vision_config": CLIP,
    "image_token_index": 128255,
    "tie_word_embeddings": False,
}
QWEN_VL = {
    "model_type": "qwen3_vl",
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "text_config": {
        "model_type": "qwen3_vl_text", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]},
    },
    "vision_config": {
        "depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "out_hidden_size": 2048,
        "patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2, "deepstack_visual_indexes": [5, 11, 17],
    },
    "tie_word_embeddings": True,
}  # fmt: skip
ROWS, MICRO_BATCH = 32, 8  # of a rank's generation batch, and of one forward pass
TEXT = 8_030_261_248


def plan(cluster: Cluster, model: dict[str, Any], *words: str, **settings: Any) -> dict[str, Any]:
    return cluster.read(
        "--config_file", cluster.accelerate(4, 28), "--config", cluster.training(model, **settings), *words
    )


def test_vision_towers_with_images_count_in_engines_and_training(cluster: Cluster) -> None:
    text, images = plan(cluster, LLAVA), plan(cluster, LLAVA, "--images", "2")
    assert images["errors"] == []
    towers = images["model"]["tower_parameters"]
    assert images["model"]["num_parameters"] == TEXT + towers
    before, after = text["estimates"], images["estimates"]
    assert after["engine"]["weights_bytes"] - before["engine"]["weights_bytes"] == 2 * towers
    assert before["engine"]["encoder_cache_bytes"] == 0
    assert after["engine"]["encoder_cache_bytes"] == 16384 * 4096 * 2
    assert after["sync"]["engine_bytes"] == before["sync"]["engine_bytes"] + 2 * towers
    assert images["model"]["trained"]["elements"] == TEXT + towers
    assert "are trained too; each engine keeps up to 8 GiB of images in the host's memory" in images["trains"]
    assert "stay frozen, in no engine" in text["trains"]


def test_pixels_and_tower_activations_match_hand_calculation(cluster: Cluster) -> None:
    with_checkpointing = lines_of(plan(cluster, LLAVA, "--images", "2")["estimates"]["training"])
    assert with_checkpointing["pixels"] == 2 * ROWS * 336 * 336 * 3 * 4
    patches = 2 * MICRO_BATCH * 24 * 24
    layer = 2 * 8 * 1024 + 2 * (4 * 1024 + 2 * 4096)
    assert with_checkpointing["tower_activations"] == patches * (24 * 1024 * 2 + layer)
    without = plan(cluster, LLAVA, "--images", "2", gradient_checkpointing=False)
    assert lines_of(without["estimates"]["training"])["tower_activations"] == patches * 24 * layer


@pytest.mark.parametrize("settings", [{"freeze_towers": True}, {"use_peft": True, "lora_target_modules": "all-linear"}])
def test_frozen_tower_keeps_no_activations(settings: dict[str, Any], cluster: Cluster) -> None:
    found = plan(cluster, LLAVA, "--images", "1", **settings)
    lines = lines_of(found["estimates"]["training"])
    assert lines["pixels"]
    assert "tower_activations" not in lines
    assert "stay frozen; each engine" in found["trains"]
    assert found["estimates"]["engine"]["encoder_cache_bytes"]


def test_image_size_option_sets_pixels_and_tower_activations(cluster: Cluster) -> None:
    assumed = plan(cluster, QWEN_VL, "--images", "1")
    assert any("images of 1024 x 1024 pixels (--image-size)" in each for each in assumed["assumptions"])
    found = plan(cluster, QWEN_VL, "--images", "1", "--image-size", "640x480")
    assert not any("--image-size" in each for each in found["assumptions"])
    lines = lines_of(found["estimates"]["training"])
    assert lines["pixels"] == ROWS * 640 * 480 * 3 * 4 * 2  # two frames
    layer = 2 * 8 * 1024 + 2 * (4 * 1024 + 2 * 4096)
    assert lines["tower_activations"] == MICRO_BATCH * 40 * 30 * (24 * 1024 * 2 + layer)


def test_images_with_text_model_are_refused(cluster: Cluster) -> None:
    (error,) = plan(cluster, LLAMA_8B, "--images", "1")["errors"]
    assert error == "--images 1, but a llama takes text alone"


def test_image_size_of_one_number_is_refused(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cluster.plan("--model", "a", "--images", "1", "--image-size", "640")
    assert "write it as 1024x768" in capsys.readouterr().err
