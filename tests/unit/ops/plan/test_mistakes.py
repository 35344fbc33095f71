"""`grpo plan` refuses what `train.py` refuses, by the same checks: a line for each mistake, and no traceback."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.launching import ROOT
from tests.support.planned_cluster import Cluster

# settings of the training file (None: left out), flags -> what the one error says
MISTAKES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "a misspelt flag": ({}, ["--lerning_rate", "1"], ["--lerning_rate", "did you mean --learning_rate?"]),
    "an abbreviated flag": ({}, ["--learning_rat", "1"], ["--learning_rat", "did you mean --learning_rate?"]),
    "a list for a number": ({"num_generations": [4]}, [], ["num_generations is [4] (list)", "has to be int"]),
    "no rewards": ({"reward_funcs": None}, [], ["nothing to score", "--reward_funcs"]),
    "a reward by a wrong name": ({"reward_funcs": ["exact_mtach"]}, [], ["did you mean exact_match?"]),
    "a module that is not there": ({"reward_funcs": ["nowhere.score"]}, [], ["no module 'nowhere'"]),
    "more weights than rewards": ({"reward_weights": [1.0, 2.0]}, [], ["reward_weights has 2 numbers"]),
    "no data": ({"dataset_name": None}, [], ["no data", "--dataset_name"]),
    "data that is not there": ({"dataset_name": "./nowhere.jsonl"}, [], ["./nowhere.jsonl", "does not exist"]),
    "no model for the data": ({"model_name_or_path": None}, [], ["a data set is given, but no model"]),
    "a model that is not there": ({"model_name_or_path": "/no/model"}, [], ["'/no/model'", "does not exist"]),
    "LoRA on the head": ({"use_peft": True, "lora_target_modules": ["lm_head"]}, [],
                         ["target_modules takes the head, lm_head", "leave it out"]),
    "LoRA on layers that are not there": ({"use_peft": True}, ["--lora_target_modules", "queries"],
                                          ["peft_config does not fit LlamaForCausalLM", "queries"]),
    "LoRA on bare parameters": ({"use_peft": True}, ["--lora_target_parameters", "mlp.up_proj.weight"],
                                ["mlp.up_proj.weight", "name linear layers in target_modules"]),
    "LoRA with a reference that moves": ({"use_peft": True, "sync_ref_model": True, "beta": 0.1}, [],
                                         ["sync_ref_model", "without its adapter"]),
    "DoRA with ZeRO-3": ({"use_peft": True, "use_dora": True}, [], ["use_dora with ZeRO-3", "train with ZeRO-2"]),
    "LoRA on 8 bits": ({"use_peft": True}, ["--load_in_8bit"], ["load_in_8bit", "set load_in_4bit"]),
    "LoRA on four bits with ZeRO-3": ({"use_peft": True}, ["--load_in_4bit"], ["ZeRO-3", "set zero_stage to 2"]),
    "four bits without LoRA": ({"model_init_kwargs": {"quantization_config": {"load_in_4bit": True}}}, [],
                               ["quantization_config without peft_config", "--use_peft"]),
    "a rank without LoRA": ({"lora_r": 8}, [], ["lora_r without use_peft", "--use_peft"]),
    "a quantised model": ({}, ["--load_in_4bit"], ["load_in_4bit without use_peft"]),
    "FSDP": ({"fsdp": "full_shard"}, [], ["fsdp", "not supported"]),
    "another model in the engines": ({"vllm_engine_kwargs": {"hf_overrides": {"rope_theta": 1e6}}}, [],
                                     ["vllm_engine_kwargs holds 'hf_overrides'", "change config.json"]),
    "a configuration of the trainer's alone": ({"model_init_kwargs": {"rms_norm_eps": 0.5}}, [],
                                               ["model_init_kwargs holds 'rms_norm_eps'", "config.json"]),
    "two temperatures": ({"generation_kwargs": {"temperature": 0.5}}, [], ["temperature 0.5, but temperature is 1"]),
    "groups that do not divide": ({"per_device_train_batch_size": 3, "gradient_accumulation_steps": 1}, [],
                                  ["must be divisible", "set per_device_train_batch_size to 8"]),
    "no generations": ({"num_generations": 0}, [], ["num_generations is 0", "2 or more"]),
}  # fmt: skip


@pytest.mark.parametrize("case", MISTAKES)
def test_plan_of_user_mistake_prints_one_line_error(case: str, cluster: Cluster) -> None:
    settings, flags, parts = MISTAKES[case]
    file = cluster.training()
    kept = {name: value for name, value in {**_read(file), **settings}.items() if value is not None}
    file.write_text(json.dumps(kept))
    plan = cluster.read("--config_file", ROOT / "configs" / "1node.yaml", "--config", file, "--", *flags)
    (error,) = plan["errors"]
    for part in parts:
        assert part in error
    assert "\n" not in error
    assert "Traceback" not in error


def test_plan_with_two_grammars_warns(cluster: Cluster) -> None:
    file = cluster.training(
        vllm_structured_outputs_regex="a+", generation_kwargs={"structured_outputs": {"regex": "b"}}
    )
    plan = cluster.read("--config_file", ROOT / "configs" / "1node.yaml", "--config", file)
    assert plan["errors"] == []
    assert [line for line in plan["warnings"] if "the regex counts" in line]


@pytest.mark.parametrize("option", ["--config", "--config_file"])
def test_plan_with_tab_in_yaml_names_line(option: str, cluster: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "broken.yaml"
    file.write_text("num_processes: 7\nnum_machines:\n\t1\n")
    words = ["--num_processes", "7"] if option == "--config" else []
    (error,) = cluster.read(*words, option, file)["errors"]
    assert error.startswith(f"{option} {file} cannot be read: line 3, column 1: ")
    assert "with spaces" in error


def test_plan_with_several_mistakes_reports_all(cluster: Cluster) -> None:
    file = cluster.training(reward_funcs=["nowhere.score"], dataset_name="./nowhere.jsonl")
    plan = cluster.read("--config_file", ROOT / "configs" / "1node.yaml", "--config", file, "--", "--load_in_4bit")
    assert len(plan["errors"]) == 3


def test_plan_with_unparsable_reward_module_names_line(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "unparsed_rewards.py").write_text("def score(:\n")
    monkeypatch.chdir(tmp_path)
    file = cluster.training(reward_funcs=["unparsed_rewards.score"])
    (error,) = cluster.read("--config_file", ROOT / "configs" / "1node.yaml", "--config", file)["errors"]
    assert "unparsed_rewards.py:1: invalid syntax" in error


def test_plan_with_unwritable_output_dir_warns(cluster: Cluster) -> None:
    file = cluster.training(output_dir="/proc/out")
    warnings = cluster.read("--config_file", ROOT / "configs" / "1node.yaml", "--config", file)["warnings"]
    assert any("on this machine output_dir /proc/out cannot be written" in warning for warning in warnings)


def _read(file: Path) -> dict[str, Any]:
    import yaml

    return yaml.safe_load(file.read_text())
