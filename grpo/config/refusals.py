"""Arguments unsupported in local mode, refused by name before anything starts."""

import warnings
from typing import Any

import torch
import torch.distributed as dist
from accelerate import ParallelismConfig
from accelerate.utils import parse_flag_from_env
from datasets import IterableDataset
from transformers import PreTrainedModel

from grpo.config import GRPOConfig
from grpo.config.checks import SHARED_MODEL, check_data_parallel
from grpo.config.models import base_of, readable_config
from grpo.place.gpu_needs import unmet_cpu_need

# Keys of `model_init_kwargs` that do not change the engines' computation.
_OF_LOADING = {
    *("revision", "trust_remote_code", "dtype", "torch_dtype", "attn_implementation", "device_map"),
    "quantization_config",  # engines hold the dequantised weights
    *("low_cpu_mem_usage", "use_safetensors", "use_cache", "pad_token_id", "return_dict"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "router_aux_loss_coef"),
}

# vLLM classes with tensors that its reload does not fill.
WITHOUT_RELOAD = {"GptOssForCausalLM": "vLLM's class copies experts and sinks past the loaders of its reload (0.31)"}


def refuse_unsupported(arguments: dict[str, Any]) -> None:
    """Refuse arguments unsupported in local mode, before anything starts.

    Raises:
        ValueError: names the argument and the fix.
    """
    args: GRPOConfig = arguments["args"]
    if not torch.accelerator.is_available() and (need := unmet_cpu_need()) is not None:
        raise ValueError(f"{need.what}: {need.fix}")
    for name in ("tools", "environment_factory", "rollout_func"):
        if arguments[name] and args.vllm_balance_nodes:
            raise ValueError(
                f"vllm_balance_nodes moves prompts between nodes, but with {name} an episode stays with its rank, "
                "whose tools it calls: set vllm_balance_nodes to False"
            )
    if arguments["rollout_func"] and (arguments["tools"] or arguments["environment_factory"]):
        name = "tools" if arguments["tools"] else "environment_factory"
        raise ValueError(
            f"rollout_func and {name}: a rollout function holds its episodes itself, and TRL would hold them once "
            f"more: call the tools inside of the function, and leave {name} out"
        )
    if parse_flag_from_env("ACCELERATE_USE_FSDP"):
        raise ValueError(
            "the launcher asks for FSDP; local mode trains with DeepSpeed, DDP or one process: "
            "accelerate launch --config_file configs/1node.yaml"
        )
    if parse_flag_from_env("ACCELERATE_USE_PARALLELISM_CONFIG"):
        check_data_parallel(ParallelismConfig(), "the launcher's parallelism_config")  # which reads the environment
    deepspeed = args.deepspeed_plugin.deepspeed_config if args.deepspeed_plugin else {}
    if (size := (deepspeed.get("tensor_parallel") or {}).get("autotp_size") or 1) > 1:
        raise ValueError(f"DeepSpeed's tensor_parallel.autotp_size is {size}: {SHARED_MODEL}")
    if (size := getattr(arguments["model"], "tp_size", None) or 1) > 1:
        raise ValueError(f"the model is split over {size} ranks (tp_size): {SHARED_MODEL}")
    if args.generation_lookahead and isinstance(arguments["train_dataset"], IterableDataset):
        raise ValueError(
            "generation_lookahead reads rows of later generation batches by their number, which a streamed data set "
            "does not have: set dataset_streaming to False, or generation_lookahead to 0"
        )
    check_init_kwargs(args, arguments["model"])
    check_class(readable_config(base_of(arguments["model"]), args))


def check_init_kwargs(args: GRPOConfig, model: "str | PreTrainedModel | None") -> None:
    """Refuse keys of `model_init_kwargs` unsupported by the engines.

    Raises:
        ValueError: names the key.
    """
    given = {key: value for key, value in (args.model_init_kwargs or {}).items() if value is not None}
    for key in ("subfolder", "config", "cache_dir", "gguf_file", "code_revision", "token"):
        if key in given:
            raise ValueError(
                f"model_init_kwargs holds {key!r}, which would not reach the engines: they load configuration and "
                "tokenizer themselves; give a local folder, or set HF_HOME and HF_TOKEN"
            )
    for key in ("tp_plan", "tp_size", "device_mesh", "distributed_config"):
        if key in given:
            raise ValueError(f"model_init_kwargs holds {key!r}, which splits the model over ranks: {SHARED_MODEL}")
    if not isinstance(model, str) or given.keys() <= _OF_LOADING or (config := readable_config(model, args)) is None:
        return
    for key in sorted(given.keys() - _OF_LOADING):
        if getattr(config, key, given[key]) != given[key] and "dropout" not in key:
            raise ValueError(
                f"model_init_kwargs holds {key!r}, which the engines do not see: they read config.json, where it is "
                f"{getattr(config, key)!r}; change it there, in a local folder, or give the trainer a model "
                "object, whose configuration the engines get"
            )


def check_class(config: Any) -> None:
    """Refuse a model class for which vLLM cannot reload weights.

    Args:
        config: None if unknown here.

    Raises:
        ValueError: has the reason.
    """
    name = (getattr(config, "architectures", None) or [""])[0]
    if name in WITHOUT_RELOAD:
        raise ValueError(
            f"the model is a {name}, whose weights vLLM cannot reload: {WITHOUT_RELOAD[name]}; set vllm_mode to "
            "'server' or 'colocate', and look at the first steps' rewards"
        )


def ddp_bytes(loaded_bytes: int, *, world_size: int) -> int:
    """Bytes of a parameter trained by plain DDP: weight, gradient and two Adam moments in the loaded dtype, and with
    several ranks DDP's buckets, copies of all gradients (torch 2.13)."""
    return (4 + (world_size > 1)) * loaded_bytes


def ddp_memory_message(num_parameters: int, device_bytes: int, *, each: int, base_bytes: int = 0) -> str | None:
    """Error text if a model trained by plain DDP does not fit; None if it may fit.

    Args:
        num_parameters: trained parameters.
        each: bytes per trained parameter, from `ddp_bytes`.
        base_bytes: size of the frozen parameters as loaded.
    """
    needed = num_parameters * each
    if needed + base_bytes <= device_bytes:
        return None
    base = f", and the frozen base {base_bytes / 2**30:.0f} GiB," if base_bytes else ""
    return (
        f"{num_parameters / 1e9:.1f} B parameters take {needed / 2**30:.0f} GiB of weights, gradients and Adam moments"
        f"{base} on every GPU under plain DDP, and a GPU has {device_bytes / 2**30:.0f} GiB: start with accelerate "
        "launch --config_file configs/1node.yaml, or give torchrun's script --deepspeed configs/zero3.json"
    )


def ddp_memory_warning(trainer: Any) -> None:
    """Warn if torchrun was started without DeepSpeed on a model that cannot fit: this silently means DDP."""
    if trainer.is_deepspeed_enabled or not dist.is_initialized() or trainer.accelerator.device.type != "cuda":
        return
    device_bytes = torch.cuda.get_device_properties(trainer.accelerator.device).total_memory
    parameters = list(trainer.model.parameters())
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    loaded = max(parameter.element_size() for parameter in parameters if parameter.requires_grad)
    each = ddp_bytes(loaded, world_size=dist.get_world_size())
    base_bytes = sum(parameter.nbytes for parameter in parameters if not parameter.requires_grad)
    message = ddp_memory_message(trained, device_bytes, each=each, base_bytes=base_bytes)
    if message is not None:
        warnings.warn(message, stacklevel=2)
