"""The text part of a multimodal checkpoint: the modules trained in local mode, and the frozen ones.

Most current checkpoints are `...ForConditionalGeneration`: a text decoder, towers for images, video or sound, and
projectors. With text-only prompts the towers never run: they are frozen, no engine loads them, and no weight sync sends
them.
"""

from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel, conversion_mapping, core_model_loading
from transformers.utils import FEATURE_EXTRACTOR_NAME, PROCESSOR_NAME, VIDEO_PROCESSOR_NAME

PROCESSOR_FILES = (PROCESSOR_NAME, FEATURE_EXTRACTOR_NAME, VIDEO_PROCESSOR_NAME)
"""Files of a processor, apart from its tokenizer's."""

_ATTENTION = frozenset(("full_attention", "sliding_attention", "chunked_attention", "attention"))


def is_multimodal(config: Any) -> bool:
    """True if a model's configuration has a separate one for text."""
    return config.get_text_config() is not config


def is_hybrid(config: Any) -> bool:
    """True if there are layers with a recurrent state: linear attention, state spaces, convolutions."""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ()
    return not _ATTENTION.issuperset(kinds)


def model_class(config: Any) -> Any:
    """Class whose `from_pretrained` TRL calls (1.16): the checkpoint's own class, if transformers has it."""
    return getattr(transformers, (config.architectures or [""])[0], AutoModelForCausalLM)


def model_without_weights(config: Any, *, trust_remote_code: bool = False) -> Any:
    """Build the model that TRL loads for `config`, on the meta device."""
    found = model_class(config)
    with torch.device("meta"):
        is_auto = found is AutoModelForCausalLM
        model = found.from_config(config, trust_remote_code=trust_remote_code) if is_auto else found(config)
    # As `from_pretrained` notes them: else transformers looks for them in all modules, for each name converted (5.17).
    conversions = conversion_mapping.get_model_conversion_mapping(model, add_legacy=False)
    model._weight_conversions = [each for each in conversions if not isinstance(each, core_model_loading.PrefixChange)]
    return model


def tower_paths(model: Any) -> tuple[str, ...]:
    """Return the outermost modules outside the text part: `model.visual`, `model.multi_modal_projector`; () for a text
    model.

    Args:
        model: a transformers model, possibly with PEFT's layers.
    """
    if not _has_towers(model):
        return ()
    text = {id(module) for part in _text_parts(model) for module in part.modules()}
    holders = {id(model)} | {
        id(module) for _, module in model.named_modules() if any(id(inner) in text for inner in module.modules())
    }
    found: list[str] = []
    for path, module in model.named_modules():
        is_inside = any(path.startswith(f"{outer}.") for outer in found)
        if not is_inside and id(module) not in text | holders:
            found.append(path)
    return tuple(found)


def tower_tensors(model: Any) -> frozenset[str]:
    """Return names of parameters and buffers outside the text part; empty for a text model."""
    if not _has_towers(model):
        return frozenset()
    text = {id(each) for part in _text_parts(model) for each in (*part.parameters(), *part.buffers())}
    named = (*model.named_parameters(), *model.named_buffers())
    return frozenset(name for name, tensor in named if id(tensor) not in text)


def count_towers(model: Any) -> int:
    """Count the parameters outside the text part."""
    return sum(_whole_size(parameter) for parameter in _tower_parameters(model))


def freeze_towers(model: Any) -> int:
    """Freeze everything outside the text part.

    Returns:
        Number of frozen parameters.
    """
    for parameter in _tower_parameters(model):
        parameter.requires_grad_(False)
    return count_towers(model)


def placeholder_ids(config: Any) -> set[int]:
    """Ids of the placeholder tokens for images, video and the like: `image_token_id`, `video_token_id`."""
    if not is_multimodal(config):
        return set()
    named = {name: value for name, value in vars(config).items() if name.endswith(("_token_id", "_token_index"))}
    return {value for value in named.values() if isinstance(value, int)}


def describe_trained_parts(
    class_name: str, towers: Sequence[str], tower_elements: int, *, takes_images: bool = False, freezes: bool = True
) -> str:
    """One line for the screen about frozen and trained parts.

    Args:
        class_name: of a multimodal model.
        towers: from `tower_paths`.
        tower_elements: number of parameters in the towers.
        freezes: the towers are frozen.
    """
    size = f"{tower_elements / 1e9:.1f} B" if tower_elements >= 5e7 else f"{tower_elements:,}"
    names = " and ".join(path.rpartition(".")[2] for path in towers)
    if not takes_images:
        return f"trains the text part of {class_name}: {names} ({size} parameters) stay frozen, in no engine"
    what = "stay frozen" if freezes else "are trained too"
    return f"trains {class_name} on prompts with images: {names} ({size} parameters) {what}"


def _has_towers(model: Any) -> bool:
    return isinstance(model, PreTrainedModel) and is_multimodal(model.config)


def _text_parts(model: Any) -> list[nn.Module]:
    parts = (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings())
    return [part for part in parts if part is not None]


def _tower_parameters(model: Any) -> list[nn.Parameter]:
    names = tower_tensors(model)
    return [parameter for name, parameter in model.named_parameters() if name in names]


def _whole_size(parameter: nn.Parameter) -> int:
    return getattr(parameter, "ds_numel", parameter.numel())  # under ZeRO-3 a rank holds a part
