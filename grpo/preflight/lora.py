"""Checks of LoRA before anything starts: adapted layers, and the way of adapters to the engines."""

import contextlib
import copy
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers.integrations import is_deepspeed_zero3_enabled

from grpo.config import GRPOConfig
from grpo.config.models import VLLM_LORA_RANKS, AdapterSlot, base_of, compute_dtype, model_config, readable_config
from grpo.model.four_bit import quantises_head
from grpo.model.text_part import is_multimodal, model_without_weights, tower_paths

# PEFT's initialisations with a zero change and the checkpoint as base (0.21). Others change the base, or need data.
STARTS = (True, False, "gaussian", "orthogonal")
# Kinds of LoRA that are not supported either way.
KINDS = (
    "layer_replication",
    "trainable_token_indices",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
    "velora_config",
    "megatron_config",
    "use_qalora",
    "use_bdlora",
    "lora_bias",
)
# Architectures without LoRA in vLLM (0.31).
WITHOUT_LORA = (
    "BloomForCausalLM",
    "Cohere2MoeForCausalLM",
    "DbrxForCausalLM",
    "FalconForCausalLM",
    "FalconMambaForCausalLM",  # vLLM runs it as Mamba
    "GPTJForCausalLM",
    "GPTNeoXForCausalLM",
    "Gemma3nForCausalLM",
    "HrmTextForCausalLM",
    "Mamba2ForCausalLM",
    "MambaForCausalLM",
    "MiMoV2FlashForCausalLM",
    "StableLmForCausalLM",
    "Zamba2ForCausalLM",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraChoice:
    """Way of adapters to the engines."""

    way: Literal["adapter", "merge"]
    why: str
    """Reason against sending adapters alone; '' if they are."""
    slot: AdapterSlot

    def __str__(self) -> str:
        rank = f"LoRA of rank {self.slot.rank} on {', '.join(self.slot.layers)}"
        if self.way == "adapter":
            return f"{rank}: the engines get the base once, then adapters alone"
        return f"{rank}: adapters are merged into what is synced, because {self.why}"


def choose_lora(
    model: Any, peft_config: Any, quantization_config: Any, args: GRPOConfig, *, has_gpus: bool
) -> LoraChoice | None:
    """Resolve `vllm_lora`; None for a model without adapters.

    Args:
        model: a name, a transformers model, or a PEFT model.
        quantization_config: as left by `settle_quantisation`.

    Raises:
        ValueError: names the unsupported setting, and the fix.
    """
    given = getattr(model, "peft_config", None)
    if peft_config is None and not given:
        return None
    if peft_config is not None and given:
        raise ValueError("the model is a PeftModel, and peft_config is given too: give one of the two")
    if given:
        names = model.active_adapters
        if len(names) > 1:
            raise ValueError(f"the model has the adapters {', '.join(names)} active: activate the one to train")
        if names[0] != "default":
            raise ValueError(
                f"the adapter is named {names[0]!r}: TRL and checkpoints want the name 'default', under which "
                "PeftModel.from_pretrained loads one that is given none"
            )
        peft_config = model.peft_config[names[0]]
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ValueError(
                "no parameter of the PeftModel has a gradient: load it by PeftModel.from_pretrained(..., "
                "is_trainable=True)"
            )
    check_lora(peft_config, args, zero3=is_deepspeed_zero3_enabled())
    plain = None if given else _without_weights(model, args)
    if plain is not None:
        check_head(plain, quantization_config)
    four_bits = quantization_config is not None or getattr(base_of(model), "is_quantized", False)
    wrapped = model if given else wrapped_without_weights(plain, peft_config)
    dtype = compute_dtype(base_of(model), args)
    return choose_way(wrapped, peft_config, args, dtype, has_gpus=has_gpus, four_bits=four_bits)


def around_towers(peft_config: Any, model: Any, args: GRPOConfig) -> Any:
    """Return the user's LoRA config, or a copy without the towers of a multimodal model: their layers often have the
    same names.

    Args:
        model: a name, or a transformers model.
    """
    config = None if peft_config is None else readable_config(model, args)
    if config is None or not is_multimodal(config):
        return peft_config
    plain = _without_weights(model, args)
    towers = tower_paths(plain)
    adapted = _adapted(wrapped_without_weights(plain, peft_config))
    if not any(_is_inside(path, towers) for path in adapted):
        return peft_config
    own = peft_config.exclude_modules or []
    patterns = [own] if isinstance(own, str) else [rf"(.*\.)?{re.escape(name)}" for name in sorted(own)]
    patterns += [rf"{re.escape(tower)}\..*" for tower in towers]
    copied = copy.copy(peft_config)
    copied.exclude_modules = "|".join(f"({pattern})" for pattern in patterns)
    return copied


def with_revision(peft_config: Any, args: GRPOConfig) -> Any:
    """Return the user's LoRA config, or a copy with the base's revision, for later loads of the adapter: TRL leaves it
    out (1.16)."""
    revision = (args.model_init_kwargs or {}).get("revision")
    if peft_config is None or revision is None or getattr(peft_config, "revision", None) is not None:
        return peft_config
    copied = copy.copy(peft_config)
    copied.revision = revision
    return copied


def choose_way(
    wrapped: Any, peft_config: Any, args: GRPOConfig, dtype: torch.dtype, *, has_gpus: bool, four_bits: bool = False
) -> LoraChoice:
    """Resolve `vllm_lora` for a PEFT model, with or without its weights.

    Args:
        dtype: the engine's.
        four_bits: the base is held in 4 bits.

    Raises:
        ValueError: as `choose_lora`.
    """
    ranks = _ranks(wrapped)
    layers = tuple(sorted({path.rpartition(".")[2] for path in ranks}))
    ahead = args.generation_lookahead
    slot = AdapterSlot(rank=max(ranks.values()), layers=layers, number=ahead + 1 if ahead > 1 else 1)
    why = _why_merge(wrapped, peft_config, ranks, slot, dtype, has_gpus=has_gpus)
    if args.vllm_lora == "adapter" and why:
        raise ValueError(f"vllm_lora is 'adapter', but {why}: set it to 'auto' or 'merge'")
    if four_bits and (why or args.vllm_lora == "merge"):
        raise ValueError(
            f"adapters on a base of four bits are sent alone, but {why or 'vllm_lora is merge'} [GRPO-218]: merged "
            "weights differ from those of the base, and each weight sync would send all of them; change that, or train "
            "without quantization_config"
        )
    if peft_config.lora_dropout:
        warnings.warn(
            f"lora_dropout is {peft_config.lora_dropout}: old and new log-probabilities of a step are computed with "
            "different masks, which is noise in the importance ratio; 0 has none",
            stacklevel=2,
        )
    if args.vllm_lora == "merge":
        return LoraChoice(way="merge", why=why or "vllm_lora is 'merge'", slot=slot)
    return LoraChoice(way="merge" if why else "adapter", why=why, slot=slot)


def check_lora(config: Any, args: GRPOConfig, *, zero3: bool) -> None:
    """Check LoRA settings independent of the model.

    Raises:
        ValueError: as `choose_lora`.
    """
    from peft import LoraConfig

    if args.sync_ref_model:
        raise ValueError("sync_ref_model: with LoRA the reference is the model without its adapter; remove it")
    if not isinstance(config, LoraConfig):
        raise ValueError(
            f"peft_config is a {type(config).__name__}: local mode trains LoRA (peft.LoraConfig); set vllm_mode to "
            "'server' or 'colocate', where TRL takes others"
        )
    if config.init_lora_weights not in STARTS:
        raise ValueError(
            f"init_lora_weights is {config.init_lora_weights!r}, which changes the base's weights or needs data: local "
            f"mode starts from one of {', '.join(map(repr, STARTS))}"
        )
    if config.bias != "none" and args.beta:
        raise ValueError(
            f"bias is {config.bias!r} with beta {args.beta:g}: the reference is the model with its adapter off, but "
            "biases of the base that are trained stay as they are then; set bias to 'none', or beta to 0"
        )
    if config.target_parameters:  # PEFT fills it with experts' projections by itself (0.21)
        raise ValueError(
            f"peft_config adapts parameters that are no layers, {sorted(config.target_parameters)}, such as experts': "
            "name linear layers in target_modules, such as q_proj, k_proj, v_proj and o_proj"
        )
    if config.use_dora and zero3:
        raise ValueError(
            "use_dora with ZeRO-3: PEFT's DoRA (0.21) computes with matrices that ZeRO-3 has partitioned, and fails; "
            "train with ZeRO-2 or DDP, or without it"
        )
    for name in KINDS:
        if getattr(config, name, None):
            raise ValueError(
                f"peft_config has {name} {getattr(config, name)!r}: local mode serves LoRA, rsLoRA and DoRA; remove it"
            )


def check_head(plain: Any, quantization: Any) -> None:
    """Refuse to quantise the head.

    Args:
        plain: a model on the meta device.
        quantization: None for none.

    Raises:
        ValueError: the head would be quantised.
    """
    if quantization is not None and quantises_head(plain, quantization):
        raise ValueError(
            f"llm_int8_skip_modules is {quantization.llm_int8_skip_modules}, so that the head would be quantised, too, "
            "and TRL's loss multiplies with its weight as it stands: add 'lm_head' to the list"
        )


def wrapped_without_weights(plain: Any, config: Any) -> Any:
    """Wrap a model by PEFT, as the trainer will.

    Args:
        plain: a model on the meta device; becomes part of the result.

    Raises:
        ValueError: PEFT's error, in one line.
    """
    from peft import get_peft_model

    with torch.device("meta"), _without_zero3(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the trainer's own wrapping warns
        try:
            return get_peft_model(plain, copy.deepcopy(config))
        except ValueError as error:
            raise ValueError(f"peft_config does not fit {type(plain).__name__}: {error}") from None


def _without_weights(model: Any, args: GRPOConfig) -> Any:
    settings = model_config(model, args)
    with _without_zero3():
        if isinstance(model, str):
            return model_without_weights(settings, trust_remote_code=args.trust_remote_code)
        with torch.device("meta"):
            return type(model)(copy.deepcopy(settings))


@contextlib.contextmanager
def _without_zero3() -> Iterator[None]:
    """Disable ZeRO-3 in a `with` block: transformers partitions new models as soon as `TrainingArguments` with ZeRO-3
    exist (5.17)."""
    from transformers.integrations import deepspeed

    held = deepspeed._hf_deepspeed_config_weak_ref
    settings = held() if held is not None else None
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        if settings is not None:
            deepspeed.set_hf_deepspeed_config(settings)


def _ranks(wrapped: Any) -> dict[str, int]:
    """Rank of each adapted layer, by its path in the base."""
    base = wrapped.get_base_model()
    found = _adapted(wrapped)
    towers = tower_paths(base)
    for path in found:
        if _is_inside(path, towers):
            raise ValueError(
                f"the PeftModel has an adapter on {path}, which takes no part in text: make it with "
                rf"exclude_modules, such as r'{re.escape(towers[0])}\..*'"
            )
        inner = base.get_submodule(path).get_base_layer()
        if not isinstance(inner, torch.nn.Linear | torch.nn.Embedding):
            raise ValueError(
                f"target_modules takes {path}, a {type(inner).__name__}: local mode adapts linear layers and "
                "embeddings; name those, such as q_proj, k_proj, v_proj and o_proj"
            )
        if inner is base.get_output_embeddings() or base.get_submodule(path) is base.get_output_embeddings():
            raise ValueError(f"target_modules takes the head, {path}, which TRL's loss goes around: leave it out")
        if isinstance(inner, torch.nn.Embedding) and base.config.get_text_config().tie_word_embeddings:
            raise ValueError(f"target_modules takes {path}, which is the head's weight too in this model: leave it out")
    if base.config.get_text_config().tie_word_embeddings and not _are_tied(base):
        raise ValueError(
            "modules_to_save takes the embedding or the head, which are one weight in this model, and one in the "
            "engines: PEFT would train a copy of the one alone; leave it out"
        )
    return found


def _is_inside(path: str, modules: tuple[str, ...]) -> bool:
    return path.startswith(tuple(f"{module}." for module in modules))


def _adapted(wrapped: Any) -> dict[str, int]:
    from peft.tuners.lora import LoraLayer

    name = wrapped.active_adapters[0]
    return {
        path: module.r[name]
        for path, module in wrapped.get_base_model().named_modules()
        if isinstance(module, LoraLayer) and name in module.r
    }


def _are_tied(base: Any) -> bool:
    """True if embedding and head are still one parameter."""
    own, head = base.get_input_embeddings(), base.get_output_embeddings()
    if own is None or head is None:
        return True
    return not any(type(each).__name__ == "ModulesToSaveWrapper" for each in (own, head))


def _why_merge(
    wrapped: Any, config: Any, ranks: dict[str, int], slot: AdapterSlot, dtype: torch.dtype, *, has_gpus: bool
) -> str:
    """Reason why vLLM cannot hold the adapters by themselves; '' if it can."""
    base = wrapped.get_base_model()
    if (name := type(base).__name__) in WITHOUT_LORA:
        return f"vLLM has no LoRA for {name}"
    if config.use_dora:
        return "vLLM has no DoRA"
    if config.bias != "none":
        return f"bias {config.bias!r} trains biases of the base"
    if config.modules_to_save:
        return f"modules_to_save trains {', '.join(config.modules_to_save)} of the base"
    if slot.rank > VLLM_LORA_RANKS[-1]:
        return f"vLLM takes ranks up to {VLLM_LORA_RANKS[-1]}"
    if getattr(base.config.get_text_config(), "kv_lora_rank", None) and "kv_b_proj" in slot.layers:
        return "vLLM's latent attention goes around adapters of kv_b_proj"
    for path in ranks:
        if isinstance(base.get_submodule(path).get_base_layer(), torch.nn.Embedding):
            return f"vLLM adapts no embedding such as {path}"
    blocks = {path.rpartition(".")[0] for path, _ in base.named_modules() if path.rpartition(".")[2] == "experts"}
    inside = [path for path in ranks if any(path.startswith(f"{block}.") for block in blocks)]
    if inside:
        return f"{inside[0]} belongs to a block of experts"
    if blocks and not has_gpus:
        return "vLLM's LoRA for models with experts needs a GPU"
    if dtype == torch.float32 and has_gpus:
        return "vLLM's LoRA kernels on GPUs take 16 bits, and this engine computes in float32"
    return ""
