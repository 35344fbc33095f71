"""`GRPOConfig`: what local mode takes, refuses and resolves."""

import dataclasses
import importlib.util
from typing import Any

import deepspeed
import pytest
import torch
import trl
from accelerate import ParallelismConfig
from transformers import TrainingArguments

from grpo import GRPOConfig, config
from grpo.config.checks import OTHER_POLICY_KEYS, OWN_ENGINE_KEYS
from grpo.config.models import sampling_settings

CPU = {"output_dir": "unused", "use_cpu": True, "bf16": False, "report_to": "none"}


def test_config_defaults_select_local_mode() -> None:
    config = GRPOConfig(**CPU)
    assert config.local_mode
    assert config.vllm_gpu_memory_utilization == 0.9


@pytest.mark.parametrize("other", [{"use_vllm": False}, {"vllm_mode": "colocate"}, {"vllm_mode": "server"}])
def test_config_in_other_modes_keeps_trl_defaults(other: dict[str, Any]) -> None:
    config = GRPOConfig(**CPU, **other)
    theirs = trl.GRPOConfig(**CPU)
    assert not config.local_mode
    for name in trl.GRPOConfig.__dataclass_fields__:
        if name not in ("use_vllm", "vllm_mode", "logging_dir"):
            assert getattr(config, name) == getattr(theirs, name), name


@pytest.mark.parametrize(
    ("asked", "lookahead", "balances"),
    [(None, 0, False), (None, 1, False), (None, 2, True), (True, 0, True), (True, 4, True), (False, 4, False)],
)
def test_balances_nodes_by_default_is_true_from_lookahead_2(asked: bool | None, lookahead: int, balances: bool) -> None:
    config = GRPOConfig(**CPU, vllm_balance_nodes=asked)
    config.generation_lookahead = lookahead
    assert config.balances_nodes is balances


def test_importance_sampling_with_lookahead_defaults_to_token_truncate() -> None:
    modes = [
        GRPOConfig(**CPU, **settings).vllm_importance_sampling_mode
        for settings in (
            {},
            {"generation_lookahead": 1},
            {"generation_lookahead": 1, "vllm_importance_sampling_mode": "sequence_mask"},
            {"generation_lookahead": 4},
            {"generation_lookahead": 4, "vllm_importance_sampling_mode": "token_mask"},
            {"loss_type": "vespo"},
        )
    ]
    of_ahead = ["sequence_mask", "token_truncate", "sequence_mask", "token_truncate", "token_mask"]
    assert modes == [*of_ahead, "token_truncate"]


def test_old_logprobs_from_engine_accepts_lookahead_without_correction() -> None:
    """Nor has its mode an effect, however far ahead; temperature is what both sides have."""
    settings: list[dict[str, Any]] = [
        {"generation_lookahead": 4, "vllm_importance_sampling_correction": False},
        {"generation_lookahead": 4, "vllm_importance_sampling_mode": "sequence_mask"},
        {"loss_type": "vespo"},
        {"temperature": 0.7, "generation_kwargs": {"stop": ["."]}},
        {"num_iterations": 2, "gradient_accumulation_steps": 1, "steps_per_generation": 4},
    ]
    for each in settings:
        assert GRPOConfig(**CPU, old_logprobs="engine", **each).old_logprobs == "engine"


REFUSED = {
    "mode": ({"vllm_mode": "remote"}, r"vllm_mode is 'remote'.*'local', 'server' and 'colocate'"),
    "server field": ({"vllm_server_port": 9000}, r"vllm_server_port: local mode has no server"),
    "sleep": ({"vllm_enable_sleep_mode": True}, r"vllm_enable_sleep_mode: .*never sleeps"),
    "continuous batching": (
        {"use_transformers_continuous_batching": True},
        r"use_transformers_continuous_batching and use_vllm are both on",
    ),
    "fsdp": ({"fsdp": "full_shard"}, r"fsdp is .*FSDP is not supported"),
    "gather for generation": ({"ds3_gather_for_generation": False}, r"ds3_gather_for_generation is False"),
    "backend": ({"vllm_sync_backend": "mpi"}, r"vllm_sync_backend is 'mpi'"),
    "bucket": ({"vllm_sync_bucket_mb": 0}, r"vllm_sync_bucket_mb is 0; it must be above 0"),
    "timeout": ({"vllm_generate_timeout": -1}, r"vllm_generate_timeout is -1"),
    "start": ({"start_timeout": 0}, r"start_timeout is 0; it must be above 0"),
    "stall": ({"vllm_stall_timeout": 2}, r"vllm_stall_timeout is 2; it must be 5 or more, or None"),
    "rank stall": ({"rank_stall_timeout": -1}, r"rank_stall_timeout is -1; it must be above 0"),
    "heartbeat": ({"heartbeat_timeout": 2}, r"heartbeat_timeout is 2; it must be 5 or more"),
    "rewards": ({"reward_timeout": 0}, r"reward_timeout is 0; it must be above 0"),
    "tools": ({"tool_timeout": 0}, r"tool_timeout is 0; it must be above 0"),
    "threads of tools": ({"max_tool_threads": 0}, r"max_tool_threads is 0; it must be above 0"),
    "tools that hang": ({"max_abandoned_tools": -1}, r"max_abandoned_tools is -1; it must be 0 or more"),
    "rollouts": ({"rollout_timeout": 100}, r"tool_timeout is 120 s, but rollout_timeout.* is 100 s: raise"),
    "rewards outlast collectives": (
        {"reward_timeout": 1800.0},
        r"reward_timeout is 1800 s, but .* another's rewards .* after ddp_timeout, 1800 s.*: set ddp_timeout higher",
    ),
    "another temperature": (
        {"temperature": 0.7, "generation_kwargs": {"temperature": 1}},
        r"generation_kwargs holds temperature 1, but temperature is 0.7: .*set temperature to 1",
    ),
    "a draft that is accepted by chance": (
        {"vllm_engine_kwargs": {"speculative_config": {"rejection_sample_method": "synthetic"}}},
        r"rejection_sample_method 'synthetic', .*'standard' or 'block'",
    ),
    "aggregation": (
        {"multi_objective_aggregation": "normalise_then_sum"},
        r"multi_objective_aggregation is 'normalise_then_sum'; it is one of 'sum_then_normalize', 'normalize_then_sum'",
    ),
    "tensor parallel ranks": (
        {"parallelism_config": ParallelismConfig(tp_size=2)},
        r"parallelism_config has tp_size 2: .*each rank .*remove it",
    ),
    "sequence parallel ranks": (  # by TRL
        {"parallelism_config": ParallelismConfig(sp_size=2)},
        r"does not support .*parallelism_config.*sp_size",
    ),
    "gap": ({"vllm_max_logprob_gap": 0.0}, r"vllm_max_logprob_gap is 0.0"),
    "weight sync outlasts collectives": (
        {"vllm_sync_timeout": 1800.0},
        r"vllm_sync_timeout is 1800 s, but .* after ddp_timeout, 1800 s.*: set ddp_timeout higher",
    ),
    "behind": ({"generation_lookahead": -1}, r"generation_lookahead is -1; it is a whole number .*, 0 or more"),
    "half a batch ahead": ({"generation_lookahead": 1.5}, r"generation_lookahead is 1\.5; it is a whole number"),
    "ahead, yes": ({"generation_lookahead": True}, r"generation_lookahead is True; it is a whole number"),
    "two ahead, KV in host memory": (
        {"generation_lookahead": 2, "vllm_engine_kwargs": {"kv_offloading_size": 4.0}},
        r"'kv_offloading_size' with generation_lookahead 2: .*KV of old weights.*: remove it, or set gen.* to 1",
    ),
    "two ahead, no place to spare": (
        {"generation_lookahead": 2, "vllm_engine_kwargs": {"max_num_seqs": 1}},
        r"max_num_seqs 1 with generation_lookahead 2: .* kept free.*: set max_num_seqs to 2 or more, or gen.* to 1",
    ),
    "ahead, uncorrected": (
        {"generation_lookahead": 1, "vllm_importance_sampling_correction": False},
        r"correction is False, but with generation_lookahead 1 .*old_logprobs to 'engine', or generation_.* to 0",
    ),
    "far ahead, uncorrected": (
        {"generation_lookahead": 4, "vllm_importance_sampling_correction": False},
        r"vllm_importance_sampling_correction is False, but with generation_lookahead 4 .*older policy",
    ),
    "far ahead, by sequence": (
        {"generation_lookahead": 2, "vllm_importance_sampling_mode": "sequence_truncate"},
        r"vllm_importance_sampling_mode is 'sequence_truncate' with generation_lookahead 2: .*several.*remove it",
    ),
    "old log-probabilities": ({"old_logprobs": "vllm"}, r"old_logprobs is 'vllm'; it is one of 'trainer', 'engine'"),
    "old log-probabilities, top-p": (
        {"old_logprobs": "engine", "top_p": 0.9},
        r"old_logprobs is 'engine', but .*another distribution.*top_p 0\.9.*set old_logprobs to 'trainer'",
    ),
    "old log-probabilities, masked": (
        {"old_logprobs": "engine", "vllm_structured_outputs_regex": "a+"},
        r"old_logprobs is 'engine', but .*structured_outputs \{'regex': 'a\+'\}",
    ),
    "old log-probabilities elsewhere": (
        {"vllm_mode": "server", "old_logprobs": "engine"},
        r"old_logprobs work in local mode only",
    ),
    "ahead, dealt out otherwise": (
        {"generation_lookahead": 1, "accelerator_config": {"split_batches": True}},
        r"accelerator_config has split_batches",
    ),
    "memory": ({"vllm_gpu_memory_utilization": 1.5}, r"vllm_gpu_memory_utilization is 1.5"),
    "generation kwargs": ({"generation_kwargs": {"n": 4}}, r"generation_kwargs holds 'n'"),
    "vespo": (
        {"loss_type": "vespo", "vllm_importance_sampling_mode": "sequence_mask"},
        r"loss_type 'vespo' needs vllm_importance_sampling_mode",
    ),
    "our field elsewhere": ({"use_vllm": False, "vllm_sync_bucket_mb": 3}, r"vllm_sync_bucket_mb .*local mode only"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_config_refusal_names_value_and_remedy(case: str) -> None:
    settings, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        GRPOConfig(**CPU, **settings)


@pytest.mark.parametrize("key", sorted(OWN_ENGINE_KEYS))
def test_engine_kwargs_decided_by_other_setting_are_refused_by_name(key: str) -> None:
    with pytest.raises(ValueError, match=f"vllm_engine_kwargs holds '{key}'"):
        GRPOConfig(**CPU, vllm_engine_kwargs={key: 1})


@pytest.mark.parametrize("key", sorted(OTHER_POLICY_KEYS))
def test_engine_kwargs_changing_policy_are_refused_by_name(key: str) -> None:
    with pytest.raises(ValueError, match=rf"vllm_engine_kwargs holds '{key}' \[GRPO-212\]: "):
        GRPOConfig(**CPU, vllm_engine_kwargs={key: 1})


def test_refused_engine_kwargs_exist_in_vllm() -> None:
    """And of those that vLLM has, the harmless ones are taken."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    assert known >= OWN_ENGINE_KEYS.keys() | OTHER_POLICY_KEYS.keys()
    harmless = {"max_num_seqs": 32, "reasoning_parser": "qwen3", "kv_cache_dtype": "fp8", "speculative_config": {}}
    assert GRPOConfig(**CPU, vllm_engine_kwargs=harmless).engine_kwargs == harmless


@pytest.mark.parametrize("ahead", [0, 1])
def test_kv_offloading_and_one_seq_up_to_lookahead_1_are_accepted(ahead: int) -> None:
    kwargs = {"kv_offloading_size": 4.0, "max_num_seqs": 1}
    assert GRPOConfig(**CPU, generation_lookahead=ahead, vllm_engine_kwargs=kwargs).engine_kwargs == kwargs


def test_vllm_kv_arguments_match_reviewed_list() -> None:
    """For `generation_lookahead` 2 and more: does it know the salt, and is it dropped?"""
    from vllm.engine.arg_utils import AsyncEngineArgs

    about_kv = {name for field in dataclasses.fields(AsyncEngineArgs) if "kv_" in (name := field.name)}
    harmless = {"kv_cache_dtype", "kv_cache_dtype_skip_layers", "kv_cache_memory_bytes", "kv_cache_metrics"}
    harmless |= {"kv_cache_metrics_sample", "kv_events_config", "kv_sharing_fast_prefill"}
    harmless |= {"calculate_kv_scales", "cp_kv_cache_interleave_size", "dcp_kv_cache_interleave_size"}
    harmless |= {"disable_hybrid_kv_cache_manager", "num_gpu_blocks_override"}
    assert about_kv - harmless - OWN_ENGINE_KEYS.keys() == {"kv_offloading_size"}


def test_generation_kwargs_with_same_temperature_are_accepted() -> None:
    same = GRPOConfig(**CPU, temperature=0.7, generation_kwargs={"temperature": 0.7})
    assert same.generation_kwargs == {"temperature": 0.7}


def test_regex_beside_structured_outputs_wins_with_warning() -> None:
    with pytest.warns(UserWarning, match=r"vllm_structured_outputs_regex 'a\+' and generation_kwargs\['structured_out"):
        both = GRPOConfig(
            **CPU, vllm_structured_outputs_regex="a+", generation_kwargs={"structured_outputs": {"regex": "b+"}}
        )
    assert sampling_settings(both)["structured_outputs"] == {"regex": "a+"}


def test_engine_kwargs_as_json_string_are_parsed() -> None:
    assert GRPOConfig(**CPU, vllm_engine_kwargs='{"max_num_seqs": 32}').vllm_engine_kwargs == {"max_num_seqs": 32}


@pytest.mark.parametrize(("launched", "refused"), [(True, True), (False, False)])
def test_config_with_more_ranks_than_gpus_raises_before_process_group(
    launched: bool, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In it a rank without a GPU fails, and those of other nodes wait for it."""
    monkeypatch.setattr(config, "count_gpus", lambda env, use_cpu: 2)
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value) if launched else monkeypatch.delenv(name, raising=False)
    made: list[None] = []
    monkeypatch.setattr(trl.GRPOConfig, "__post_init__", lambda self: made.append(None))
    monkeypatch.setattr("grpo.config.check_local", lambda args: None)
    if refused:
        with pytest.raises(ValueError, match=r"leave 1 .* num_processes is 3 .*GRPO-103.*--gpus-per-node"):
            GRPOConfig(output_dir="unused")
    else:
        GRPOConfig(output_dir="unused")
    assert len(made) == (not refused)


@pytest.mark.parametrize(("launched", "expected"), [(True, ["gloo"]), (False, [])])
def test_ddp_backend_with_deepspeed_file_sets_process_group_backend(
    launched: bool, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On GPUs transformers drops it there: the group has to be there before."""
    asked: list[str] = []
    monkeypatch.setattr(deepspeed, "init_distributed", lambda dist_backend, **_: asked.append(dist_backend))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(trl.GRPOConfig, "__post_init__", lambda self: None)
    monkeypatch.setattr("grpo.config.check_local", lambda args: None)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    for name, value in zip(names, "0101", strict=True):
        monkeypatch.setenv(name, value) if launched else monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(TrainingArguments, "_setup_devices", property(lambda self: torch.device("cpu")))
    config = GRPOConfig(output_dir="unused", deepspeed="configs/zero3.json", ddp_backend="gloo")
    assert config._setup_devices == torch.device("cpu")
    assert asked == expected


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_report_to_with_missing_tracker_raises(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec

    def found(module: str, package: str | None = None) -> Any:
        return None if module.lower().startswith(name) else find(module, package)

    assert GRPOConfig(**{**CPU, "report_to": name}).report_to == [name]
    monkeypatch.setattr(importlib.util, "find_spec", found)
    with pytest.raises(ValueError, match=rf"^report_to asks for {name}, which is .* pip install grpo-local\[track\]"):
        GRPOConfig(**{**CPU, "report_to": ["none", name]})


def test_report_to_with_unknown_tracker_raises() -> None:
    with pytest.raises(ValueError, match=r"^report_to asks for 'wandbb', .* \(did you mean wandb\?\)$"):
        GRPOConfig(**{**CPU, "report_to": "wandbb"})
    with pytest.raises(ValueError, match="does not know: one of azure_ml, "):
        GRPOConfig(**{**CPU, "report_to": ["?"]})
    assert GRPOConfig(**{**CPU, "report_to": "mlflow"}).report_to == ["mlflow"]


@pytest.mark.parametrize(("num_ranks", "steps"), [(7, 24), (14, 12), (28, 6), (24, 7), (1, 168)])
def test_completions_per_step_on_any_rank_count_keeps_batch_size(
    num_ranks: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GRPOConfig, "num_ranks", num_ranks)
    monkeypatch.setattr(GRPOConfig, "world_size", num_ranks)
    config = GRPOConfig(**CPU, completions_per_step=672, per_device_train_batch_size=4, num_generations=8)
    assert config.gradient_accumulation_steps == config.steps_per_generation == steps
    assert config.generation_batch_size == 672


NO_BATCH = {
    "number": (
        {"completions_per_step": 1000},
        r"completions_per_step is 1000, .*micro-batches of 112 \(28 ranks x per_device_train_batch_size 4\) in groups "
        r"of num_generations 8: set it to 896 or 1008$",
    ),
    "micro-batch": ({"completions_per_step": 392}, "set it to 336 or 448, or per_device_train_batch_size to 2$"),
    "too few": ({"completions_per_step": 8}, "set it to 112$"),
    "group": ({"completions_per_step": 336, "num_generations": 32}, "num_generations 32: set it to 224 or 448$"),
    "one": ({"completions_per_step": 1}, "completions_per_step is 1; it must be 2 or more"),
    "both": (
        {"completions_per_step": 672, "gradient_accumulation_steps": 4},
        "gradient_accumulation_steps is 4, but completions_per_step 672 with 28 ranks x per_device_train_batch_size 4 "
        "makes it 6: remove one",
    ),
}


@pytest.mark.parametrize(("settings", "message"), NO_BATCH.values(), ids=NO_BATCH.keys())
def test_completions_per_step_without_matching_batch_raises(
    settings: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GRPOConfig, "num_ranks", 28)
    with pytest.raises(ValueError, match=message):
        GRPOConfig(**{**CPU, "per_device_train_batch_size": 4, "num_generations": 8, **settings})
