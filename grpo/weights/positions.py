"""Position ids, so that the trainer's scores do not depend on the padding of prompts.

TRL pads prompts on the left and passes no `position_ids` (1.16). A model that takes a token's position from its place
in the row (GPT-2, GPT-Neo, GPT-BigCode, XGLM, BioGPT) then scores other positions than the engine, which pads nothing,
has sampled at.
"""

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

NUM_PADS = 8
MENDED_SHARE = 1 / 3
"""Share of the limit above which a difference is fixed if possible; above the limit itself it is refused."""

_log = logging.getLogger(__name__)


def make_padding_harmless(models: Sequence[nn.Module], apart: Callable[[], float], limit: float) -> None:
    """Make `models` count positions without pads, if that matters. Collective, as `apart` is.

    Args:
        models: unwrapped models TRL scores with; the first is the trained one.
        apart: scores the same tokens with and without pads; returns the gap, the same on every rank.
        limit: gap explained by rounding.

    Raises:
        ValueError: on every rank; the scores differ, and position ids do not help.
    """
    without = apart()
    if without <= MENDED_SHARE * limit:
        return
    taken_by = [backbone for model in models if _takes_positions(backbone := getattr(model, "base_model", model))]
    handles = [backbone.register_forward_pre_hook(add_positions, with_kwargs=True) for backbone in taken_by]
    mended = apart() if handles else without
    if mended <= min(limit, without / 2):
        _log.info(
            "left pads change the log-probabilities of a %s by %.2g nats: it is given position_ids from now on, and "
            "they change by %.2g",
            models[0].config.model_type,
            without,
            mended,
        )
        return
    _remove(handles)
    if without > limit:
        tried = f"with position_ids by {mended:.2g}" if handles else "and it takes no position_ids"
        raise ValueError(
            f"log-probabilities of a {models[0].config.model_type} depend on the pads to the left of a prompt "
            f"[GRPO-211]: with {NUM_PADS} of them they differ by {without:.2g} nats, {tried}, where rounding explains "
            f"{limit:.2g}. TRL pads prompts, the engine does not, so that what is sampled and what is learnt would be "
            "two policies: take a model with rotary positions, or one that reads its attention_mask"
        )


def add_positions(backbone: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook: add positions that count the tokens of `attention_mask`, if none are given."""
    token_ids = args[0] if args else kwargs.get("input_ids")
    mask = kwargs.get("attention_mask")
    if len(args) > 1 or kwargs.get("position_ids") is not None or token_ids is None:
        return None
    if not isinstance(mask, torch.Tensor) or mask.shape != token_ids.shape:  # with a cache, generation passes them
        return None
    return args, {**kwargs, "position_ids": (mask.long().cumsum(-1) - 1).clamp(min=0)}


def _takes_positions(backbone: nn.Module) -> bool:
    return "position_ids" in inspect.signature(backbone.forward).parameters


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
