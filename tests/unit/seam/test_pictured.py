"""Forward passes with images: the row that stands in where none has any."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from grpo.config.models import without_tokens
from grpo.model.picture_probe import picture_probe
from grpo.model.pictures import has_image_parts
from grpo.seam.pictured import Pictures, with_stand_in
from grpo.seam.trimming import Trimming
from tests.support.multimodal_models import save_multimodal_model
from tests.support.pictured_data import picture, pictured

PAD = 0


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_multimodal_model("llava", tmp_path_factory.mktemp("pictured") / "llava")


@pytest.fixture
def stand_in(llava: Path) -> dict[str, torch.Tensor]:
    return picture_probe(AutoProcessor.from_pretrained(llava), "3+4").stand_in


@pytest.mark.parametrize("length", [6, 60])  # shorter than the row that stands in, and longer
def test_with_stand_in_scores_other_rows_as_alone(length: int, llava: Path, stand_in: dict[str, torch.Tensor]) -> None:
    model, kept = AutoModelForImageTextToText.from_pretrained(llava).eval(), 3
    token_ids = torch.randint(5, 20, (2, length))
    mask = torch.ones_like(token_ids)
    mask[1, :2], token_ids[1, :2] = 0, PAD
    chunk = with_stand_in({"input_ids": token_ids, "attention_mask": mask}, stand_in, kept, PAD)
    num_rows, width = chunk["input_ids"].shape
    assert (num_rows, chunk["num_images"]) == (3, [0, 0, 1])
    assert width == max(length, stand_in["input_ids"].shape[1] + kept)
    assert chunk["attention_mask"][2, -kept:].eq(0).all()  # of which nothing is scored
    with torch.no_grad():
        beside = model(
            **{name: chunk[name] for name in ("input_ids", "attention_mask", "pixel_values")}, logits_to_keep=kept
        ).logits[:2]
        alone = model(input_ids=token_ids, attention_mask=mask, logits_to_keep=kept).logits
    assert torch.allclose(beside, alone, atol=1e-5)


def test_with_stand_in_gives_vision_tower_zero_gradient(llava: Path, stand_in: dict[str, torch.Tensor]) -> None:
    """Its gradient is zero and there: ranks reduce the same tensors whatever their rows have."""
    model = AutoModelForImageTextToText.from_pretrained(llava)
    token_ids = torch.randint(5, 20, (2, 6))
    chunk = with_stand_in({"input_ids": token_ids, "attention_mask": torch.ones_like(token_ids)}, stand_in, 3, PAD)
    fields = {name: chunk[name] for name in ("input_ids", "attention_mask", "pixel_values")}
    model(**fields, logits_to_keep=3).logits[:2].logsumexp(-1).sum().backward()
    weight = model.model.vision_tower.get_parameter("embeddings.patch_embedding.weight")
    assert weight.grad is not None
    assert not weight.grad.any()


def test_tokenize_with_image_after_text_rows_raises() -> None:
    """Which text alone is trained of, by the first row: TRL would hand the engine a prompt without its image."""
    view: Any = SimpleNamespace(args=SimpleNamespace(local_mode=True))
    with pytest.raises(ValueError, match=r"the first row has none, .*: put a row with an image first"):
        Pictures(view, Trimming(view)).tokenize(lambda prompts: ([[1]], [[picture(0)]], {}), ["1+1="])


def test_has_image_parts_reads_prompt_feature_types() -> None:
    assert has_image_parts(pictured(["1+1=", "2+2="], "messages", without=[0]))
    assert not has_image_parts(pictured(["1+1="], "image"))


def test_without_tokens_biases_placeholders_out() -> None:
    assert without_tokens({"top_p": 1.0}, ()) == {"top_p": 1.0}
    assert without_tokens({}, {7})["logit_bias"] == {7: -100.0}
    assert without_tokens({"logit_bias": {3: 1.0}}, {7})["logit_bias"] == {3: 1.0, 7: -100.0}
