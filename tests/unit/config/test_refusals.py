"""What local mode refuses before anything is started, and the warning of plain DDP."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trl
from datasets import Dataset
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from grpo import GRPOConfig, GRPOTrainer
from grpo.config.refusals import check_init_kwargs, ddp_memory_message
from grpo.ops.train.demo import MODEL

DATA = Dataset.from_dict({"prompt": ["1+1="]})


@pytest.fixture(autouse=True)
def own_output_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def config(**settings: Any) -> GRPOConfig:
    return GRPOConfig(**{"output_dir": "unused", "use_cpu": True, "bf16": False, "report_to": "none", **settings})


def tool(a: int) -> int:
    """A tool.

    Args:
        a: a number
    """
    return a


REFUSED = {
    "rollouts that move": (
        {"rollout_func": print, "args": config(vllm_balance_nodes=True)},
        r"with rollout_func an episode stays with its rank.*set vllm_balance_nodes to False",
    ),
    "rollouts with tools": (
        {"rollout_func": print, "tools": [tool]},
        r"rollout_func and tools: a rollout function holds its episodes itself",
    ),
    "a streamed data set ahead": (
        {"train_dataset": DATA.to_iterable_dataset(), "args": config(generation_lookahead=1, max_steps=1)},
        r"a streamed data set does not have: .*generation_lookahead to 0",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_trainer_with_unsupported_features_refuses_them_by_name(case: str) -> None:
    arguments, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        GRPOTrainer(
            **{"model": str(MODEL), "reward_funcs": print, "args": config(), "train_dataset": DATA, **arguments}
        )


def test_trainer_under_fsdp_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match=r"FSDP.*DeepSpeed, DDP or one process"):
        GRPOTrainer(str(MODEL), reward_funcs=print, args=config(), train_dataset=DATA)


@pytest.mark.parametrize("kind", ["TP", "CP", "SP"])
def test_trainer_with_model_parallel_ranks_of_launcher_raises(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `accelerate launch` passes on what its file has under `parallelism_config`."""
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv(f"PARALLELISM_CONFIG_{kind}_SIZE", "2")
    with pytest.raises(ValueError, match=rf"the launcher's parallelism_config has {kind.lower()}_size 2: .*remove it"):
        GRPOTrainer(str(MODEL), reward_funcs=print, args=config(), train_dataset=DATA)


def test_trainer_with_deepspeed_tensor_parallel_raises() -> None:
    args = config()
    args.deepspeed_plugin = SimpleNamespace(deepspeed_config={"tensor_parallel": {"autotp_size": 2}})
    with pytest.raises(ValueError, match=r"DeepSpeed's tensor_parallel.autotp_size is 2: .*remove it"):
        GRPOTrainer(str(MODEL), reward_funcs=print, args=args, train_dataset=DATA)


def test_trainer_with_data_parallel_ranks_passes_parallelism_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "2")
    with pytest.raises(ValueError, match=r"is './no-such-model', but .* does not exist"):
        GRPOTrainer("./no-such-model", reward_funcs=print, args=config(), train_dataset=DATA)


def test_trainer_with_model_split_over_ranks_raises(tiny_model: Path) -> None:
    for key, value in {"tp_plan": "auto", "tp_size": 2, "distributed_config": {"tp_size": 2}}.items():
        with pytest.raises(ValueError, match=rf"model_init_kwargs holds '{key}', which splits the model over ranks"):
            check_init_kwargs(config(model_init_kwargs={key: value}), str(tiny_model))
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    model._tp_size = 2  # as `from_pretrained(..., tp_plan="auto")` leaves it
    with pytest.raises(ValueError, match=r"the model is split over 2 ranks \(tp_size\)"):
        GRPOTrainer(model, reward_funcs=print, args=config(), train_dataset=DATA)


def test_trainer_with_unreloadable_model_raises(tmp_path: Path) -> None:
    CONFIG_MAPPING["gpt_oss"](architectures=["GptOssForCausalLM"]).save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"is a GptOssForCausalLM, whose weights vLLM cannot reload: .*experts and sinks"
    ):
        GRPOTrainer(str(tmp_path), reward_funcs=print, args=config(), train_dataset=DATA)


def test_trainer_with_trl_config_raises() -> None:
    theirs = trl.GRPOConfig(output_dir="unused", use_cpu=True, bf16=False)
    with pytest.raises(TypeError, match="GRPO-201"):
        GRPOTrainer(str(MODEL), reward_funcs=print, args=theirs, train_dataset=DATA)  # type: ignore[arg-type]


def test_check_init_kwargs_with_subfolder_raises() -> None:
    with pytest.raises(ValueError, match="model_init_kwargs holds 'subfolder'"):
        check_init_kwargs(config(model_init_kwargs={"subfolder": "a"}), "some-model")
    check_init_kwargs(config(model_init_kwargs={"attn_implementation": "sdpa", "token": None}), "some-model")


def test_check_init_kwargs_with_config_overrides_raises(tiny_model: Path) -> None:
    """transformers puts such arguments into the configuration of the model that it loads; vLLM reads config.json."""
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    for key, value in {"rope_parameters": rope, "rms_norm_eps": 1e-3}.items():
        assert getattr(AutoConfig.from_pretrained(tiny_model, **{key: value}), key) == value
        with pytest.raises(
            ValueError, match=rf"model_init_kwargs holds '{key}', .* config.json, .* give the trainer a model"
        ):
            check_init_kwargs(config(model_init_kwargs={key: value}), str(tiny_model))
    harmless = {"attention_dropout": 0.1, "use_cache": False, "low_cpu_mem_usage": True, "rms_norm_eps": 1e-6}
    check_init_kwargs(config(model_init_kwargs=harmless), str(tiny_model))
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    check_init_kwargs(config(model_init_kwargs={"rms_norm_eps": 1e-3}), model)  # which TRL leaves as it is


def test_ddp_memory_message_for_too_large_model_suggests_zero3() -> None:
    gib = 2**30
    assert ddp_memory_message(5 * 10**9, 80 * gib, each=16) is None  # 74.5 GiB
    assert ddp_memory_message(5 * 10**9, 80 * gib, each=20) is not None  # 93.1 GiB: of two ranks
    message = ddp_memory_message(7 * 10**9, 80 * gib, each=16)
    assert message is not None
    assert "7.0 B parameters take 104 GiB" in message
    assert "--deepspeed configs/zero3.json" in message
