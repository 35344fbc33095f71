"""The engines' model and settings, determined before the trainer has loaded the model."""

import os
import shutil
import weakref
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from grpo.config import GRPOConfig
from grpo.model.text_part import is_hybrid, is_multimodal, placeholder_ids
from grpo.place.topology import NodeTopology

CPU_KV_CACHE_BYTES = 2**30  # of an engine without GPUs
NEVER = -100.0  # minimum of vLLM's logit_bias (0.31)
VLLM_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # valid values of its max_lora_rank (0.31)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineModel:
    """Model of the engines and its dtype; the first weight sync brings the weights.

    Example:
        EngineModel(path="Qwen/Qwen3-0.6B", tokenizer="Qwen/Qwen3-0.6B", revision=None, dtype=torch.bfloat16)
    """

    path: str
    """A folder or Hub id with a configuration."""
    tokenizer: str
    revision: str | None
    dtype: torch.dtype
    is_multimodal: bool = False
    takes_images: bool = False
    """False: of a multimodal model the engines build the text part alone."""
    never_sampled: frozenset[int] = frozenset()
    """Placeholder tokens of images: a completion must not contain one, as there is no image for it."""
    is_hybrid: bool = False
    """True for a model with layers of recurrent state."""


class PrivateFolder:
    """A folder readable by this user only. Removed with the object; after a kill, cleared by the next run."""

    _finalizers: ClassVar[dict[Path, weakref.finalize]] = {}

    def __init__(self, path: Path) -> None:
        if (of_the_last := self._finalizers.pop(path, None)) is not None:
            of_the_last.detach()  # a notebook's last trainer, which may be collected after this
        shutil.rmtree(path, ignore_errors=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700)
        self.path = path
        self._finalizers[path] = weakref.finalize(self, shutil.rmtree, path, ignore_errors=True)


def describe_model(
    model: "str | PreTrainedModel",
    args: GRPOConfig,
    processing_class: "PreTrainedTokenizerBase | ProcessorMixin | None",
    topology: NodeTopology,
    *,
    takes_images: bool = False,
) -> tuple[EngineModel, PrivateFolder | None]:
    """Describe the engines' model.

    A model given as an object, or a tokenizer or processor given with a path, is written to a private folder under
    `<output_dir>`: configuration and tokenizer, never weights.

    Returns:
        The description, and the folder to keep while the engines run; None on ranks without engines.
    """
    dtype = compute_dtype(model, args)
    if isinstance(model, str):
        path = tokenizer = model
        revision = (args.model_init_kwargs or {}).get("revision")
    else:
        path = tokenizer = getattr(model.config, "_name_or_path", "") or ""
        revision = None
    folder = None
    if topology.is_local_main and (not isinstance(model, str) or processing_class is not None):
        folder = PrivateFolder(Path(args.output_dir) / "engine" / f"node{topology.node}")
        # vLLM reads a processor from the model's folder, not from the tokenizer's
        if takes_images and isinstance(model, str):
            model_config(model, args).save_pretrained(folder.path)
            path, revision = str(folder.path), None
        if not isinstance(model, str):
            config = type(model.config).from_dict(model.config.to_dict())
            config.architectures = config.architectures or [_architecture(model)]
            vars(config).pop("quantization_config", None)  # engines get dequantised weights
            config.save_pretrained(folder.path)
            if model.generation_config is not None:
                # Not save_pretrained: it refuses contradictory settings that do not matter here.
                model.generation_config.to_json_file(folder.path / "generation_config.json")
            path = str(folder.path)
        if processing_class is not None:
            processing_class.save_pretrained(folder.path)
            tokenizer = str(folder.path)
    config = model_config(model, args)
    described = EngineModel(
        path=path,
        tokenizer=tokenizer,
        revision=revision,
        dtype=dtype,
        is_multimodal=is_multimodal(config),
        takes_images=takes_images,
        never_sampled=frozenset(placeholder_ids(config) if takes_images else ()),
        is_hybrid=is_hybrid(config),
    )
    return described, folder


def base_of(model: Any) -> "str | PreTrainedModel":
    """Return the base model of a PEFT model, or the model itself."""
    return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model


def _architecture(model: PreTrainedModel) -> str:
    """Name of a transformers class known to vLLM: a possible base of a user's class."""
    return next(c.__name__ for c in type(model).__mro__ if c.__module__.startswith("transformers.models."))


def compute_dtype(model: "str | PreTrainedModel", args: GRPOConfig) -> torch.dtype:
    """Compute dtype of the trainer, also used for the engine: never vLLM's `auto`."""
    # bf16 and fp16, or the launcher's `mixed_precision` if both are off
    if args.mixed_precision in ("bf16", "fp16"):
        return {"bf16": torch.bfloat16, "fp16": torch.float16}[args.mixed_precision]
    return loaded_dtype(model, args)


def loaded_dtype(model: "str | PreTrainedModel", args: GRPOConfig) -> torch.dtype:
    """Dtype in which TRL loads the model, or has it; unchanged without DeepSpeed."""
    if not isinstance(model, str):
        return model.dtype
    asked = (args.model_init_kwargs or {}).get("dtype", "float32")  # TRL's default
    if asked in (None, "auto"):
        return getattr(model_config(model, args), "dtype", None) or torch.float32
    return asked if isinstance(asked, torch.dtype) else getattr(torch, asked)


def attention_heads(model: "str | PreTrainedModel", args: GRPOConfig) -> tuple[int | None, int | None]:
    """Return (attention heads, key-value heads) of a model not loaded yet; (None, None) if they do not matter."""
    if args.vllm_tensor_parallel_size == 1:
        return None, None
    return head_counts(model_config(model, args))


def head_counts(config: Any) -> tuple[int | None, int | None]:
    """Return (attention heads, key-value heads) from a configuration; None for an unknown number."""
    text = config.get_text_config()
    return getattr(text, "num_attention_heads", None), getattr(text, "num_key_value_heads", None)


def model_config(model: "str | PreTrainedModel", args: GRPOConfig) -> Any:
    """Return the model's configuration, without loading weights."""
    if not isinstance(model, str):
        return model.config
    revision = (args.model_init_kwargs or {}).get("revision")
    return AutoConfig.from_pretrained(model, revision=revision, trust_remote_code=args.trust_remote_code)


def readable_config(model: "str | PreTrainedModel", args: GRPOConfig) -> Any:
    """Return the model's configuration; None if it cannot be read: `check_model` has a better error."""
    try:
        return model_config(model, args)
    except Exception:  # noqa: BLE001  raised by the Hub's client, by transformers or by the model's own code
        return None


def choose_backend(asked: str, *, has_gpus: bool) -> str:
    """Resolve `vllm_sync_backend` to `nccl` or `shm`.

    Raises:
        ValueError: NCCL without GPUs.
    """
    if asked == "nccl" and not has_gpus:
        raise ValueError("vllm_sync_backend is 'nccl', but this node has no GPUs: set it to 'shm' or 'auto'")
    if asked == "auto":
        return "nccl" if has_gpus else "shm"
    return asked


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSlot:
    """Capacity for LoRA adapters in an engine."""

    rank: int
    """Rank of the layer with the largest one."""
    layers: tuple[str, ...]
    """Last parts of the names of the adapted layers."""
    number: int = 1
    """Number of adapters held at once: one for each batch in progress, and the newest."""

    @property
    def engine_args(self) -> dict[str, Any]:
        return {
            "enable_lora": True,
            "max_loras": self.number,
            "max_lora_rank": next(rank for rank in VLLM_LORA_RANKS if rank >= self.rank),
            "lora_target_modules": list(self.layers),  # other layers are left as they are, and cost nothing
        }


def engine_args(
    args: GRPOConfig, model: EngineModel, topology: NodeTopology, adapters: AdapterSlot | None = None
) -> dict[str, Any]:
    """Return vLLM's `AsyncEngineArgs` for this job, without those of the weight transfer."""
    settings: dict[str, Any] = {
        "model": model.path,
        "tokenizer": model.tokenizer,
        "revision": model.revision,
        "trust_remote_code": args.trust_remote_code,
        "dtype": str(model.dtype).removeprefix("torch."),
        "tensor_parallel_size": topology.tensor_parallel_size,
        "gpu_memory_utilization": args.vllm_gpu_memory_utilization,
        "model_impl": args.vllm_model_impl,
        "load_format": "dummy",  # the first weight sync brings every weight, or fails
        "logprobs_mode": "processed_logprobs",  # of the distribution sampled from, as importance sampling needs
        "seed": args.seed,
        "disable_log_stats": True,
    }
    if args.vllm_max_model_length is not None:
        settings["max_model_len"] = args.vllm_max_model_length
    if topology.tensor_parallel_size > 1:
        settings["distributed_executor_backend"] = "mp"
    if not topology.devices and "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
        settings["kv_cache_memory_bytes"] = CPU_KV_CACHE_BYTES  # vLLM would take its share of the host's memory
    if not topology.devices:
        # A seeded request with a chunked prompt ends vLLM's engine on CPUs: "CPU Generator does not use offset" (0.31,
        # `_bookkeeping_sync`).
        settings["enable_chunked_prefill"] = False
        if model.is_hybrid:
            settings["enable_prefix_caching"] = False  # vLLM caches prefixes of recurrent states only by chunks (0.31)
    if model.takes_images:
        # otherwise vLLM reserves memory for the largest inputs
        settings["limit_mm_per_prompt"] = {"video": 0, "audio": 0}
    elif model.is_multimodal:
        settings["language_model_only"] = True
    if adapters is not None:
        settings |= adapters.engine_args
    return settings | args.engine_kwargs


def sampling_settings(args: GRPOConfig) -> dict[str, Any]:
    """Return the `SamplingParams` arguments common to all requests, as in TRL; `generation_kwargs` override them."""
    settings: dict[str, Any] = {
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k,
        "min_p": 0.0 if args.min_p is None else args.min_p,
        "repetition_penalty": args.repetition_penalty,
        "max_tokens": args.max_completion_length,
    }
    settings |= {key: value for key, value in (args.generation_kwargs or {}).items() if key != "seed"}
    if args.vllm_structured_outputs_regex is not None:
        settings["structured_outputs"] = {"regex": args.vllm_structured_outputs_regex}
    return settings


def without_tokens(settings: dict[str, Any], never_sampled: Collection[int]) -> dict[str, Any]:
    """Add a logit bias to sampling arguments, so that no engine samples these tokens."""
    if not never_sampled:
        return settings
    bias = {token: NEVER for token in sorted(never_sampled)}
    return {**settings, "logit_bias": {**(settings.get("logit_bias") or {}), **bias}}


# Arguments of `SamplingParams` under which sampling does not depend on how earlier tokens came about.
_CONTINUED = {
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "min_tokens"),
    *("stop_token_ids", "ignore_eos", "logit_bias", "allowed_token_ids"),
}


def can_continue(args: GRPOConfig) -> bool:
    """True if vLLM samples the rest of a completion as before when its first tokens are given as part of the prompt. A
    grammar, a stop string or a penalty on completions alone would start anew."""
    return {name for name, value in sampling_settings(args).items() if value} <= _CONTINUED


def samples_as_scored(args: GRPOConfig) -> bool:
    """True if engines sample from the trainer's distribution: no truncation, penalty or mask."""
    others = sampling_settings(args)
    neutral = {"top_p": (1.0,), "top_k": (0, -1), "min_p": (0.0,), "repetition_penalty": (1.0,)}
    is_neutral = all(others.pop(name) in values for name, values in neutral.items())
    return is_neutral and others.keys() <= {"temperature", "max_tokens", "stop", "stop_token_ids", "ignore_eos"}
