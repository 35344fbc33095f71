"""Every recipe of configs/train: planned where it is meant for, its data and rewards, and two steps and a resume."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from grpo import GRPOTrainer
from grpo.cli import main
from grpo.engine.messages import Sample
from grpo.ops.plan.job import Launcher, PlannedConfig
from grpo.ops.train.adapters import ADAPTERS, last_boxed
from grpo.ops.train.arguments import Arguments, parse_arguments
from grpo.ops.train.checks import check_arguments, rewards_of
from grpo.ops.train.data import load_data
from grpo.ops.train.training import run
from tests.support.launching import ROOT
from tests.support.made_up_data import (
    CODE,
    DAPO,
    GSM8K,
    MATH,
    OPENR1,
    RECIPES,
    SANITY,
    save_small_model,
    write_rows,
    write_shape,
)
from tests.support.scripted_trainer import use_scripted_engines

TRAIN = ROOT / "configs" / "train"
PAGE = ROOT / "docs" / "recipes.md"
ON_CPU = ["--use_cpu", "--bf16", "False"]


@pytest.fixture(scope="module")
def small_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By the type of the recipes' models."""
    folder = tmp_path_factory.mktemp("small")
    return {
        "qwen2": save_small_model(folder / "qwen2"),
        "qwen3_5": save_small_model(folder / "qwen3_5", family="qwen3_5"),
    }


# -- plan --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a recipe is planned."""

    launcher: str
    nodes: int
    gpus: int = 8
    """Of each node."""
    ranks: int
    """On each node."""


def places_of(recipe: str) -> list[Place]:
    """For LoRA 2 and 4 GPUs; for others 1, 2 and 4 nodes."""
    if settings_of(recipe).get("use_peft"):
        return [Place(launcher="2gpus.yaml", nodes=1, gpus=ranks + 1, ranks=ranks) for ranks in (1, 3)]
    ranks = 8 - settings_of(recipe).get("vllm_reserved_gpus", 1)
    return [Place(launcher=launcher_of(recipe, nodes), nodes=nodes, ranks=ranks) for nodes in (1, 2, 4)]


def settings_of(recipe: str) -> dict[str, Any]:
    return yaml.safe_load((TRAIN / f"{recipe}.yaml").read_text())


def launcher_of(recipe: str, nodes: int) -> str:
    cuts_engines = settings_of(recipe).get("vllm_tensor_parallel_size") == 2
    if recipe == "long_context_7b" or (cuts_engines and nodes == 1):
        return "4node_offload.yaml"
    return "4node_tp2.yaml" if cuts_engines else "4node.yaml"


def plan(recipe: str, at: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    model = write_shape(tmp_path / "shape", RECIPES[recipe][0] if recipe in RECIPES else "7B")
    words = [*options, "--config_file", ROOT / "configs" / at.launcher, "--num_machines", at.nodes]
    words += ["--num_processes", at.nodes * at.ranks, "--gpus-per-node", at.gpus]
    words += ["--config", TRAIN / f"{recipe}.yaml", "--json"]
    words += ["--", "--model_name_or_path", model, "--output_dir", tmp_path / "out"]
    code = main(["plan", *map(str, words)])
    found = json.loads(capsys.readouterr().out)
    assert found["works"] == (code == 0)
    return found


@pytest.mark.parametrize("recipe", RECIPES)
def test_plan_of_recipe_at_each_scale_keeps_step_and_matches_docs(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings, places = settings_of(recipe), places_of(recipe)
    plans = [plan(recipe, at, tmp_path, capsys) for at in places]
    for at, found in zip(places, plans, strict=True):
        assert not found["errors"], at
        assert not found["warnings"], at
        batch = found["batch"]
        assert batch["completions_per_step"] == settings["completions_per_step"], at
        assert batch["is_pinned"]
        assert batch["generation_completions"] == batch["completions_per_step"], "on policy"
        accumulated = batch["accumulated_micro_batches"]
        ranks = at.nodes * at.ranks
        assert accumulated * ranks * batch["micro_batch_completions"] == batch["completions_per_step"]
        assert found["advice"]["gpus_per_node"] == at.gpus
        assert (found["lora"] or {"way": None})["way"] == ("adapter" if settings.get("use_peft") else None)
    row = next(line for line in PAGE.read_text().splitlines() if line.startswith(f"| `{recipe}` "))
    shown = plans[2 if "| 4 nodes" in row else 0]["estimates"]
    peak, sequences = shown["training"]["peak_bytes"] / 2**30, shown["engine"]["sequences_at_once"]
    assert f"| {peak:.1f} GiB; {sequences} |" in row, "the page's figures"
    offloads = [found["estimates"]["sharding"]["offload_optimizer"] for found in plans]
    assert offloads == [("cpu" if "offload" in at.launcher else "none") for at in places]


@pytest.mark.parametrize("recipe", RECIPES)
def test_arguments_of_recipe_with_other_ranks_keep_step_size(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With 6 and with 7 ranks on each of 4 nodes, or with 4 on 1, 2, 4 and 8. LoRA is for fewer."""
    steps = set()
    counts = (4 * 6, 4 * 7) if settings_of(recipe).get("vllm_reserved_gpus") == 2 else (4, 8, 16, 32)
    for ranks in (1, 2, 3, 6) if settings_of(recipe).get("use_peft") else counts:
        arguments = parse_arguments(["--config", str(TRAIN / f"{recipe}.yaml"), *ON_CPU], config_type=with_ranks(ranks))
        training = arguments.training
        steps.add(training.gradient_accumulation_steps * training.per_device_train_batch_size * ranks)
    assert steps == {settings_of(recipe)["completions_per_step"]}


def head_of(recipe: str) -> Place:
    """Where the command at the recipe's head starts it."""
    head = (TRAIN / f"{recipe}.yaml").read_text().partition("model_name_or_path")[0]
    launcher, words = re.findall(rf"--config_file configs/(\S+)(.*) --config configs/train/{recipe}\.yaml", head)[0]
    file = yaml.safe_load((ROOT / "configs" / launcher).read_text())
    nodes, gpus = file["num_machines"], 2 if launcher == "2gpus.yaml" else 8
    reserved = settings_of(recipe).get("vllm_reserved_gpus")
    given = re.findall(r"--ranks-per-node (\d+)", words) or [file["num_processes"] // nodes]
    ranks = int(given[0]) if reserved is None else gpus - reserved  # as `grpo launch` counts them
    return Place(launcher=launcher, nodes=nodes, gpus=gpus, ranks=ranks)


@pytest.mark.parametrize("recipe", [*RECIPES, "gsm8k_qwen2.5_7b"])
def test_recipe_head_command_is_near_best_plan(recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On H100s, as its head starts it, its step is within 25 % of the shortest by the number of inference GPUs."""
    found = plan(recipe, head_of(recipe), tmp_path, capsys, "--gpu", "h100")
    assert (found["errors"], found["warnings"]) == ([], [])
    advice = found["advice"]
    now, best = (advice[f"{when}generate_s"] + advice[f"{when}train_s"] for when in ("", "reserve_"))
    assert now <= 1.25 * best, found["verdict"]


def with_ranks(count: int) -> Any:
    return type("Config", (PlannedConfig,), {"launcher": Launcher(num_processes=count, num_machines=1)})


def test_plan_with_indivisible_completions_per_step_reports_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = plan("gsm8k_qwen2.5_0.5b", Place(launcher="4node.yaml", nodes=1, ranks=5), tmp_path, capsys)
    assert any(
        "completions_per_step is 1344, which is no whole number of micro-batches of 40" in e for e in found["errors"]
    )
    assert any("set it to 1320 or 1360" in error for error in found["errors"])


def test_plan_of_32b_on_one_node_without_offload_names_offload(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = plan("gsm8k_qwen2.5_32b", Place(launcher="4node_tp2.yaml", nodes=1, ranks=6), tmp_path, capsys)
    assert any("set offload_optimizer_device: cpu" in error for error in found["errors"])


# -- data and rewards --------------------------------------------------------------------------------------------------


def arguments_of(recipe: str, folder: Path, *words: str) -> Arguments:
    """The recipe as it stands, but for its data's place, and its model where `words` name one."""
    data = write_rows(folder / f"{recipe}.jsonl", RECIPES[recipe][1])
    argv = ["--config", str(TRAIN / f"{recipe}.yaml"), *ON_CPU, "--dataset_name", str(data), "--dataset_config", ""]
    return parse_arguments([*argv, "--output_dir", str(folder / "out"), *words])


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_data_and_rewards_score_right_above_wrong(recipe: str, tmp_path: Path) -> None:
    arguments = arguments_of(recipe, tmp_path)
    rows = load_data(arguments)["train"]
    assert len(rows) == len(RECIPES[recipe][1])
    assert set(rows.column_names) <= {"prompt", "solution", "verification_info"}
    messages = rows[0]["prompt"]
    assert messages[-1]["role"] == "user"
    assert (messages[0]["role"] == "system") == (arguments.script.system_prompt is not None)
    texts = [RECIPES[recipe][2], "<think>I do not know.</think>", ""]
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    columns = {name: [rows[0][name]] * len(texts) for name in rows.column_names}
    weights = arguments.training.reward_weights or [1.0]
    scores = []
    for function in rewards_of(arguments):
        assert callable(function)
        scores.append(function(completions=completions, **columns))
    total = [sum(w * score[i] for w, score in zip(weights, scores, strict=True)) for i in range(len(texts))]
    assert total[0] == sum(weights)
    assert total[2] == 0.0
    assert total[1] == (0.25 if len(weights) == 2 else 0.0)


@pytest.mark.parametrize(
    ("adapter", "row", "solution"),
    [
        ("gsm8k", GSM8K[0], r"\boxed{1002}"),
        ("sanity_math", SANITY[0], r"\boxed{\frac{1}{2}}"),
        ("dapo_math", DAPO[3], r"\boxed{6}"),
        ("boxed_math", MATH[0], r"\boxed{\frac{9}{2}}"),
        ("boxed_math", OPENR1[0], r"\boxed{\frac{9}{2}}"),
        ("verifiable_code", CODE[0], None),
    ],
)
def test_dataset_adapter_makes_prompt_and_solution(adapter: str, row: dict[str, Any], solution: str | None) -> None:
    assert set(ADAPTERS[adapter].columns) <= row.keys()
    made = ADAPTERS[adapter].to_prompt(row)
    assert made.get("solution") == solution
    assert made["prompt"]
    assert len(made) == 2


def test_dataset_adapters_are_all_tested() -> None:
    assert {"gsm8k", "sanity_math", "dapo_math", "boxed_math", "verifiable_code"} == set(ADAPTERS)


def test_last_boxed_returns_last_answer() -> None:
    assert last_boxed(r"\boxed{1} or \boxed{\frac{a}{b^{2}}}, I think {x}") == r"\frac{a}{b^{2}}"
    for text in ("none", r"\boxed{never closed {"):
        with pytest.raises(ValueError, match="has no answer in"):
            last_boxed(text)


def test_dataset_adapter_with_wrong_data_or_name_raises(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", GSM8K)
    argv = ["--model_name_or_path", "x/y", *ON_CPU, "--dataset_name", str(data), "--dataset_adapter"]
    with pytest.raises(
        ValueError, match=r"dapo_math, which reads prompt, solution, but the data set has question, answer"
    ):
        load_data(parse_arguments([*argv, "dapo_math"]))
    with pytest.raises(ValueError, match=r"there is no dataset_adapter 'gsm8' \(did you mean gsm8k\?\)"):
        parse_arguments([*argv, "gsm8"])
    with pytest.raises(ValueError, match="dataset_adapter and dataset_columns both say"):
        parse_arguments([*argv, "gsm8k", "--dataset_columns", '{"question": "prompt"}'])


# -- two steps and a resume --------------------------------------------------------------------------------------------


def ramble(sample: Sample, number: int) -> list[int]:
    """Answers have different lengths, and so different rewards."""
    rng = np.random.default_rng(sample.seed + number)
    return rng.integers(5, 40, int(rng.integers(1, 7))).tolist()


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> None:
    use_scripted_engines(monkeypatch, tokens_of=ramble)


TRAINED = ("sanity_math_1.5b", "gsm8k_qwen2.5_7b_lora")  # by `make test`, two steps each
SMALLER = {  # what does not fit a machine without GPUs, or takes minutes; everything else is the recipe's
    "completions_per_step": 32,
    "per_device_train_batch_size": 16,
    "per_device_eval_batch_size": 16,
    "max_completion_length": 8,
    "vllm_max_model_length": 4096,
    "attn_implementation": "sdpa",
    "vllm_max_logprob_gap": 1e9,
    "save_steps": 1,
    "eval_steps": 2,
    "dataset_test_split": "train",
    "check_rewards": "False",
    "disable_tqdm": "True",
}


def train(recipe: str, model: Path, folder: Path, **settings: Any) -> GRPOTrainer:
    chosen = {**SMALLER, "model_name_or_path": model, **settings}
    if "vllm_reserved_gpus" in settings_of(recipe):
        chosen |= {"vllm_reserved_gpus": 0, "vllm_tensor_parallel_size": 1}  # there is no GPU to reserve
    if settings_of(recipe).get("use_peft"):
        chosen |= {"vllm_lora": "merge"}  # an engine that computes nothing cannot prove that it applies an adapter
    arguments = arguments_of(
        recipe, folder, *(str(word) for pair in chosen.items() for word in (f"--{pair[0]}", pair[1]))
    )
    check_arguments(arguments)
    return run(arguments)


@pytest.mark.usefixtures("engines")
@pytest.mark.parametrize(
    "recipe", [each if each in TRAINED else pytest.param(each, marks=pytest.mark.long) for each in RECIPES]
)
def test_recipe_trains_two_steps_and_resumes(recipe: str, small_models: dict[str, Path], tmp_path: Path) -> None:
    small_model = small_models["qwen3_5" if "qwen3.5" in recipe else "qwen2"]
    trainer = train(recipe, small_model, tmp_path, max_steps=2)
    assert trainer.args.gradient_accumulation_steps == 2, "32 completions in micro-batches of 16"
    assert trainer.state.global_step == 2
    resumed = train(recipe, small_model, tmp_path, max_steps=3, resume_from_checkpoint="auto")
    assert resumed.state.global_step == 3
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "reward" in line]
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert all(np.isfinite(line["loss"]) for line in steps)
    saved = "adapter_model" if settings_of(recipe).get("use_peft") else "model"
    assert (tmp_path / "out" / f"{saved}.safetensors").exists()
