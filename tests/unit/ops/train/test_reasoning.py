"""reasoning-gym's tasks: rows that are the same everywhere, questions held out, answers scored."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from reasoning_gym.factory import DATASETS

from grpo.ops.train.arguments import parse_arguments
from grpo.ops.train.checks import check_task
from grpo.ops.train.data import load_data, load_evaluation
from grpo.ops.train.reasoning import extract_answer, load_tasks, reasoning_gym_answer, tasks_of

SMALL = {"chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}
ON_CPU = ["--model_name_or_path", "x/y", "--use_cpu", "--bf16", "false", "--reward_funcs", "reasoning_gym_answer"]


def load(**more: Any) -> Any:
    given: dict[str, Any] = {"size": 20, "test_size": 6, "seed": 1, "settings": {}, **more}
    return load_tasks("reasoning_gym:chain_sum,leg_counting", **given)


def score(row: dict[str, Any], text: Any) -> float:
    (found,) = reasoning_gym_answer([text], [row["answer"]], [row["metadata"]], [row["task"]])
    return found


def test_load_tasks_is_reproducible_by_seed() -> None:
    first, again, other = load(), load(), load(seed=2)
    assert first["train"].to_list() == again["train"].to_list()
    assert first["test"].to_list() == again["test"].to_list()
    assert first["train"]["prompt"] != other["train"]["prompt"]
    assert first["train"]["task"][:3] == ["chain_sum", "leg_counting", "chain_sum"]
    assert (len(first["train"]), len(first["test"])) == (20, 6)
    assert first["train"].column_names == ["prompt", "answer", "task", "metadata"]


def test_load_tasks_with_few_questions_keeps_splits_disjoint() -> None:
    """Of a task with so few that many would be."""
    data = load_tasks("reasoning_gym:chain_sum", size=60, test_size=40, seed=1, settings=SMALL)
    assert not {*data["train"]["prompt"]} & {*data["test"]["prompt"]}
    assert len({*data["test"]["prompt"]}) == 40
    with pytest.raises(ValueError, match=r"task chain_sum has too few questions: .* lower dataset_size"):
        load_tasks("reasoning_gym:chain_sum", size=5000, test_size=40, seed=1, settings=SMALL)


def test_load_tasks_with_settings_sets_difficulty() -> None:
    for prompt in load_tasks("reasoning_gym:chain_sum", size=9, test_size=1, seed=1, settings=SMALL)["train"]["prompt"]:
        assert len(prompt.partition(": ")[2].split()) == 4  # a, sign, b, =


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"chain_sun": {}}, r"task_settings is for chain_sun.*did you mean chain_sum"),
        ({"chain_sum": {"terms": 3}}, r"cannot make chain_sum with the settings .*'terms'"),
        ({"chain_sum": {"min_terms": 9, "max_terms": 2}}, r"cannot make chain_sum with the settings"),
    ],
)
def test_load_tasks_with_invalid_settings_raises(settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(settings=settings)


@pytest.mark.parametrize("task", ["chain_sum", "leg_counting", "gsm_symbolic", "knights_knaves", "sokoban", "rearc"])
def test_reasoning_gym_answer_scores_extracted_answer_alone(task: str) -> None:
    """Also where the library's scorer would be content with a text that holds the answer somewhere."""
    (row,) = load_tasks(f"reasoning_gym:{task}", size=1, test_size=1, seed=3, settings={})["train"].to_list()
    right = row["answer"]
    assert score(row, f"It may be <answer>x</answer>.\n<answer> {right}\n</answer>") == 1.0
    assert score(row, [{"role": "assistant", "content": rf"So \boxed{{{right}}}."}]) == 1.0
    assert score(row, right) == 1.0
    assert score(row, f"<answer>I guess {right} or 12345 perhaps</answer>") < 1.0
    assert score(row, f"{right}, <answer>nothing</answer>") < 1.0
    assert score(row, "") < 1.0


def test_reasoning_gym_answer_after_scorer_error_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(answer: Any, entry: Any) -> float:
        raise KeyError(answer)

    monkeypatch.setattr("grpo.ops.train.reasoning._scorer", lambda task: raises)
    assert score({"answer": "1", "metadata": "{}", "task": "chain_sum"}, "1") == 0.0


def test_extract_answer_takes_last_marked_answer() -> None:
    assert extract_answer("<answer>1</answer> or <answer>\n2 </answer> or 3") == "2"
    assert extract_answer(r"\boxed{4} <answer>5") == "4"
    assert extract_answer(" 6\n") == "6"


def test_tasks_of_invalid_names_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"has no task 'chain_sun' \(did you mean chain_sum\?\)"):
        tasks_of("reasoning_gym:chain_sun")
    with pytest.raises(ValueError, match="name tasks behind the colon"):
        tasks_of("reasoning_gym:")
    assert "composite" in DATASETS
    with pytest.raises(ValueError, match="no task 'composite'"):
        tasks_of("reasoning_gym:composite")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"\[GRPO-113\]: pip install 'grpo-local\[tasks\]'"):
        tasks_of("reasoning_gym:chain_sum")


def test_reasoning_options_on_command_line_shape_data(tmp_path: Path) -> None:
    argv = [
        *(*ON_CPU, "--output_dir", str(tmp_path), "--dataset_name", "reasoning_gym:chain_sum"),
        *("--dataset_size", "12", "--dataset_test_size", "3", "--dataset_seed", "7", "--eval_strategy", "steps"),
        *("--eval_steps", "1", "--task_settings", '{"chain_sum": {"min_terms": 2, "max_terms": 2}}'),
        *("--system_prompt", "Answer between <answer> and </answer>."),
    ]
    arguments = parse_arguments(argv)
    check_task(arguments)
    data = load_data(arguments)
    assert [message["role"] for message in data["train"][0]["prompt"]] == ["system", "user"]
    assert len(data["train"]) == 12
    assert len(load_evaluation(arguments, data)) == 3
    with pytest.raises(ValueError, match="dataset_size is 0"):
        parse_arguments([*argv, "--dataset_size", "0"])
    with pytest.raises(ValueError, match=r"task_settings is '\{', which is no JSON object"):
        parse_arguments([*argv, "--task_settings", "{"])
    with pytest.raises(ValueError, match="write an object for each task"):
        parse_arguments([*argv, "--task_settings", "[1]"])


def test_chain_sum_recipe_loads_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Path(__file__).resolve().parents[4] / "configs" / "train" / "chain_sum.yaml"
    monkeypatch.chdir(tmp_path)
    arguments = parse_arguments(["--config", str(recipe), "--use_cpu"])
    check_task(arguments)
    data = load_data(arguments)
    assert (len(data["train"]), len(load_evaluation(arguments, data))) == (96, 32)
