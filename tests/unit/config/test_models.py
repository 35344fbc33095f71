"""What reaches vLLM: sampling options as TRL sets them, engine arguments, the model's description and its dtype."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo import GRPOConfig
from grpo.config.models import (
    EngineModel,
    PrivateFolder,
    attention_heads,
    choose_backend,
    compute_dtype,
    describe_model,
    engine_args,
    samples_as_scored,
    sampling_settings,
)
from grpo.engine.answers import sampling_params
from grpo.place.topology import read_topology
from tests.support.tiny_models import tiny_config

MODEL = EngineModel(path="m", tokenizer="t", revision="r", dtype=torch.bfloat16)


def config(**settings: Any) -> GRPOConfig:
    return GRPOConfig(**{"output_dir": "unused", "use_cpu": True, "bf16": False, "report_to": "none", **settings})


def topology(tensor_parallel_size: int = 1) -> Any:
    return read_topology(
        use_cpu=True, reserved_gpus=None, tensor_parallel_size=tensor_parallel_size, engines_per_node=None, env={}
    )


def test_sampling_params_include_every_trl_option() -> None:
    args = config(
        temperature=0.7,
        top_p=0.9,
        top_k=11,
        min_p=0.05,
        repetition_penalty=1.2,
        max_completion_length=33,
        generation_kwargs={"frequency_penalty": 0.5, "stop": ["x"], "seed": 3, "top_k": 5},
        vllm_structured_outputs_regex=r"\d+",
    )
    params = sampling_params(sampling_settings(args), seed=99)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (
        0.7,
        0.9,
        5,
        0.05,
    )  # generation_kwargs win
    assert (params.repetition_penalty, params.max_tokens, params.frequency_penalty) == (1.2, 33, 0.5)
    assert (params.n, params.seed, params.logprobs) == (1, 99, 0)  # the user's seed is folded into ours
    assert params.structured_outputs.regex == r"\d+"
    assert params.stop == ["x"]
    assert params.detokenize  # stop strings are looked for in text
    assert not sampling_params(sampling_settings(config()), seed=0).detokenize
    assert sampling_settings(config(min_p=None))["min_p"] == 0.0


SHAPED: list[dict[str, Any]] = [
    {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"repetition_penalty": 1.1}, {"vllm_structured_outputs_regex": "a+"},
    {"generation_kwargs": {"presence_penalty": 0.5}}, {"generation_kwargs": {"min_tokens": 3}},
]  # fmt: skip


@pytest.mark.parametrize("settings", SHAPED, ids=str)
def test_samples_as_scored_with_shaped_sampling_is_false(settings: dict[str, Any]) -> None:
    assert not samples_as_scored(config(**settings))


def test_samples_as_scored_with_plain_sampling_is_true() -> None:
    assert samples_as_scored(config())
    assert samples_as_scored(config(temperature=0.7, top_k=-1, generation_kwargs={"stop": ["."], "seed": 3}))


def test_engine_args_from_config_are_vllm_fields() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    args = config(vllm_max_model_length=512, seed=7, vllm_engine_kwargs={"max_num_seqs": 32}, bf16=False)
    settings = engine_args(args, MODEL, topology())
    assert {"dtype": "bfloat16", "max_model_len": 512, "load_format": "dummy", "seed": 7}.items() <= settings.items()
    assert settings["logprobs_mode"] == "processed_logprobs"
    assert settings["max_num_seqs"] == 32
    assert settings["kv_cache_memory_bytes"] == 2**30
    assert settings["enable_chunked_prefill"] is False
    assert settings.keys() <= {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    assert engine_args(config(), MODEL, topology(2))["distributed_executor_backend"] == "mp"
    assert "max_model_len" not in engine_args(config(), MODEL, topology())


def test_engine_args_with_cpu_cache_size_of_user_omit_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "3")
    assert "kv_cache_memory_bytes" not in engine_args(config(), MODEL, topology())


def test_choose_backend_by_gpus_returns_nccl_or_shm() -> None:
    assert choose_backend("auto", has_gpus=True) == "nccl"
    assert choose_backend("auto", has_gpus=False) == "shm"
    assert choose_backend("shm", has_gpus=True) == "shm"
    with pytest.raises(ValueError, match="'nccl', but this node has no GPUs"):
        choose_backend("nccl", has_gpus=False)


def test_describe_model_of_object_writes_private_folder_without_weights(tiny_model: Path, tmp_path: Path) -> None:
    class Mine(type(AutoModelForCausalLM.from_pretrained(tiny_model))):  # type: ignore[misc]
        """A user's own subclass, which vLLM has never heard of."""

    model = Mine.from_pretrained(tiny_model)
    model.config.architectures = None
    model.generation_config.temperature = 0.3  # contradicts do_sample=False; nobody here minds
    described, folder = describe_model(
        model, config(output_dir=str(tmp_path)), AutoTokenizer.from_pretrained(tiny_model), topology()
    )
    assert folder is not None
    assert described.path == described.tokenizer == str(folder.path)
    assert folder.path.stat().st_mode & 0o777 == 0o700
    files = {path.name for path in folder.path.iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json"} <= files
    assert not [name for name in files if name.endswith((".safetensors", ".bin"))]
    assert json.loads((folder.path / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
    path = folder.path
    del folder
    assert not path.exists()


def test_private_folder_of_same_path_outlives_older(tmp_path: Path) -> None:
    before = PrivateFolder(tmp_path / "engine")
    after = PrivateFolder(tmp_path / "engine")
    del before
    assert after.path.exists()
    del after
    assert not (tmp_path / "engine").exists()


def test_describe_model_of_path_makes_no_folder(tiny_model: Path) -> None:
    described, folder = describe_model(
        str(tiny_model), config(model_init_kwargs={"revision": "main"}), None, topology()
    )
    assert folder is None
    assert (described.path, described.tokenizer, described.revision) == (str(tiny_model), str(tiny_model), "main")


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        ({}, torch.float32),
        ({"bf16": True}, torch.bfloat16),
        ({"fp16": True}, torch.float16),
        ({"model_init_kwargs": {"dtype": "bfloat16"}}, torch.bfloat16),
        ({"model_init_kwargs": {"dtype": torch.float16}}, torch.float16),
        ({"model_init_kwargs": {"dtype": "auto"}}, torch.float32),  # what the checkpoint says
    ],
)
def test_compute_dtype_follows_trainer_settings(settings: dict[str, Any], dtype: torch.dtype, tiny_model: Path) -> None:
    assert compute_dtype(str(tiny_model), config(**settings)) == dtype


def test_compute_dtype_follows_mixed_precision_of_launcher(monkeypatch: pytest.MonkeyPatch, tiny_model: Path) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert compute_dtype(str(tiny_model), config()) == torch.bfloat16


def test_dtype_and_attention_heads_of_model_object_match_its_config() -> None:
    model = AutoModelForCausalLM.from_config(tiny_config("qwen2-tied"), dtype=torch.bfloat16)
    assert compute_dtype(model, config()) == torch.bfloat16
    assert attention_heads(model, config(vllm_tensor_parallel_size=2)) == (4, 2)
    assert attention_heads(model, config()) == (None, None)
