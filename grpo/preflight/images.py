"""Checks for images in the data, and that the other arguments support them."""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase
from trl.data_utils import is_conversational

from grpo.config import GRPOConfig
from grpo.config.models import base_of, readable_config
from grpo.model.pictures import column_of_images, has_image_parts, kinds_of_parts
from grpo.model.text_part import is_multimodal
from grpo.preflight.data import first_row


def takes_images(inputs: Mapping[str, Any]) -> bool:
    """True if prompts have images, in a column of a data set or in the first row's messages. Otherwise only the text
    part of a multimodal model is trained.

    Args:
        inputs: the trainer's arguments.

    Raises:
        ValueError: names the argument without support for images, and the fix.
    """
    args: GRPOConfig = inputs["args"]
    config = readable_config(base_of(inputs["model"]), args)
    is_of_text = config is not None and not is_multimodal(config)  # an unreadable one fails later, with a message
    where = _where(inputs, may_say_so=not is_of_text)
    if where is None:
        return False
    if is_of_text:
        name = (getattr(config, "architectures", None) or [type(config).__name__])[0]
        raise ValueError(
            f"{where}, but the model, a {name}, takes text alone: take a multimodal one (…ForConditionalGeneration), "
            "or leave images out: dataset.remove_columns"
        )
    given = inputs["processing_class"]
    if isinstance(given, PreTrainedTokenizerBase):
        raise ValueError(
            f"{where}, but processing_class is a tokenizer ({type(given).__name__}): give the model's processor, "
            "AutoProcessor.from_pretrained(…, padding_side='left'), or leave it out"
        )
    for name in ("tools", "environment_factory", "rollout_func"):
        if inputs[name]:
            raise ValueError(f"{where}, which do not go with {name} yet: train without one of them")
    if args.generation_lookahead:
        raise ValueError(
            f"{where}, and generation_lookahead is {args.generation_lookahead}: prompts with images are not read "
            "ahead yet; set it to 0"
        )
    row = first_row(inputs["train_dataset"])
    if not is_conversational(row):
        raise ValueError(
            f"{where}, but the first prompt is plain text, in which an image has no place: make each prompt a list of "
            "messages, [{'role': 'user', 'content': …}]"
        )
    return True


def _where(inputs: Mapping[str, Any], *, may_say_so: bool) -> str | None:
    """Describe where the images are; None without any.

    Args:
        may_say_so: count a data set whose types allow images in messages.
    """
    for setting in ("train_dataset", "eval_dataset"):
        data = inputs[setting]
        for part in data.values() if isinstance(data, Mapping) else [data]:
            if (column := column_of_images(part)) is not None:
                return f"{setting} has images in its column {column!r}"
    dataset = inputs["train_dataset"]
    if dataset is None or inputs["environment_factory"]:  # which gives the prompts
        return None
    in_first_row = "image" in kinds_of_parts(first_row(dataset)["prompt"])
    in_types = may_say_so and has_image_parts(dataset)
    return "prompts have images in their messages" if in_first_row or in_types else None
