"""Which part of a multimodal checkpoint is trained, travels and is adapted; and its processor."""

import copy
import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from transformers import AutoConfig, AutoProcessor, AutoTokenizer, LlavaProcessor, conversion_mapping
from transformers.core_model_loading import revert_weight_conversion

from grpo import GRPOConfig
from grpo.config.models import EngineModel, engine_args
from grpo.model.text_part import (
    freeze_towers,
    is_hybrid,
    is_multimodal,
    model_class,
    model_without_weights,
    placeholder_ids,
    tower_paths,
    tower_tensors,
)
from grpo.place.topology import read_topology
from grpo.preflight.lora import around_towers, choose_lora
from grpo.preflight.processor import processor_of
from grpo.weights.source import GatheredSource
from tests.support.multimodal_models import MAKERS, save_multimodal_model
from tests.support.tiny_models import FAMILIES, tiny_config, tiny_model

TOWERS = {
    "llava": ("model.vision_tower", "model.multi_modal_projector"),
    "gemma3": ("model.vision_tower", "model.multi_modal_projector"),
    "mistral3": ("model.vision_tower", "model.multi_modal_projector"),
    "qwen3_5": ("model.visual",),
}

LINEAR = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("multimodal")
    return {family: save_multimodal_model(family, root / family) for family in MAKERS}


def arguments(tmp_path: Path, **settings: object) -> GRPOConfig:
    return GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", [*FAMILIES, *MAKERS])
def test_model_without_weights_caches_checkpoint_names(
    family: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And are the ones that transformers finds by itself, in a walk over all modules for each tensor."""
    model = model_without_weights(
        tiny_config(family) if family in FAMILIES else AutoConfig.from_pretrained(folders[family])
    )
    alike = copy.deepcopy(model)
    del alike._weight_conversions
    by_itself = {name: revert_weight_conversion(alike, {name: t}).keys() for name, t in alike.state_dict().items()}
    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", None)
    noted = {name: revert_weight_conversion(model, {name: t}).keys() for name, t in model.state_dict().items()}
    assert noted == by_itself


@pytest.mark.parametrize("family", MAKERS)
def test_multimodal_model_syncs_text_and_freezes_towers(family: str, folders: dict[str, Path]) -> None:
    config = AutoConfig.from_pretrained(folders[family])
    model = model_without_weights(config)
    assert type(model) is model_class(config) is MAKERS[family]()[1]
    assert tower_paths(model) == TOWERS[family]
    assert (is_multimodal(config), is_hybrid(config)) == (True, family == "qwen3_5")
    travelling = {meta.name for meta in GatheredSource(
        model, wire_dtype=torch.float32, bucket_bytes=2**20
    ).checkpoint_metas}  # fmt: skip
    stay = {name for name, _ in model.named_parameters() if name.startswith(TOWERS[family])}
    assert stay == {name for name in tower_tensors(model) if name in dict(model.named_parameters())} != set()
    assert not any("vision" in name or "visual" in name or "projector" in name for name in travelling)
    assert freeze_towers(model) == sum(model.get_parameter(name).numel() for name in stay)
    assert {name for name, parameter in model.named_parameters() if not parameter.requires_grad} == stay
    tokenizer = AutoTokenizer.from_pretrained(folders[family])
    named = {
        "llava": ["<image>"],
        "gemma3": ["<image>"],
        "mistral3": ["[IMG]"],
        "qwen3_5": ["<|image_pad|>", "<|video_pad|>"],
    }[family]
    assert {*tokenizer.convert_tokens_to_ids(named)} <= placeholder_ids(config)


@pytest.mark.parametrize("family", FAMILIES)
def test_tower_paths_of_text_model_are_empty(family: str) -> None:
    model = tiny_model(family)
    assert tower_paths(model) == () == tuple(tower_tensors(model))
    assert (freeze_towers(model), placeholder_ids(model.config)) == (0, set())
    assert (is_multimodal(model.config), is_hybrid(model.config)) == (False, False)


@pytest.mark.parametrize(
    ("targets", "excluded"), [("all-linear", None), (["q_proj", "v_proj"], ["layers.0.self_attn.v_proj"])]
)
def test_choose_lora_of_multimodal_model_leaves_out_towers(
    targets: str | list[str], excluded: list[str] | None, folders: dict[str, Path], tmp_path: Path
) -> None:
    """CLIP's projections are named as Qwen2's; what the user leaves out stays out."""
    args, model = arguments(tmp_path), str(folders["llava"])
    given = LoraConfig(r=4, target_modules=targets, exclude_modules=excluded)
    used = around_towers(given, model, args)
    assert given.exclude_modules == (excluded and {*excluded}), "the user's own is left as it is"
    choice = choose_lora(model, used, None, args, has_gpus=False)
    assert choice is not None
    of_text = ["q_proj", "v_proj"] if excluded else LINEAR
    assert (choice.way, [*choice.slot.layers]) == ("adapter", of_text)
    with pytest.raises(ValueError, match=r"has an adapter on model\.vision_tower\..*exclude_modules"):
        choose_lora(model, given, None, args, has_gpus=False)
    plain = LoraConfig(r=4, target_modules=r".*language_model.*q_proj")
    assert around_towers(plain, model, args) is plain


def test_engine_args_of_multimodal_model_load_text_only(folders: dict[str, Path], tmp_path: Path) -> None:
    args = arguments(tmp_path)
    topology = read_topology(
        use_cpu=True, reserved_gpus=None, tensor_parallel_size=1, engines_per_node=1, num_attention_heads=None,
        num_key_value_heads=None,
    )  # fmt: skip
    named = {"path": "x", "tokenizer": "x", "revision": None, "dtype": torch.float32}
    keys = {"language_model_only", "enable_prefix_caching"}
    for is_one, hybrid in ((False, False), (True, False), (True, True)):
        model = EngineModel(**named, is_multimodal=is_one, is_hybrid=hybrid)
        found = {key: value for key, value in engine_args(args, model, topology).items() if key in keys}
        assert found == {**({"language_model_only": True} if is_one else {}),
                         **({"enable_prefix_caching": False} if hybrid else {})}  # fmt: skip


def test_processor_of_multimodal_model_gives_and_saves_tokenizer(folders: dict[str, Path], tmp_path: Path) -> None:
    inputs = {"args": arguments(tmp_path), "processing_class": None, "model": str(folders["llava"])}
    for given in (None, AutoProcessor.from_pretrained(folders["llava"])):
        found = processor_of({**inputs, "processing_class": given})
        assert found is not None
        assert found.tokenizer.chat_template.startswith("{% for m in messages %}")
        saved = tmp_path / f"saved-{given is None}"
        found.tokenizer.save_pretrained(saved)
        found.save(saved)
        assert isinstance(AutoProcessor.from_pretrained(saved), LlavaProcessor)


def test_processor_of_older_checkpoint_finds_chat_template(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "older"
    folder.mkdir()
    for file in folders["llava"].iterdir():
        if file.name != "chat_template.jinja":
            (folder / file.name).write_bytes(file.read_bytes())
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    inputs = {"args": arguments(tmp_path), "processing_class": None, "model": str(folder)}
    found = processor_of(inputs)
    assert found is not None
    assert found.tokenizer.chat_template == "{{ messages }}"
    assert processor_of({**inputs, "model": str(folders["gemma3"])}) is not None
