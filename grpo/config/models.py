"""Which model the engines build, before the trainer has loaded it, and with which settings."""

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
NEVER = -100.0  # the least that vLLM's logit_bias takes (0.31)
VLLM_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what its max_lora_rank may be (0.31)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineModel:
    """Which model the engines build, and in what dtype; their weights come with the first weight sync."""

    path: str
    """A folder or a hub id with a configuration."""
    tokenizer: str
    revision: str | None
    dtype: torch.dtype
    is_multimodal: bool = False
    takes_images: bool = False
    """Of a multimodal one the engines build the text part alone otherwise."""
    never_sampled: frozenset[int] = frozenset()
    """Tokens that stand for images: a completion with one would have a place for an image that is not there."""
    is_hybrid: bool = False
    """With layers that keep a recurrent state."""


class PrivateFolder:
    """A folder for this user's eyes alone; gone with the object, emptied by the next run where this one is killed."""

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
    """The engines' model.

    A model given as an object, or a tokenizer or processor given beside a path, is written to a private folder under
    `<output_dir>`: configurations and tokenizer, never weights.

    Returns:
        The description, and the folder to keep as long as the engines run; None on ranks that start none.
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
        if takes_images and isinstance(model, str):  # vLLM reads a processor beside the model, not beside a tokenizer
            model_config(model, args).save_pretrained(folder.path)
            path, revision = str(folder.path), None
        if not isinstance(model, str):
            config = type(model.config).from_dict(model.config.to_dict())
            config.architectures = config.architectures or [_architecture(model)]
            vars(config).pop("quantization_config", None)  # engines get dequantised weights
            config.save_pretrained(folder.path)
            if model.generation_config is not None:
                # Not save_pretrained, which refuses settings that contradict each other but matter to nobody here.
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
    """What PEFT has wrapped, where it has."""
    return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model


def _architecture(model: PreTrainedModel) -> str:
    """The transformers class that a user's own class may be derived from: what vLLM knows."""
    return next(c.__name__ for c in type(model).__mro__ if c.__module__.startswith("transformers.models."))


def compute_dtype(model: "str | PreTrainedModel", args: GRPOConfig) -> torch.dtype:
    """The dtype in which the trainer computes, which is the engine's: never vLLM's `auto`."""
    # bf16 and fp16, or what the launcher's `mixed_precision` says where both are off
    if args.mixed_precision in ("bf16", "fp16"):
        return {"bf16": torch.bfloat16, "fp16": torch.float16}[args.mixed_precision]
    return loaded_dtype(model, args)


def loaded_dtype(model: "str | PreTrainedModel", args: GRPOConfig) -> torch.dtype:
    """The dtype in which TRL loads the model, or has it; in which it stays without DeepSpeed."""
    if not isinstance(model, str):
        return model.dtype
    asked = (args.model_init_kwargs or {}).get("dtype", "float32")  # TRL's default
    if asked in (None, "auto"):
        return getattr(model_config(model, args), "dtype", None) or torch.float32
    return asked if isinstance(asked, torch.dtype) else getattr(torch, asked)


def attention_heads(model: "str | PreTrainedModel", args: GRPOConfig) -> tuple[int | None, int | None]:
    """Attention and key-value heads of a model that is not loaded yet; (None, None) where nothing depends on them."""
    if args.vllm_tensor_parallel_size == 1:
        return None, None
    return head_counts(model_config(model, args))


def head_counts(config: Any) -> tuple[int | None, int | None]:
    """Attention and key-value heads of a model's configuration; None for what it does not say."""
    text = config.get_text_config()
    return getattr(text, "num_attention_heads", None), getattr(text, "num_key_value_heads", None)


def model_config(model: "str | PreTrainedModel", args: GRPOConfig) -> Any:
    """The model's configuration, without its weights."""
    if not isinstance(model, str):
        return model.config
    revision = (args.model_init_kwargs or {}).get("revision")
    return AutoConfig.from_pretrained(model, revision=revision, trust_remote_code=args.trust_remote_code)


def readable_config(model: "str | PreTrainedModel", args: GRPOConfig) -> Any:
    """The same; None where it cannot be read, which `check_model` says better."""
    try:
        return model_config(model, args)
    except Exception:  # noqa: BLE001  of the hub's client, of transformers or of the model's own code
        return None


def choose_backend(asked: str, *, has_gpus: bool) -> str:
    """`nccl` or `shm`, for `vllm_sync_backend`.

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
    """Space for LoRA adapters in an engine."""

    rank: int
    """Of the layer with the largest one."""
    layers: tuple[str, ...]
    """Last names of those that are adapted."""
    number: int = 1
    """Of adapters that the engine holds at once: one for each batch that is under way, and the newest."""

    @property
    def engine_args(self) -> dict[str, Any]:
        return {
            "enable_lora": True,
            "max_loras": self.number,
            "max_lora_rank": next(rank for rank in VLLM_LORA_RANKS if rank >= self.rank),
            "lora_target_modules": list(self.layers),  # others are left as they are, and cost nothing
        }


def engine_args(
    args: GRPOConfig, model: EngineModel, topology: NodeTopology, adapters: AdapterSlot | None = None
) -> dict[str, Any]:
    """Arguments of vLLM's `AsyncEngineArgs` for this job, without those of the weight transfer."""
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
        "logprobs_mode": "processed_logprobs",  # those of the distribution sampled from: what importance sampling needs
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
        # A seeded request of which a step computes only a part of the prompt ends vLLM's engine on CPUs: "CPU
        # Generator does not use offset" (0.31, `_bookkeeping_sync`).
        settings["enable_chunked_prefill"] = False
        if model.is_hybrid:
            settings["enable_prefix_caching"] = False  # of recurrent states vLLM caches prefixes by chunks alone (0.31)
    if model.takes_images:
        settings["limit_mm_per_prompt"] = {"video": 0, "audio": 0}  # vLLM would keep space for the largest ones
    elif model.is_multimodal:
        settings["language_model_only"] = True
    if adapters is not None:
        settings |= adapters.engine_args
    return settings | args.engine_kwargs


def sampling_settings(args: GRPOConfig) -> dict[str, Any]:
    """Arguments of `SamplingParams` common to all requests, as TRL sets them; `generation_kwargs` come last."""
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
    """Sampling arguments by which no engine samples one of these tokens."""
    if not never_sampled:
        return settings
    bias = {token: NEVER for token in sorted(never_sampled)}
    return {**settings, "logit_bias": {**(settings.get("logit_bias") or {}), **bias}}


# Of `SamplingParams`: by none of these does a token depend on how vLLM came by those before it.
_CONTINUED = {
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "min_tokens"),
    *("stop_token_ids", "ignore_eos", "logit_bias", "allowed_token_ids"),
}


def can_continue(args: GRPOConfig) -> bool:
    """Whether vLLM samples the rest of a completion alike where it is given its first tokens as a part of the prompt: a
    grammar, a stop string or a penalty that counts completions alone would begin anew."""
    return {name for name, value in sampling_settings(args).items() if value} <= _CONTINUED


def samples_as_scored(args: GRPOConfig) -> bool:
    """Whether engines sample of the distribution that the trainer computes: nothing is cut off, penalised or masked."""
    others = sampling_settings(args)
    neutral = {"top_p": (1.0,), "top_k": (0, -1), "min_p": (0.0,), "repetition_penalty": (1.0,)}
    is_neutral = all(others.pop(name) in values for name, values in neutral.items())
    return is_neutral and others.keys() <= {"temperature", "max_tokens", "stop", "stop_token_ids", "ignore_eos"}
