"""Checks of quantised weights before anything starts: 4 bits below LoRA adapters, and nothing else."""

import copy
import importlib.util
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from transformers import BitsAndBytesConfig, PretrainedConfig
from transformers.integrations import is_deepspeed_zero3_enabled

from grpo.config import GRPOConfig
from grpo.config.models import base_of, compute_dtype, readable_config
from grpo.model.four_bit import INSTALL
from grpo.place.spelling import did_you_mean

FOUR_BITS = "quantization_config=BitsAndBytesConfig(load_in_4bit=True)"
_KEYS = {*inspect.signature(BitsAndBytesConfig).parameters} - {"kwargs"}
_DERIVED = {"quant_method", "_load_in_4bit", "_load_in_8bit"}  # written beside them by `to_dict`


def settle_quantisation(arguments: dict[str, Any]) -> None:
    """Check the requested quantisation, and put it where TRL reads it, with the engines' dtype for computation.

    TRL takes it as an argument, or in `model_init_kwargs`; from there it would quantise reward models too (1.16).

    Args:
        arguments: the trainer's; `args` is a copy of the user's.

    Raises:
        ValueError: names the unsupported setting, and the fix.
    """
    args: GRPOConfig = arguments["args"]
    model = arguments["model"]
    base = base_of(model)
    asked = given_once(arguments["quantization_config"], args.model_init_kwargs)
    if args.model_init_kwargs:
        args.model_init_kwargs = {k: v for k, v in args.model_init_kwargs.items() if k != "quantization_config"}
    if isinstance(model, str):
        check_own_quantisation(readable_config(model, args))
    elif asked is not None:
        raise ValueError(
            "quantization_config is given, but the model is an object, which is loaded already: give its name, or load "
            f"it with {FOUR_BITS}"
        )
    elif getattr(base, "is_quantized", False):
        asked = base.config.quantization_config  # type: ignore[union-attr]
    if asked is None:
        return
    has_adapter = arguments["peft_config"] is not None or getattr(model, "peft_config", None) is not None
    found = four_bits_of(asked, compute_dtype(base, args), has_adapter=has_adapter, zero3=is_deepspeed_zero3_enabled())
    arguments["quantization_config"] = found if isinstance(model, str) else None


def given_once(beside: Any, model_init_kwargs: Mapping[str, Any] | None) -> Any:
    """Return the quantisation given as an argument or in `model_init_kwargs`; None for none.

    Raises:
        ValueError: both have one.
    """
    inside = (model_init_kwargs or {}).get("quantization_config")
    if beside is not None and inside is not None:
        raise ValueError("quantization_config is given beside the model and in model_init_kwargs: give one of the two")
    return inside if beside is None else beside


def check_own_quantisation(config: PretrainedConfig | None) -> None:
    """Refuse a checkpoint whose own weights are quantised.

    Args:
        config: None if unknown here.

    Raises:
        ValueError: names the method.
    """
    own = getattr(config, "quantization_config", None)
    if own is None:
        return
    method = own.get("quant_method", "unknown") if isinstance(own, Mapping) else own.quant_method
    raise ValueError(
        f"the checkpoint's weights are quantised, its config.json says by {str(getattr(method, 'value', method))!r} "
        "[GRPO-217]: name the 16-bit checkpoint that it was made from; "
        f"{FOUR_BITS} with a peft_config quantises that as it is loaded"
    )


def four_bits_of(asked: Any, dtype: torch.dtype, *, has_adapter: bool, zero3: bool) -> BitsAndBytesConfig:
    """Return the user's quantisation, or a copy with the engines' compute dtype.

    Args:
        asked: a configuration of transformers, or a mapping of its fields.
        dtype: the engines'.
        has_adapter: LoRA is trained on it.
        zero3: DeepSpeed shards the weights.

    Raises:
        ValueError: as `settle_quantisation`.
    """
    asked = _read(asked) if isinstance(asked, Mapping) else asked
    if not isinstance(asked, BitsAndBytesConfig):
        raise ValueError(
            f"quantization_config is a {type(asked).__name__}: local mode trains adapters on bitsandbytes' four bits; "
            f"AWQ and GPTQ need calibration data, and come as checkpoints of their own: take {FOUR_BITS}"
        )
    if not asked.load_in_4bit:
        bits = "load_in_8bit, whose layers round what they multiply" if asked.load_in_8bit else "no load_in_4bit"
        raise ValueError(
            f"quantization_config has {bits}: local mode trains adapters on four bits, which an engine can hold "
            f"dequantised: {FOUR_BITS}"
        )
    if asked.bnb_4bit_quant_type not in ("nf4", "fp4"):
        raise ValueError(f"bnb_4bit_quant_type is {asked.bnb_4bit_quant_type!r}: it is 'nf4' or 'fp4'")
    if not has_adapter:
        raise ValueError(
            "quantization_config without peft_config: weights of four bits have no gradients; give a peft_config "
            "(--use_peft), or remove it"
        )
    if zero3:
        raise ValueError(
            "quantization_config with ZeRO-3, which would cut up the bytes that a layer of four bits reads: set "
            "zero_stage to 2 in the launcher's file, or train with DDP; each rank holds the whole base, in about 0.55 "
            "byte for each weight"
        )
    if asked.bnb_4bit_quant_storage != torch.uint8:
        raise ValueError(
            f"bnb_4bit_quant_storage is {asked.bnb_4bit_quant_storage}, which is for FSDP, and which DeepSpeed would "
            "cast as if it were weights: leave it out (uint8)"
        )
    computes_in = asked.bnb_4bit_compute_dtype
    if computes_in not in (dtype, torch.float32):  # the default, not the user's choice
        raise ValueError(
            f"bnb_4bit_compute_dtype is {computes_in}, but the engines compute in {dtype}, and would hold other "
            f"weights than training computes with: leave it out, or set bf16, fp16 and dtype to {computes_in}"
        )
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ValueError(f"quantization_config needs bitsandbytes, which is not installed: {INSTALL}")
    if computes_in == dtype:
        return asked
    copied = copy.copy(asked)
    copied.bnb_4bit_compute_dtype = dtype
    return copied


def _read(asked: Mapping[str, Any]) -> Any:
    """Read a mapping from a YAML file, or from a checkpoint's configuration."""
    method = asked.get("quant_method", "bitsandbytes")
    method = getattr(method, "value", method)
    if method != "bitsandbytes":
        raise ValueError(
            f"quantization_config has quant_method {method!r}: local mode trains adapters on bitsandbytes' four bits; "
            "AWQ and GPTQ need calibration data; take load_in_4bit: true"
        )
    if unknown := sorted(asked.keys() - _KEYS - _DERIVED):
        raise ValueError(f"quantization_config has no key {unknown[0]!r}{did_you_mean(unknown[0], _KEYS)}")
    return BitsAndBytesConfig(**{key: value for key, value in asked.items() if key in _KEYS})
