"""On which way adapters reach the engines, and what is said no to before anything starts."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM

from grpo import GRPOConfig
from grpo.preflight.lora import WITHOUT_LORA, choose_lora, with_revision
from tests.support.tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    families = ("llama-untied", "qwen3-tied", "qwen3-moe")
    return {name: str(save_tiny_model(name, tmp_path_factory.mktemp("models") / name)) for name in families}


def args_of(tmp_path: Path, **settings: Any) -> GRPOConfig:
    return GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", **settings)


def lora(**settings: Any) -> LoraConfig:
    return LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], **settings})


@pytest.mark.parametrize(
    ("family", "settings", "has_gpus", "why"),
    [
        ("llama-untied", {}, False, ""),
        ("qwen3-tied", {"use_rslora": True, "rank_pattern": {"v_proj": 64}}, False, ""),
        ("llama-untied", {}, True, "take 16 bits, and this engine computes in float32"),
        ("llama-untied", {"use_dora": True}, False, "vLLM has no DoRA"),
        ("llama-untied", {"bias": "all"}, False, "bias 'all' trains biases of the base"),
        ("llama-untied", {"modules_to_save": ["norm"]}, False, "modules_to_save trains norm"),
        ("llama-untied", {"target_modules": ["embed_tokens"]}, False, "adapts no embedding such as model.embed_tokens"),
        ("llama-untied", {"r": 513}, False, "ranks up to 512"),
        ("qwen3-moe", {}, False, "models with experts needs a GPU"),
    ],
)
def test_choose_lora_way_follows_vllm_support(
    family: str, settings: dict, has_gpus: bool, why: str, folders: dict[str, str], tmp_path: Path
) -> None:
    config = lora(**settings)
    choice = choose_lora(folders[family], config, None, args_of(tmp_path), has_gpus=has_gpus)
    assert choice is not None
    assert (choice.way, why in choice.why) == ("merge" if why else "adapter", True), choice
    assert choice.slot.rank == max([config.r, *config.rank_pattern.values()])
    if why:
        with pytest.raises(ValueError, match=r"vllm_lora is 'adapter', but .* set it to 'auto' or 'merge'"):
            choose_lora(folders[family], config, None, args_of(tmp_path, vllm_lora="adapter"), has_gpus=has_gpus)
    asked = choose_lora(folders[family], config, None, args_of(tmp_path, vllm_lora="merge"), has_gpus=has_gpus)
    assert asked is not None
    assert asked.way == "merge"


def test_lora_slot_engine_args_round_rank_up(folders: dict[str, str], tmp_path: Path) -> None:
    config = lora(r=9, target_modules=["o_proj", "q_proj"])
    choice = choose_lora(folders["llama-untied"], config, None, args_of(tmp_path), has_gpus=False)
    assert choice is not None
    assert choice.slot.engine_args == {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": 16,
        "lora_target_modules": ["o_proj", "q_proj"],
    }


@pytest.mark.parametrize(
    ("family", "config", "settings", "reported"),
    [
        ("llama-untied", PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"), {}, "a PrefixTuningConfig"),
        ("llama-untied", lora(target_modules=["query"]), {}, "does not fit LlamaForCausalLM: .*query.* not found"),
        ("llama-untied", lora(target_modules=["lm_head"]), {}, "the head, lm_head, which TRL's loss goes around"),
        ("qwen3-tied", lora(target_modules=["embed_tokens"]), {}, "embed_tokens, which is the head's weight too"),
        ("qwen3-moe", lora(target_modules="all-linear"), {}, "name those, such as q_proj|name linear layers"),
        ("llama-untied", lora(init_lora_weights="pissa"), {}, "'pissa', which changes the base's weights"),
        ("llama-untied", lora(bias="all"), {"beta": 0.1}, "biases of the base that are trained stay as they are"),
        ("qwen3-tied", lora(modules_to_save=["embed_tokens"]), {}, "modules_to_save takes the embedding or the head"),
        ("qwen3-tied", lora(modules_to_save=["lm_head"]), {}, "modules_to_save takes the embedding or the head"),
        ("llama-untied", lora(lora_bias=True), {}, "lora_bias True.*remove it"),
        ("llama-untied", lora(), {"sync_ref_model": True, "beta": 0.1}, "sync_ref_model: .*without its adapter"),
    ],
)
def test_choose_lora_with_unsupported_config_raises(
    family: str, config: Any, settings: dict, reported: str, folders: dict[str, str], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=reported):
        choose_lora(folders[family], config, None, args_of(tmp_path, **settings), has_gpus=False)


def test_choose_lora_with_peft_model_reads_its_layers(folders: dict[str, str], tmp_path: Path) -> None:
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folders["llama-untied"], dtype=torch.float32), lora())
    choice = choose_lora(model, None, None, args_of(tmp_path), has_gpus=False)
    assert choice is not None
    assert choice.slot.layers == ("q_proj", "v_proj")
    with pytest.raises(ValueError, match="give one of the two"):
        choose_lora(model, lora(), None, args_of(tmp_path), has_gpus=False)


def test_choose_lora_with_dropout_warns(folders: dict[str, str], tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"lora_dropout is 0\.1: .*noise in the importance ratio"):
        choose_lora(folders["llama-untied"], lora(lora_dropout=0.1), None, args_of(tmp_path), has_gpus=False)
    assert choose_lora(folders["llama-untied"], None, None, args_of(tmp_path), has_gpus=False) is None


def test_choose_lora_with_misnamed_or_frozen_adapter_raises(folders: dict[str, str], tmp_path: Path) -> None:
    def wrapped(name: str = "default") -> Any:
        plain = AutoModelForCausalLM.from_pretrained(folders["llama-untied"], dtype="float32")
        return get_peft_model(plain, lora(), adapter_name=name)

    with pytest.raises(ValueError, match=r"the adapter is named 'mine': .* want the name 'default'"):
        choose_lora(wrapped("mine"), None, None, args_of(tmp_path), has_gpus=False)
    frozen = wrapped()
    frozen.requires_grad_(False)
    with pytest.raises(ValueError, match="is_trainable=True"):
        choose_lora(frozen, None, None, args_of(tmp_path), has_gpus=False)


def test_with_revision_fills_in_missing_base_revision(tmp_path: Path) -> None:
    args = args_of(tmp_path, model_init_kwargs={"revision": "v2"})
    given = lora()
    found = with_revision(given, args)
    assert (found.revision, given.revision) == ("v2", None)
    assert with_revision(lora(revision="v1"), args).revision == "v1"
    assert with_revision(None, args) is None
    assert with_revision(given, args_of(tmp_path)) is given


@pytest.mark.parametrize("architecture", WITHOUT_LORA)
def test_without_lora_list_matches_vllm_source(architecture: str) -> None:
    """By its source, which takes no second to read."""
    package = Path(importlib.util.find_spec("vllm").origin).parent / "model_executor" / "models"  # type: ignore[arg-type,union-attr]
    (name,) = re.findall(rf'"{architecture}": \("\w+", "(\w+)"\)', (package / "registry.py").read_text())
    heads = [
        text.partition(f"class {name}(")[2].partition("):")[0]
        for text in (path.read_text() for path in package.glob("*.py"))
        if f"class {name}(" in text
    ]
    assert len(heads) == 1
    assert "SupportsLoRA" not in heads[0]
