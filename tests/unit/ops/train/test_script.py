import json
import os
import re
import runpy
from pathlib import Path

import pytest
import torch
from datasets import Dataset

import grpo.ops.train.script
from grpo.ops.train import demo
from grpo.ops.train.arguments import DEMO_DEFAULTS, demo_defaults, parse_arguments
from grpo.ops.train.checks import check_task, rewards_of
from grpo.ops.train.data import load_data, local_data
from grpo.ops.train.rewards import exact_match
from grpo.ops.train.training import demo_summary, run, run_demo
from grpo.place.launch import read_launch
from grpo.record.files import read_run_state
from tests.support.launching import ROOT

ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(6)]
DEMO_FOREIGN = ("per_device_train_batch_size", "learning_rate")  # the demo has others
MODEL = ["--model_name_or_path", "some/model", "--use_cpu", "--bf16", "False"]


class FakeTrainer:
    """Keeps what it is given, and says that it trained."""

    first_step = 0

    def __init__(self, **kwargs):
        self.__dict__.update(kwargs)
        self.calls = []
        self.accelerator = self.state = self
        self.log_history = [
            {"step": 5, "reward": 0.5, "num_tokens": 10.0},
            {"step": 5, "train_runtime": 2.0},
        ]

    def train(self, resume_from_checkpoint):
        self.calls.append(("train", resume_from_checkpoint))

    def save_model(self, folder):
        self.calls.append(("save_model", folder))

    def push_to_hub(self, dataset_name):
        self.calls.append(("push_to_hub", dataset_name))

    def print(self, line):
        print(line)


@pytest.fixture
def fake_trainer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("grpo.trainer.GRPOTrainer", FakeTrainer)


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_yaml(path: Path, text: str) -> list[str]:
    path.write_text(text)
    return ["--config", str(path)]


# Which task, which settings


def test_parse_arguments_without_model_selects_demo():
    arguments = parse_arguments([])
    assert arguments.is_demo
    for name, value in DEMO_DEFAULTS.items():
        if name == "reward_funcs":
            assert arguments.script.reward_funcs == value
        elif name == "report_to":
            assert arguments.training.report_to == []
        else:
            assert getattr(arguments.training, name) == value, name
    assert arguments.training.use_cpu is not torch.cuda.is_available(), "accelerate's use_cpu does not reach the ranks"
    assert arguments.training.generation_batch_size == 256
    assert (arguments.training.use_vllm, arguments.training.vllm_mode) == (True, "local")


def test_parse_arguments_prefers_flags_to_yaml_to_demo(tmp_path: Path):
    config = write_yaml(tmp_path / "c.yaml", "max_steps: 7\nlearning_rate: 1e-5\nreward_funcs: think_format_reward\n")
    arguments = parse_arguments([*config, "--learning_rate", "2e-5", "--output_dir", "elsewhere"])
    assert arguments.is_demo
    assert arguments.training.max_steps == 7
    assert arguments.training.learning_rate == 2e-5
    assert arguments.training.output_dir == "elsewhere"
    assert arguments.script.reward_funcs == ["think_format_reward"]
    assert arguments.training.num_generations == DEMO_DEFAULTS["num_generations"]


@pytest.mark.parametrize("where", ["flag", "flag=", "yaml", "yaml="])
def test_parse_arguments_with_model_is_no_demo(tmp_path: Path, where: str):
    config = write_yaml(tmp_path / "c.yaml", "use_cpu: true\nbf16: false\nmodel_name_or_path: some/model\n")
    argv = {
        "flag": MODEL,
        "flag=": ["--model_name_or_path=some/model", *MODEL[2:]],
        "yaml": config,
        "yaml=": [f"--config={config[1]}"],
    }[where]
    arguments = parse_arguments(argv)
    assert not arguments.is_demo
    assert arguments.model.model_name_or_path == "some/model"
    assert arguments.training.learning_rate == 1e-6, "TRL's default, not the demo's"
    assert arguments.script.reward_funcs is None


def test_demo_defaults_scale_batch_with_world_size(monkeypatch: pytest.MonkeyPatch):
    for name, value in {"RANK": 3, "WORLD_SIZE": 28, "LOCAL_RANK": 3, "LOCAL_WORLD_SIZE": 7}.items():
        monkeypatch.setenv(name, str(value))
    assert demo_defaults(world_size=read_launch(os.environ).world_size) == DEMO_DEFAULTS | {
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 8,
    }


def test_parse_arguments_with_unknown_options_names_them(tmp_path: Path):
    with pytest.raises(ValueError, match=r"unknown arguments: --learning_rte \(did you mean --learning_rate\?\)\. "):
        parse_arguments([*MODEL, "--learning_rte", "1e-5"])
    config = write_yaml(tmp_path / "c.yaml", "nun_generations: 4\n")
    with pytest.raises(ValueError, match=r"--nun_generations \(did you mean --num_generations\?\)"):
        parse_arguments([*MODEL, *config])
    with pytest.raises(ValueError, match="unknown arguments: stray"):
        parse_arguments([*MODEL, "stray"])


def test_parse_arguments_with_env_in_yaml_sets_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OF_A_RECIPE", "old")
    parse_arguments(write_yaml(tmp_path / "c.yaml", "env:\n  OF_A_RECIPE: new\n"))
    assert os.environ["OF_A_RECIPE"] == "new"


# Data


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_load_data_of_local_file_reads_rows(tmp_path: Path, suffix: str):
    path = tmp_path / f"rows{suffix}"
    {
        ".jsonl": lambda: write_jsonl(path, ROWS),
        ".json": lambda: path.write_text(json.dumps(ROWS)),
        ".csv": lambda: Dataset.from_list(ROWS).to_csv(path),
        ".parquet": lambda: Dataset.from_list(ROWS).to_parquet(path),
    }[suffix]()
    dataset = load_data(parse_arguments([*MODEL, "--dataset_name", str(path)]))
    assert list(dataset) == ["train"]
    assert dataset["train"]["prompt"] == [row["prompt"] for row in ROWS]


def test_load_data_of_local_folder_reads_splits(tmp_path: Path):
    write_jsonl(tmp_path / "data" / "train.jsonl", ROWS)
    write_jsonl(tmp_path / "data" / "test.jsonl", ROWS[:2])
    dataset = load_data(parse_arguments([*MODEL, "--dataset_name", str(tmp_path / "data")]))
    assert {split: len(dataset[split]) for split in dataset} == {"train": 6, "test": 2}


def test_load_data_renames_columns_and_adds_system_prompt(tmp_path: Path):
    path = write_jsonl(tmp_path / "q.jsonl", [{"question": "1+1?", "answer": "#### 2"}])
    rename = '{"question": "prompt", "answer": "solution"}'
    argv = [*MODEL, "--dataset_name", str(path), "--dataset_columns", rename, "--system_prompt", "Think."]
    dataset = load_data(parse_arguments(argv))
    assert dataset["train"][0] == {
        "prompt": [{"role": "system", "content": "Think."}, {"role": "user", "content": "1+1?"}],
        "solution": "#### 2",
    }
    argv[argv.index(rename)] = '{"query": "prompt"}'
    with pytest.raises(ValueError, match="renames query, but the data set has question, answer"):
        load_data(parse_arguments(argv))


def test_load_data_of_mixture_splits_reproducibly(tmp_path: Path):
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS * 10)
    text = f"datasets:\n  - path: json\n    data_files: {path}\n    split: train\ntest_split_size: 0.5\n"
    arguments = parse_arguments([*MODEL, *write_yaml(tmp_path / "c.yaml", text)])
    first, second = load_data(arguments), load_data(arguments)
    assert {split: len(first[split]) for split in first} == {"train": 30, "test": 30}
    assert first["train"]["prompt"] == second["train"]["prompt"]


@pytest.mark.parametrize("name", ["absent.jsonl", "./absent", "/absent/folder", "a/b/c", "data/absent.parquet"])
def test_local_data_of_missing_path_raises(name: str):
    with pytest.raises(ValueError, match=r"does not exist: a data set is a Hub id such as"):
        local_data(name)


def test_local_data_of_hub_id_returns_none():
    assert local_data("openai/gsm8k") is None
    assert local_data("imdb") is None


def test_local_data_of_path_without_data_raises(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(ValueError, match=r"the file .*notes.txt, but only .json, .jsonl, .csv, .parquet"):
        local_data(str(tmp_path / "notes.txt"))
    with pytest.raises(ValueError, match=r"the folder .*, which holds none of .json"):
        local_data(str(tmp_path))


def test_check_task_without_data_raises():
    with pytest.raises(ValueError, match="name it with --dataset_name"):
        check_task(parse_arguments(MODEL))


# What reaches the trainer


@pytest.mark.usefixtures("fake_trainer")
def test_run_with_model_trains_and_saves_without_push_to_hub(tmp_path: Path):
    write_jsonl(tmp_path / "data" / "train.jsonl", ROWS)
    write_jsonl(tmp_path / "data" / "test.jsonl", ROWS[:2])
    argv = [*MODEL, "--dataset_name", str(tmp_path / "data"), "--reward_funcs", "exact_match", "--output_dir", "o"]
    argv += ["--dtype", "bfloat16", "--reward_model_name_or_path", "some/judge", "--resume_from_checkpoint", "o/c-1"]
    trainer = run(parse_arguments(argv))
    assert trainer.model == "some/model"
    assert trainer.reward_funcs == ["some/judge", exact_match]
    assert trainer.args.model_init_kwargs["dtype"] == "bfloat16"
    assert (len(trainer.train_dataset), trainer.eval_dataset, trainer.peft_config) == (6, None, None)
    assert trainer.calls == [("train", "o/c-1"), ("save_model", "o")]
    evaluating = run(parse_arguments([*argv, "--eval_strategy", "steps", "--eval_steps", "5"]))
    assert len(evaluating.eval_dataset) == 2


@pytest.mark.usefixtures("fake_trainer")
def test_run_with_missing_test_split_raises(tmp_path: Path):
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    argv = [*MODEL, "--dataset_name", str(path), "--reward_funcs", "exact_match"]
    with pytest.raises(ValueError, match=r"dataset_test_split is 'test', but the data set has the splits 'train'"):
        run(parse_arguments([*argv, "--eval_strategy", "steps", "--eval_steps", "5"]))


def test_rewards_of_task_without_rewards_raises():
    with pytest.raises(ValueError, match="name reward functions with --reward_funcs"):
        rewards_of(parse_arguments([*MODEL, "--dataset_name", "x"]))


@pytest.mark.usefixtures("fake_trainer")
def test_run_demo_prints_summary_and_saves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture):
    arguments = parse_arguments(["--output_dir", str(tmp_path), "--eval_strategy", "steps"])
    trainer = run_demo(arguments)
    assert trainer.model == str(demo.MODEL)
    assert (len(trainer.train_dataset), len(trainer.eval_dataset)) == (7588, 512)
    assert ("train", None) in trainer.calls
    assert "save_model" not in dict(trainer.calls), "the demo saves nothing"
    what, following, came_of_it = capsys.readouterr().out.splitlines()
    assert "no model is named: the demo" in what
    assert f"`grpo report {tmp_path}`" in following
    assert "grpo init" in following
    assert came_of_it == "demo: reward 0.500 -> 0.500 (means of the first 1 and the last 4 steps), 5 steps in 2 s"


def test_check_task_of_data_without_model_raises():
    with pytest.raises(ValueError, match="name one with --model_name_or_path"):
        check_task(parse_arguments(["--dataset_name", "openai/gsm8k"]))


def test_demo_summary_averages_first_10_and_last_20_steps():
    history = [{"step": step, "reward": step / 100} for step in range(5, 101, 5)]
    history.insert(3, {"step": 15, "eval_reward": 9.0})
    history.append({"step": 100, "train_runtime": 50.0})
    line = demo_summary(history)
    assert line.startswith("demo: reward 0.075 -> 0.925 ")  # (5 + 10) / 2, and (85 + 90 + 95 + 100) / 4
    assert line.endswith("100 steps in 50 s")


def test_demo_summary_of_later_attempt_counts_its_steps():
    history = [{"step": step, "reward": 0.5} for step in range(1, 31)]
    line = demo_summary([*history, {"step": 30, "train_runtime": 10.0}], first_step=20)
    assert line.endswith("10 steps to step 30 in 10 s")


def test_demo_summary_of_few_logs_reports_them_or_none():
    end = {"step": 3, "train_runtime": 1.0}
    assert "reward 0.400 -> 0.400" in demo_summary([{"step": 3, "reward": 0.4}, end])
    assert "none of them logged" in demo_summary([end])


def test_help_of_train_script_lists_own_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("grpo.engine.early.start_host", lambda: None)
    monkeypatch.setattr("sys.argv", ["train.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for option in ("--vllm_reserved_gpus", "--vllm_sync_backend", "--vllm_max_logprob_gap", "--reward_funcs"):
        assert option in shown
    assert "--vllm_sync_backend {auto,nccl,shm}" in shown
    assert "--vllm_lora {auto,adapter,merge}" in shown
    found = [re.findall(rf"--{name} .*?\(default: (\S+)\)", shown, re.DOTALL)[0] for name in DEMO_FOREIGN]
    assert found == ["8", "1e-06"], "what holds for a model, not for the demo"


def test_parse_arguments_accepts_model_as_short_name() -> None:
    for words in (["--model", "some/model"], ["--model=some/model"]):
        assert parse_arguments([*words, *MODEL[2:]]).model.model_name_or_path == "some/model"


def test_parse_arguments_accepts_resume_as_short_name() -> None:
    assert parse_arguments([*MODEL, "--resume", "auto"]).training.resume_from_checkpoint == "auto"


@pytest.mark.parametrize(
    "mistake",
    [
        ["--no_such_flag", "1"],
        ["--steps_per_generation", "0.5"],
        [*MODEL, "--reward_funcs", "nowhere.reward"],
        [*MODEL, "--reward_funcs", "exact_match", "--dataset_name", "./nowhere.jsonl"],
    ],
)
def test_main_with_user_error_writes_run_state(
    mistake: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRPO_JOB", "17")
    monkeypatch.setenv("GRPO_ATTEMPT", "0")
    with pytest.raises((ValueError, ImportError, SystemExit)):
        grpo.ops.train.script.main([*mistake, "--output_dir", str(tmp_path / "out")])
    state = read_run_state(tmp_path / "out")
    assert state is not None
    assert (state.state, state.kind, state.job) == ("failed", "user", "17")


@pytest.mark.usefixtures("fake_trainer")
def test_run_with_push_to_hub_uploads_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(FakeTrainer, "hub_model_id", "me/model", raising=False)
    data = write_jsonl(tmp_path / "q.jsonl", ROWS)
    argv = [*MODEL, "--dataset_name", str(data), "--reward_funcs", "exact_match", "--output_dir", "o", "--push_to_hub"]
    assert run(parse_arguments(argv)).calls[-1] == ("push_to_hub", str(data))


def test_load_data_of_conversations_with_system_prompt_raises(tmp_path: Path):
    data = write_jsonl(tmp_path / "q.jsonl", [{"prompt": [{"role": "user", "content": "1+1?"}]}])
    with pytest.raises(ValueError, match="the prompts of the data set are conversations already"):
        load_data(parse_arguments([*MODEL, "--dataset_name", str(data), "--system_prompt", "Think."]))
