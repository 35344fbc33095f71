"""What of a placement depends on the model: attention heads for tensor parallelism, memory for plain DDP."""

import warnings
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig, PreTrainedModel

from grpo.config import GRPOConfig

DDP_BYTES_PER_PARAMETER = 16  # float32 weight, gradient and two Adam moments


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


def join_deepspeed(args: GRPOConfig) -> None:
    """Let DeepSpeed know of the process group, where transformers has made one without it.

    With `--deepspeed FILE` and no GPU it does (5.17), and DeepSpeed then takes a rank that loads a ZeRO-3 model for the
    only one: "train_batch_size is not equal to micro_batch_per_gpu * gradient_acc_step * world_size".
    """
    if not args.deepspeed or not dist.is_initialized():
        return
    import deepspeed

    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(dist_backend=dist.get_backend())


def ddp_memory_message(num_parameters: int, device_bytes: int) -> str | None:
    """What to say when a model is trained by plain DDP and cannot fit; None when it may."""
    needed = num_parameters * DDP_BYTES_PER_PARAMETER
    if needed <= device_bytes:
        return None
    return (
        f"{num_parameters / 1e9:.1f} B parameters take {needed / 2**30:.0f} GiB of weights, gradients and Adam moments "
        f"on every GPU under plain DDP, and a GPU has {device_bytes / 2**30:.0f} GiB: start with accelerate launch "
        "--config_file configs/1node.yaml, or give torchrun's script --deepspeed configs/zero3.json"
    )


def ddp_memory_warning(trainer: Any) -> None:
    """Warn when torchrun was started without DeepSpeed on a model that cannot fit: it is silently DDP then."""
    if trainer.is_deepspeed_enabled or not dist.is_initialized() or trainer.accelerator.device.type != "cuda":
        return
    device_bytes = torch.cuda.get_device_properties(trainer.accelerator.device).total_memory
    message = ddp_memory_message(sum(p.numel() for p in trainer.model.parameters()), device_bytes)
    if message is not None:
        warnings.warn(message, stacklevel=2)
