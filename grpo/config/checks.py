"""Checks of local mode's settings; errors have the value and the fix."""

import importlib.util
import math
import warnings
from collections.abc import Mapping
from typing import Any

import trl
from accelerate import ParallelismConfig

from grpo.config.importance import check_importance_sampling, check_lookahead
from grpo.place.launch import either, multiples_around, read_launch
from grpo.place.spelling import did_you_mean
from grpo.place.topology import plan_node

_SERVER_FIELDS = (
    "vllm_server_base_url",
    "vllm_server_host",
    "vllm_server_port",
    "vllm_server_timeout",
    "vllm_group_port",
)

# Engine arguments derived from other settings. A second way to set them would allow contradictions.
OWN_ENGINE_KEYS = {
    "model": "model_name_or_path",
    "tokenizer": "processing_class",
    "tokenizer_revision": "model_init_kwargs",
    "skip_tokenizer_init": "nothing: structured output needs the tokenizer",
    "tokens_only": "nothing: structured output needs the tokenizer",
    "revision": "model_init_kwargs",
    "code_revision": "nothing: give a local folder, whose code both sides load",
    "trust_remote_code": "trust_remote_code",
    "dtype": "bf16 / fp16 / model_init_kwargs['dtype']: the engine computes in the trainer's dtype",
    "max_model_len": "vllm_max_model_length",
    "gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "tensor_parallel_size": "vllm_tensor_parallel_size",
    "pipeline_parallel_size": "vllm_tensor_parallel_size",
    "prefill_context_parallel_size": "vllm_tensor_parallel_size",
    "data_parallel_size": "vllm_reserved_gpus: several engines on a node are several processes",
    "model_impl": "vllm_model_impl",
    "language_model_only": "the model: of a multimodal one the text part is trained",
    "enable_sleep_mode": "nothing: the engine has its GPUs to itself",
    "load_format": "nothing: the first weight sync brings the weights",
    "weight_transfer_config": "vllm_sync_backend",
    "worker_extension_cls": "nothing: the workers are asked by one of our own how they hold the weights",
    "logprobs_mode": "nothing: importance sampling needs processed_logprobs",
    "enable_lora": "peft_config and vllm_lora",
    "max_lora_rank": "peft_config",
    "max_loras": "nothing: there is one adapter, that of the policy",
    "lora_target_modules": "peft_config",
    "seed": "seed",
    "kv_transfer_config": "nothing: of most connectors vLLM cannot tell whether they drop the KV of old weights when "
    "new ones have come; kv_offloading_size moves KV to host memory",
    "kv_offloading_backend": "nothing: vLLM's own, which drops the KV of old weights when new ones have come",
}

_OTHER_ENDS = (
    "completions would end at other tokens than those that the trainer counts as ends: set eos_token_id in the model's "
    "generation_config.json"
)
_OTHER_MODEL = (
    "the engines would build another model than the one that is trained: change config.json in a local folder, or give "
    "the trainer a model object, whose configuration the engines take"
)
_OTHER_DISTRIBUTION = (
    "tokens would be sampled from a distribution that the trainer does not score: remove it; what generation_kwargs "
    "has (logit_bias, bad_words, structured_outputs) is in the log-probabilities that importance sampling reads"
)

# Engine arguments that silently make the engines another policy than the trained one (vLLM 0.31).
OTHER_POLICY_KEYS = {
    "generation_config": _OTHER_ENDS,
    "override_generation_config": _OTHER_ENDS,
    "hf_overrides": _OTHER_MODEL,
    "hf_config_path": _OTHER_MODEL,
    "config_format": _OTHER_MODEL,
    "model_class_overrides": _OTHER_MODEL,
    "logits_processors": _OTHER_DISTRIBUTION,
    "watermark_config": _OTHER_DISTRIBUTION,
    "enable_eplb": "vLLM moves experts between GPUs, and a weight sync would write to their first places: remove it",
}

SHARED_MODEL = (
    "ranks that share a model are not supported, each rank trains on prompts of its own (DeepSpeed, DDP or one "
    "process): remove it"
)

# Valid values. TRL checks its own options only when it uses them, after the first generation (1.16).
CHOICES = {
    "vllm_sync_backend": ("auto", "nccl", "shm"),
    "vllm_lora": ("auto", "adapter", "merge"),
    "old_logprobs": ("trainer", "engine"),
    "loss_type": ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"),
    "scale_rewards": ("group", "batch", "none"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "importance_sampling_level": ("token", "sequence"),
    "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
}

_TIMEOUTS = ("vllm_start_timeout", "vllm_generate_timeout", "vllm_sync_timeout", "reward_timeout")

# Package names of trackers. transformers checks them when it builds the trainer, after engines have started (5.17).
_TRACKERS = {"tensorboard": ("tensorboard", "tensorboardX"), "wandb": ("wandb",), "trackio": ("trackio",)}


def check_trackers(report_to: str | list[str] | None) -> None:
    """Check that the requested trackers are known and installed."""
    for name in [report_to] if isinstance(report_to, str) else report_to or []:
        if name in ("none", "all"):
            continue
        if name in _TRACKERS:
            if not any(map(importlib.util.find_spec, _TRACKERS[name])):
                raise ValueError(
                    f"report_to asks for {name}, which is not installed: pip install grpo-local[track], or leave it out"
                )
            continue
        from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

        if name not in INTEGRATION_TO_CALLBACK:
            near = did_you_mean(name, INTEGRATION_TO_CALLBACK) or f": one of {', '.join(INTEGRATION_TO_CALLBACK)}"
            raise ValueError(f"report_to asks for {name!r}, which transformers does not know{near}")


def check_counts(args: Any) -> None:
    """Check lower bounds of counts and divisors."""
    least = {"num_generations": 2, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
    least |= {"steps_per_generation": 1, "generation_batch_size": 2, "num_iterations": 1}
    least |= {"max_completion_length": 1, "vllm_max_model_length": 2, "completions_per_step": 2}
    for name, smallest in least.items():
        value = getattr(args, name)
        if value is not None and value < smallest:
            raise ValueError(f"{name} is {value}; it must be {smallest} or more")


def check_placement(args: Any, environment: Mapping[str, str], num_gpus: int) -> None:
    """Check that ranks and engines fit this node's GPUs, as far as one rank knows; does nothing without GPUs.

    Runs before anything slow, and before DeepSpeed opens NCCL's communicator of all ranks (0.19), as transformers makes
    the process group: a rank without a GPU would fail there, and the others would wait.

    Args:
        environment: of a process started by a launcher or by hand.

    Raises:
        ValueError: they do not fit.
    """
    launch = read_launch(environment)
    if not num_gpus or not launch.launched:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the trainer warns once, with all nodes in view
        plan_node(
            launch,
            [str(index) for index in range(num_gpus)],
            reserved_gpus=args.vllm_reserved_gpus,
            tensor_parallel_size=args.vllm_tensor_parallel_size,
            engines_per_node=args.vllm_engines_per_node,
        )


def accumulation_of(args: Any, num_ranks: int) -> int:
    """Gradient accumulation steps per rank for `completions_per_step` over all ranks, in whole groups.

    Raises:
        ValueError: no whole number fits, or `gradient_accumulation_steps` has another value.
    """
    asked, size, group = args.completions_per_step, args.per_device_train_batch_size, args.num_generations
    micro_batch = size * num_ranks
    if asked % micro_batch or asked % group:
        near = either(multiples_around(asked, math.lcm(micro_batch, group)))
        other = next((count for count in range(size - 1, 0, -1) if asked % (count * num_ranks) == 0), None)
        raise ValueError(
            f"completions_per_step is {asked}, which is no whole number of micro-batches of {micro_batch} ({num_ranks} "
            f"ranks x per_device_train_batch_size {size}) in groups of num_generations {group}: set it to {near}"
            + (f", or per_device_train_batch_size to {other}" if other and asked % group == 0 else "")
        )
    steps, written = asked // micro_batch, args.gradient_accumulation_steps
    if written not in (trl.GRPOConfig.gradient_accumulation_steps, steps):
        raise ValueError(
            f"gradient_accumulation_steps is {written}, but completions_per_step {asked} with {num_ranks} ranks x "
            f"per_device_train_batch_size {size} makes it {steps}: remove one of the two"
        )
    return steps


def check_local(args: Any) -> None:
    changed = [name for name in _SERVER_FIELDS if getattr(args, name) != getattr(trl.GRPOConfig, name)]
    if changed:
        raise ValueError(
            f"{', '.join(changed)}: local mode has no server, every node hosts its own engines; remove them, or "
            "set vllm_mode to 'server'"
        )
    if args.vllm_enable_sleep_mode:
        raise ValueError(
            "vllm_enable_sleep_mode: an engine in local mode has its GPUs to itself and never sleeps; remove it"
        )
    if args.use_transformers_continuous_batching:
        raise ValueError(
            "use_transformers_continuous_batching and use_vllm are both on, but only one can generate: set "
            "one of them to False"
        )
    if args.fsdp:
        raise ValueError(
            f"fsdp is {args.fsdp!r}: local mode trains with DeepSpeed (configs/1node.yaml), DDP or one process; "
            "FSDP is not supported"
        )
    if not args.ds3_gather_for_generation:
        raise ValueError("ds3_gather_for_generation is False, which has no meaning when vLLM generates: remove it")
    check_lookahead(args)
    _check_in_flight(args.generation_lookahead, args.engine_kwargs)
    for name, words in CHOICES.items():
        if getattr(args, name) not in words:
            known = ", ".join(map(repr, words))
            raise ValueError(f"{name} is {getattr(args, name)!r}; it is one of {known}")
    for name in ("vllm_sync_bucket_mb", *_TIMEOUTS):
        if getattr(args, name) <= 0:
            raise ValueError(f"{name} is {getattr(args, name)}; it must be above 0")
    for name in ("vllm_max_restarts", "vllm_max_refused"):
        if getattr(args, name) < 0:
            raise ValueError(f"{name} is {getattr(args, name)}; it must be 0 or more")
    for name in ("start_timeout", "rank_stall_timeout"):
        if getattr(args, name) <= 0:
            raise ValueError(f"{name} is {getattr(args, name):g}; it must be above 0, in seconds")
    if args.vllm_stall_timeout is not None and args.vllm_stall_timeout < 5:
        raise ValueError(f"vllm_stall_timeout is {args.vllm_stall_timeout:g}; it must be 5 or more, or None")
    if args.heartbeat_timeout < 5:  # a busy machine is not a lost one
        raise ValueError(f"heartbeat_timeout is {args.heartbeat_timeout:g}; it must be 5 or more")
    waits = {"vllm_sync_timeout": ("a weight sync", "the engine's"), "reward_timeout": ("another's rewards", "its")}
    for name, (awaited, whose) in waits.items():
        if getattr(args, name) >= args.ddp_timeout:
            raise ValueError(
                f"{name} is {getattr(args, name):g} s, but ranks that wait for {awaited} in a collective are ended "
                f"after ddp_timeout, {args.ddp_timeout} s, without {whose} word: set ddp_timeout higher"
            )
    if args.vllm_max_logprob_gap is not None and args.vllm_max_logprob_gap <= 0:
        raise ValueError(f"vllm_max_logprob_gap is {args.vllm_max_logprob_gap}; it must be above 0, or None")
    if not 0 < args.vllm_gpu_memory_utilization <= 1:
        raise ValueError(
            f"vllm_gpu_memory_utilization is {args.vllm_gpu_memory_utilization}; it is a share, above 0, at most 1"
        )
    check_data_parallel(args.parallelism_config, "parallelism_config")
    _check_engine_kwargs(args.engine_kwargs, use_cpu=args.use_cpu)
    _check_generation_kwargs(args, args.generation_kwargs or {})
    check_importance_sampling(args)


def check_data_parallel(config: ParallelismConfig | None, where: str) -> None:
    """Refuse ranks that share a model: TRL gives each rank its own prompts (1.16), and engines give it its own
    completions.

    Raises:
        ValueError: names the size above one.
    """
    for name in ("tp_size", "cp_size", "sp_size"):
        if config is not None and getattr(config, name) > 1:
            raise ValueError(f"{where} has {name} {getattr(config, name)}: {SHARED_MODEL}")


def _check_engine_kwargs(engine_kwargs: Mapping[str, Any], *, use_cpu: bool) -> None:
    for key in engine_kwargs:
        if key in OWN_ENGINE_KEYS:
            raise ValueError(f"vllm_engine_kwargs holds {key!r}, which follows from {OWN_ENGINE_KEYS[key]}")
        if key in OTHER_POLICY_KEYS:
            raise ValueError(f"vllm_engine_kwargs holds {key!r} [GRPO-212]: {OTHER_POLICY_KEYS[key]}")
    speculative = engine_kwargs.get("speculative_config") or {}
    if speculative.get("rejection_sample_method") == "synthetic":
        raise ValueError(
            "speculative_config has rejection_sample_method 'synthetic', which accepts drafts whatever the policy "
            "thinks of them: take 'standard' or 'block'"
        )
    check_quantised_engine(str(engine_kwargs.get("quantization") or "").lower(), use_cpu=use_cpu)


def check_quantised_engine(method: str, *, use_cpu: bool) -> None:
    """Refuse a quantised engine where its format does not allow weight syncs.

    Args:
        method: vLLM's name of the quantisation; '' for none.

    Raises:
        ValueError: has the reason.
    """
    if "awq" in method or "gptq" in method:
        raise ValueError(
            f"vllm_engine_kwargs holds quantization {method!r} [GRPO-419]: AWQ and GPTQ choose their scales by "
            "calibration data, and could not be made anew with each weight sync: remove it"
        )
    if method == "fp8" and use_cpu:
        raise ValueError("vllm_engine_kwargs holds quantization 'fp8', which vLLM has for GPUs alone: remove it")
    if method == "fp8":
        warnings.warn(
            "vllm_engine_kwargs holds quantization 'fp8': engines would round what each weight sync brings, which has "
            "not been tried on a GPU; look at weight_sync/logprob_gap_max, and set vllm_max_logprob_gap",
            stacklevel=2,
        )


def _check_generation_kwargs(args: Any, generation_kwargs: Mapping[str, Any]) -> None:
    for key in ("n", "logprobs", "prompt_logprobs", "output_kind", "flat_logprobs"):
        if key in generation_kwargs:
            raise ValueError(f"generation_kwargs holds {key!r}, which the trainer sets itself: remove it")
    asked = generation_kwargs.get("temperature", args.temperature)
    if asked != args.temperature:
        raise ValueError(
            f"generation_kwargs holds temperature {asked}, but temperature is {args.temperature}: engines would sample "
            f"at the one and the trainer score at the other; set temperature to {asked}, and remove it there"
        )
    regex, structured = args.vllm_structured_outputs_regex, generation_kwargs.get("structured_outputs")
    if regex is not None and structured is not None:  # as in TRL
        warnings.warn(
            f"vllm_structured_outputs_regex {regex!r} and generation_kwargs['structured_outputs'] {structured!r} are "
            "both set: the regex counts; remove one of the two",
            stacklevel=2,
        )


def _check_in_flight(generation_lookahead: int, engine_kwargs: Mapping[str, Any]) -> None:
    """Check engines that receive new weights during generation. KV caches other than vLLM's own and host memory are
    refused in any case (`OWN_ENGINE_KEYS`)."""
    if generation_lookahead < 2:
        return
    if engine_kwargs.get("kv_offloading_size"):
        raise ValueError(
            f"vllm_engine_kwargs holds 'kv_offloading_size' with generation_lookahead {generation_lookahead}: what has "
            "been moved to host memory is KV of old weights soon, and engines drop it only while nothing is under way: "
            "remove it, or set generation_lookahead to 1"
        )
    if engine_kwargs.get("max_num_seqs") == 1:
        raise ValueError(
            f"vllm_engine_kwargs holds max_num_seqs 1 with generation_lookahead {generation_lookahead}: an engine has "
            "one place kept free, for the verification of weights that arrive amid completions: set max_num_seqs to 2 "
            "or more, or generation_lookahead to 1"
        )
