"""Whether prompts come with images, and what does not go with them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import AutoProcessor, AutoTokenizer

from grpo import GRPOConfig
from grpo.preflight.images import takes_images
from grpo.preflight.processor import load_processor
from tests.support.multimodal_models import save_multimodal_model
from tests.support.pictured_data import pictured
from tests.support.tiny_models import save_tiny_model

TEXTS = [f"{a}+1=" for a in range(4)]
TEXT = Dataset.from_dict({"prompt": TEXTS})
PLAIN = pictured(TEXTS, "image").map(lambda row: {"prompt": "1+1="}, remove_columns="prompt")


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_multimodal_model("llava", tmp_path_factory.mktemp("images") / "llava")


@pytest.fixture
def inputs(llava: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    def of(train_dataset: Any, *, ahead: int = 0, **given: Any) -> dict[str, Any]:
        args = GRPOConfig(
            output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", generation_lookahead=ahead
        )
        nothing = dict.fromkeys(
            ("processing_class", "eval_dataset", "tools", "environment_factory", "rollout_func")
        )  # fmt: skip
        return {"args": args, "model": str(llava), "train_dataset": train_dataset, **nothing, **given}

    return of


@pytest.mark.parametrize("where", ["image", "images", "messages"])
@pytest.mark.parametrize("without", [[], [0], [0, 1, 2]])
def test_takes_images_with_images_wherever_trl_accepts_them_is_true(
    where: str, without: list[int], inputs: Callable
) -> None:
    """Also where the first row has none: the columns, or the types of the messages' parts, say that others may."""
    assert takes_images(inputs(pictured(TEXTS, where, without=without)))


def test_takes_images_with_text_prompts_is_false(inputs: Callable) -> None:
    assert not takes_images(inputs(TEXT))
    assert not takes_images(inputs(Dataset.from_dict({"prompt": [[{"role": "user", "content": "1+1="}]]})))
    parts = [{"type": "text", "text": "1+1="}]
    assert not takes_images(inputs(Dataset.from_dict({"prompt": [[{"role": "user", "content": parts}]]})))


def test_takes_images_with_images_in_eval_dataset_is_true(inputs: Callable) -> None:
    multi_turn = pictured(TEXTS, "image").remove_columns("image")
    assert takes_images(inputs(multi_turn, eval_dataset={"one": TEXT, "two": pictured(TEXTS, "images")}))


def _tool(a: int) -> int:
    return a


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a batch ahead": ({"ahead": 1}, r"generation_lookahead is 1: .*set it to 0"),
    "tools": ({"tools": [_tool]}, r"column 'image', which do not go with tools yet"),
    "a rollout function": ({"rollout_func": print}, r"which do not go with rollout_func yet"),
    "environments": ({"environment_factory": dict}, r"which do not go with environment_factory yet"),
    "plain text": ({"train_dataset": PLAIN}, r"the first prompt is plain text, .*make each prompt a list of messages"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_takes_images_with_incompatible_setting_raises(case: str, inputs: Callable) -> None:
    given, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        takes_images(inputs(**{"train_dataset": pictured(TEXTS, "image"), **given}))


def test_takes_images_with_tokenizer_as_processing_class_raises(inputs: Callable, llava: Path) -> None:
    with pytest.raises(ValueError, match=r"processing_class is a tokenizer .*give the model's processor"):
        takes_images(inputs(pictured(TEXTS, "image"), processing_class=AutoTokenizer.from_pretrained(llava)))
    assert takes_images(inputs(pictured(TEXTS, "image"), processing_class=AutoProcessor.from_pretrained(llava)))


def test_takes_images_with_text_only_model_refuses_images(inputs: Callable, tmp_path: Path) -> None:
    """Of messages the first row alone decides then: other data sets have the same types by chance."""
    model = str(save_tiny_model("qwen3-tied", tmp_path / "text"))
    with pytest.raises(ValueError, match=r"column 'image', but the model, a Qwen3ForCausalLM, takes text alone"):
        takes_images(inputs(pictured(TEXTS, "image"), model=model))
    assert not takes_images(inputs(pictured(TEXTS, "messages", without=[0]), model=model))


def test_load_processor_without_processor_files_names_checkpoint(inputs: Callable, llava: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (bare / file).write_bytes((llava / file).read_bytes())
    with pytest.raises(
        ValueError, match=r"the processor of '.*bare', which prompts with images need, cannot be loaded"
    ):
        load_processor(str(bare), inputs(TEXT)["args"])
