"""What a user may get wrong about `train.py`: reported in a few lines, with value and fix, before anything starts."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo import GRPOTrainer
from grpo.ops.mistakes import MAX_LINES
from grpo.ops.train.script import main
from grpo.record.files import read_run_state
from tests.support.launching import BIN, ROOT, free_port
from tests.support.tiny_models import save_tiny_model

DEADLINE_S = 240  # on a busy machine; most of it is imports
ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)]
SETTINGS = {
    "model_name_or_path": "model",
    "dataset_name": "data.jsonl",
    "reward_funcs": ["exact_match"],
    "output_dir": "out",
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 8,
    "vllm_max_model_length": 64,
    "max_steps": 2,
    "save_strategy": "no",
}


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """One thing that is wrong in a task that is right otherwise, and what the message has to hold."""

    says: tuple[str, ...]
    """The value and the fix."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Of the YAML file; None leaves a setting out."""
    flags: tuple[str, ...] = ()
    text: str = ""
    """Written behind the YAML file's settings."""
    files: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)


def reward(body: str, head: str = "def score(completions, **kwargs):") -> dict[str, Any]:
    """Settings and files of a task with a reward function of the user's own."""
    return {"settings": {"reward_funcs": ["mine.score"]}, "files": {"mine.py": f"{head}\n    {body}\n"}}


def data(*rows: dict[str, Any]) -> dict[str, str]:
    return {"data.jsonl": "".join(json.dumps(row) + "\n" for row in rows)}


CHAT = {"prompt": [{"role": "user", "content": "1+1?"}], "answer": "2"}
# One row each.
# ruff: noqa: E501
MISTAKES = {
    # the command line and the file
    "a misspelt flag": Mistake(flags=("--lerning_rate", "1"), says=("--lerning_rate", "did you mean --learning_rate?")),
    "an abbreviated flag": Mistake(flags=("--learning_rat", "1"), says=("--learning_rat", "did you mean --learning_rate?")),
    "a misspelt key": Mistake(settings={"nun_generations": 4}, says=("--nun_generations", "did you mean --num_generations?")),
    "a word too many": Mistake(flags=("stray",), says=("unknown arguments: stray",)),
    "a flag without a value": Mistake(flags=("--learning_rate",), says=("--learning_rate", "expected one argument")),
    "a word for a number": Mistake(flags=("--max_steps", "ten"), says=("max_steps", "invalid int value: 'ten'")),
    "a word for a number in the file": Mistake(settings={"max_steps": "ten"}, says=("max_steps", "invalid int value: 'ten'")),
    "a list for a number": Mistake(settings={"num_generations": [4]}, says=("num_generations is [4] (list)", "to be int")),
    "a fraction for a number": Mistake(settings={"max_steps": 2.5}, says=("max_steps is 2.5", "has to be int")),
    "an empty setting": Mistake(text="learning_rate:\n", says=("learning_rate is left empty", "remove the line")),
    "no such file": Mistake(flags=("--config", "confg.yaml"), says=("confg.yaml", "did you mean config.yaml?")),
    "no file at all": Mistake(flags=("--config",), says=("--config", "write --config FILE")),
    "a tab": Mistake(text="accelerator_config:\n\tsplit_batches: true\n", says=("line 16, column 1", "with spaces")),
    "broken YAML": Mistake(text="generation_kwargs: {a: 1\n", says=("config.yaml cannot be read: line", "expected ',' or '}'")),
    "a setting that stands twice": Mistake(text="max_steps: 3\n", says=("line 15: max_steps stands in line 13", "remove one")),
    "a file that is a list": Mistake(files={"list.yaml": "- max_steps\n"}, flags=("--config", "list.yaml"), says=("list.yaml holds no settings", '["max_steps"]')),
    "an empty file": Mistake(files={"empty.yaml": ""}, flags=("--config", "empty.yaml"), says=("empty.yaml holds no settings", "nothing")),
    "a folder for a file": Mistake(flags=("--config", "model"), says=("--config model cannot be read", "Is a directory")),
    "broken JSON": Mistake(flags=("--dataset_columns", "{question: prompt}"), says=("{question: prompt}", '{"question": "prompt"}')),
    # the model
    "a misspelt folder": Mistake(settings={"model_name_or_path": "./modle"}, says=("'./modle'", "did you mean model?")),
    "a folder that is not there": Mistake(settings={"model_name_or_path": "/no/model"}, says=("'/no/model'", "does not exist")),
    "a folder without a model": Mistake(files={"hollow/notes.txt": ""}, settings={"model_name_or_path": "hollow"}, says=("hollow", "no config.json: it holds notes.txt")),
    "a folder of checkpoints": Mistake(files={"run/checkpoint-2/config.json": "{}"}, settings={"model_name_or_path": "run"}, says=("no config.json", "did you mean run/checkpoint-2?")),
    "an adapter": Mistake(files={"lora/adapter_config.json": "{}"}, settings={"model_name_or_path": "lora"}, says=("lora", "merge it into its base model")),
    "a model without weights": Mistake(files={"bare/config.json": '{"model_type": "qwen3"}'}, settings={"model_name_or_path": "bare"}, says=("bare", "no weights")),
    "a broken configuration": Mistake(files={"odd/config.json": "{", "odd/model.safetensors": ""}, settings={"model_name_or_path": "odd"}, says=("'odd'", "config.json", "not a valid JSON")),
    "an unknown kind of model": Mistake(files={"new/config.json": '{"model_type": "gpt9"}', "new/model.safetensors": ""}, settings={"model_name_or_path": "new"}, says=("'new'", "gpt9")),
    "the weights' file": Mistake(settings={"model_name_or_path": "model/model.safetensors"}, says=("model/model.safetensors", "name the folder")),
    "a hub model offline": Mistake(settings={"model_name_or_path": "nobody/modle"}, env={"HF_HUB_OFFLINE": "1"}, says=("'nobody/modle'", "[GRPO-202]", "hf download nobody/modle")),
    "a hub model out of reach": Mistake(settings={"model_name_or_path": "nobody/modle"}, env={"HF_ENDPOINT": "http://127.0.0.1:9"}, says=("'nobody/modle'", "http://127.0.0.1:9", "refused", "[GRPO-202]", "name a local folder")),
    "a misspelt folder offline": Mistake(settings={"model_name_or_path": "modle"}, env={"HF_HUB_OFFLINE": "1"}, says=("'modle'", "did you mean model?")),
    "a model without a tokenizer": Mistake(files={"mute/": ""}, settings={"model_name_or_path": "mute"}, says=("'mute'", "tokenizer.json")),
    "LoRA half asked for": Mistake(flags=("--lora_r", "8"), says=("lora_r without use_peft", "add --use_peft")),
    "four bits without LoRA": Mistake(flags=("--load_in_4bit",), says=("load_in_4bit without use_peft", "remove it")),
    "8 bits": Mistake(flags=("--load_in_8bit", "--use_peft"), says=("load_in_8bit", "set load_in_4bit")),
    "no model for the data": Mistake(settings={"model_name_or_path": None}, says=("a data set is given, but no model", "--model_name_or_path")),
    # data
    "no data": Mistake(settings={"dataset_name": None}, says=("no data", "--dataset_name")),
    "a file that is not there": Mistake(settings={"dataset_name": "./dta.jsonl"}, says=("./dta.jsonl", "did you mean data.jsonl?")),
    "data of another kind": Mistake(files={"data.txt": "1"}, settings={"dataset_name": "data.txt"}, says=("data.txt", "only .json")),
    "broken data": Mistake(files={"data.jsonl": '{"prompt": "1"}\n{"prompt"\n'}, says=("data.jsonl",)),
    "no rows": Mistake(files={"data.jsonl": ""}, says=("data.jsonl",)),
    "no prompts": Mistake(files=data({"question": "1+1?", "answer": "2"}), says=("[GRPO-203]", "'question', 'answer'", '{"question": "prompt"}')),
    "no prompts for a system prompt": Mistake(files=data({"question": "1+1?"}), flags=("--system_prompt", "Think."), says=("'question'", '{"question": "prompt"}')),
    "another split": Mistake(settings={"dataset_train_split": "trian", "dataset_name": "folder"}, files={"folder/train.jsonl": data(ROWS[0])["data.jsonl"]}, says=("'trian'", "'train'")),
    "an evaluation without data": Mistake(settings={"eval_strategy": "steps", "eval_steps": 1}, says=("dataset_test_split is 'test'", "set dataset_test_split")),
    "a column that is not there": Mistake(flags=("--dataset_columns", '{"query": "prompt"}'), says=("renames query", "prompt, answer")),
    "prompts that are numbers": Mistake(files=data(*[{"prompt": 1, "answer": "1"}] * 9), says=("1 (int)", "a prompt is text")),
    "prompts in another form": Mistake(files=data(*[{"prompt": [{"from": "human", "value": "1"}], "answer": "1"}] * 9), says=("'from'", "'role'")),
    "fewer rows than a batch": Mistake(files=data(ROWS[0]), says=("has 1 rows", "takes 2 prompts")),
    "conversations without a template": Mistake(files=data(*[CHAT] * 9), says=("conversations", "[GRPO-204]")),
    "a long prompt": Mistake(files=data(*[{"prompt": "1" * 90, "answer": "1"}] * 9), says=("90 tokens", "set vllm_max_model_length to 98")),
    # rewards
    "no rewards": Mistake(settings={"reward_funcs": None}, says=("nothing to score", "--reward_funcs")),
    "a reward by a wrong name": Mistake(settings={"reward_funcs": ["exact_mtach"]}, says=("'exact_mtach'", "did you mean exact_match?")),
    "a module that is not there": Mistake(settings={"reward_funcs": ["nowhere.score"]}, says=("'nowhere.score'", "no module 'nowhere'")),
    "a function that is not there": Mistake(settings={"reward_funcs": ["mine.scor"]}, files=reward("return []")["files"], says=("'scor' does not exist", "score")),
    "a module that does not parse": Mistake(settings={"reward_funcs": ["mine.score"]}, files={"mine.py": "def score(:\n"}, says=("mine.py:1", "invalid syntax")),
    "a module that asks for another": Mistake(settings={"reward_funcs": ["mine.score"]}, files={"mine.py": "import numpyy\n"}, says=("numpyy", "mine.py:1")),
    "a reward without **kwargs": Mistake(**reward("return [0.0]", "def score(completions):"), says=("score", "mine.py:1", "take the others as **kwargs")),
    "a column that a reward wants": Mistake(**reward("return []", "def score(completions, solution, **kwargs):"), says=("it wants solution", "the columns answer", "dataset_columns")),
    "a key that a reward wants": Mistake(**reward("return [kwargs['solution']]"), says=("KeyError [GRPO-205]: 'solution'", "mine.py:2")),
    "a reward that raises": Mistake(**reward("return [1 / 0 for _ in completions]"), says=("ZeroDivisionError", "[GRPO-205]", "mine.py:2, in", "check_rewards")),
    "too few rewards": Mistake(**reward("return [0.0]"), says=("returned 1 rewards for 4", "one for each completion")),
    "one number": Mistake(**reward("return 0.5"), says=("returned 0.5 (float)", "a list of 4 numbers")),
    "no rewards returned": Mistake(**reward("pass"), says=("returned None", "a list of 4 numbers")),
    "words for rewards": Mistake(**reward("return ['good' for _ in completions]"), says=("'good' (str)", "numbers")),
    "an asynchronous reward that raises": Mistake(**reward("raise OSError('no judge')", "async def score(completions, **kwargs):"), says=("OSError [GRPO-205]: no judge", "mine.py:2")),
    "a reward for conversations": Mistake(settings={"reward_funcs": ["accuracy_reward"]}, flags=("--dataset_columns", '{"answer": "solution"}'), says=("accuracy_reward", "TypeError", "'The answer is 42.' (as the prompts are)")),
    "more weights than rewards": Mistake(settings={"reward_weights": [0.5, 0.5]}, says=("reward_weights has 2", "1 reward functions")),
    # agents
    "an agent that is no command": Mistake(settings={"agent": "no-such-agent.sh --fast"}, says=("agent is 'no-such-agent.sh --fast'", "there is no such command")),
    "an agent without a template": Mistake(settings={"agent": "true", "reward_funcs": None}, says=("agents speak in messages", "no chat template")),
    "an agent of the demo": Mistake(settings={"agent": "true", "model_name_or_path": None, "dataset_name": None}, says=("agent is 'true', but no model", "--model_name_or_path")),
    "an agent whose batch is over first": Mistake(settings={"agent_timeout": 4000}, says=("agent_timeout is 4000 s", "raise rollout_timeout")),
    "agents none at a time": Mistake(settings={"max_agents_at_once": 0}, says=("max_agents_at_once is 0", "above 0")),
    # numbers
    "groups that do not divide": Mistake(settings={"per_device_train_batch_size": 3}, says=("generation_batch_size (3)", "per_device_train_batch_size to 4, or num_generations to 3")),
    "a group of one": Mistake(settings={"num_generations": 1}, says=("num_generations is 1", "2 or more")),
    "no generations": Mistake(settings={"num_generations": 0}, says=("num_generations is 0", "2 or more")),
    "two ways to say it": Mistake(settings={"generation_batch_size": 8, "steps_per_generation": 1}, says=("generation_batch_size", "steps_per_generation")),
    "bf16 and fp16": Mistake(settings={"bf16": True, "fp16": True}, says=("bf16", "fp16")),
    "a share above one": Mistake(settings={"vllm_gpu_memory_utilization": 90}, says=("vllm_gpu_memory_utilization is 90", "at most 1")),
    "an engine's own setting": Mistake(settings={"vllm_engine_kwargs": {"dtype": "float16"}}, says=("vllm_engine_kwargs holds 'dtype'", "bf16")),
    "a loss that is none": Mistake(settings={"loss_type": "grpoo"}, says=("loss_type is 'grpoo'", "'dr_grpo'")),
    "another mode": Mistake(settings={"vllm_mode": "locale"}, says=("'locale'", "'local'")),
    "FSDP": Mistake(settings={"fsdp": "full_shard"}, says=("fsdp", "not supported")),
    # where it goes
    "an output folder that is a file": Mistake(settings={"output_dir": "data.jsonl/out"}, says=("output_dir data.jsonl/out", "is no folder")),
    "an output folder that is not ours": Mistake(settings={"output_dir": "/proc/out"}, says=("output_dir /proc/out", "set one on a disk that you may")),
    "a checkpoint that is not there": Mistake(settings={"resume_from_checkpoint": "out/checkpoint-9"}, says=("checkpoint-9",)),
    "nothing to resume": Mistake(settings={"resume_from_checkpoint": "True"}, says=("resume",)),
}  # fmt: skip


@pytest.fixture(scope="module")
def right_task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a task that is right."""
    folder = tmp_path_factory.mktemp("task")
    save_tiny_model("qwen3-tied", folder / "model")
    (folder / "data.jsonl").write_text(data(*ROWS)["data.jsonl"])
    return folder


def write(mistake: Mistake, task: Path, folder: Path) -> list[str]:
    """The task with the mistake in `folder`; its command line."""
    shutil.copytree(task, folder, dirs_exist_ok=True)
    if "mute/" in mistake.files:
        shutil.copytree(folder / "model", folder / "mute", ignore=shutil.ignore_patterns("token*"))
    for name, text in mistake.files.items():
        if not name.endswith("/"):
            (folder / name).parent.mkdir(exist_ok=True, parents=True)
            (folder / name).write_text(text)
    settings = {name: value for name, value in {**SETTINGS, **mistake.settings}.items() if value is not None}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False) + mistake.text)
    own_file = "--config" in mistake.flags
    return [*(() if own_file else ("--config", "config.yaml")), *mistake.flags]


def expect_reported(mistake: Mistake, errors: str, folder: Path) -> None:
    reported = errors[errors.index("[grpo] ") :].rstrip().splitlines() if "[grpo] " in errors else []
    assert 1 <= len(reported) <= MAX_LINES, errors
    for part in mistake.says:
        assert part in "\n".join(reported), (part, reported)
    if "config.yaml" in os.listdir(folder) and "--config" not in mistake.flags and not mistake.text:
        out = folder / mistake.settings.get("output_dir", "out")
        if out.parent == folder:
            state = read_run_state(out)
            assert state is not None
            assert (state.state, state.kind) == ("failed", "user")


@pytest.mark.parametrize("case", MISTAKES)
def test_main_with_user_error_reports_it_before_engine_start(
    case: str, right_task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    mistake = MISTAKES[case]

    def start_engine(*_: object, **__: object) -> None:
        raise AssertionError("an engine was started")

    monkeypatch.setattr(GRPOTrainer, "start_engine", start_engine)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    if "HF_HUB_OFFLINE" in mistake.env:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    if endpoint := mistake.env.get("HF_ENDPOINT"):
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
        template = f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    argv = write(mistake, right_task, tmp_path)
    monkeypatch.chdir(tmp_path)
    capfd.readouterr()
    with pytest.raises(Exception) as caught:  # noqa: PT011  of any kind: the message is what counts
        main(argv)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    errors = capfd.readouterr().err
    assert "an engine was started" not in str(caught.value)
    expect_reported(mistake, errors, tmp_path)


def processes(command: list[str], folder: Path, mistake: Mistake) -> tuple[int, str]:
    """Exit code and output of a start as users start it."""
    started = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **mistake.env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_S,
    )
    return started.returncode, started.stdout


@pytest.mark.parametrize(
    "case",
    [
        "no such file",
        pytest.param("a misspelt flag", marks=pytest.mark.long),
        "a hub model offline",
    ],
)
def test_train_script_with_user_error_prints_message_alone(case: str, right_task: Path, tmp_path: Path) -> None:
    mistake = MISTAKES[case]
    argv = write(mistake, right_task, tmp_path)
    code, output = processes([sys.executable, str(ROOT / "train.py"), *argv], tmp_path, mistake)
    assert code == 1, output
    assert "Traceback" not in output
    assert output.count("[grpo] ") == 1, output
    expect_reported(mistake, output, tmp_path)
    assert not (tmp_path / "out" / "logs").exists(), "no engine was started"


@pytest.mark.parametrize("case", [pytest.param("an abbreviated flag", marks=pytest.mark.long), "a reward that raises"])
def test_torchrun_with_user_error_reports_it_on_one_rank(case: str, right_task: Path, tmp_path: Path) -> None:
    """Before there is a group every rank finds it; after that rank 0 alone does, and the other one raises the same."""
    mistake = MISTAKES[case]
    argv = write(mistake, right_task, tmp_path)
    launch = [str(BIN / "torchrun"), "--nproc_per_node", "2", "--master_port", str(free_port())]
    code, output = processes([*launch, str(ROOT / "train.py"), *argv], tmp_path, mistake)
    assert code == 1, output
    assert output.count("[grpo] ") == 1, output
    ranks, _, summary = output.partition("ChildFailedError")
    reported = ranks[ranks.index("[grpo] ") :].partition("torch/distributed")[0]
    assert "<N/A>" not in summary, "torchrun shows what the ranks have said"
    assert "Traceback" not in reported
    for part in mistake.says:
        assert part in reported
        assert part in summary
    state = read_run_state(tmp_path / "out")
    assert state is not None
    assert (state.state, state.kind) == ("failed", "user")
    assert not [*(tmp_path / "out" / "logs").glob("engine*")], "no engine was started"


# What is right, with all that the checks look at: it ends only where an engine would start.
RIGHT = {
    "the task": Mistake(says=()),
    "the demo": Mistake(settings=dict.fromkeys(SETTINGS) | {"output_dir": "out", "use_cpu": True}, says=()),
    "TRL's rewards": Mistake(settings={"model_name_or_path": "chat", "reward_funcs": ["accuracy_reward", "think_format_reward", "get_soft_overlong_punishment"]}, flags=("--dataset_columns", '{"answer": "solution"}', "--system_prompt", "Think."), says=()),
    "no reward for some": Mistake(**reward("return [None, 1, True, 0.5]"), says=()),
    "a tensor of rewards": Mistake(**reward("import torch; return torch.zeros(len(completions))"), says=()),
    "an array of rewards": Mistake(**reward("import numpy; return numpy.zeros(len(completions))"), says=()),
    "an asynchronous reward": Mistake(**reward("return [0.0] * len(completions)", "async def score(completions, **kwargs):"), says=()),
    "a reward that logs": Mistake(**reward("log_extra('a', ['b'] * 4); log_metric('c', 1.0); return [trainer_state.global_step] * 4", "def score(prompts, completion_ids, answer, trainer_state, log_extra, log_metric, **kwargs):"), says=()),
    "a reward with an alarm": Mistake(**reward("import signal; signal.alarm(100); signal.alarm(0); return [0.0] * 4"), says=()),
    "a reward that is not tried": Mistake(**reward("return [trainer.state.global_step]"), flags=("--check_rewards", "False"), says=()),
    "a reward for a form": Mistake(**reward("return [1 / 0]"), flags=("--vllm_structured_outputs_regex", "[0-9]+"), says=()),
    "a stream": Mistake(flags=("--dataset_streaming", "True"), says=()),
    "conversations": Mistake(settings={"model_name_or_path": "chat"}, files=data(*[CHAT] * 9), says=()),
    "an evaluation": Mistake(settings={"eval_strategy": "steps", "eval_steps": 1, "dataset_test_split": "train", "per_device_eval_batch_size": 4}, says=()),
}  # fmt: skip


@pytest.mark.parametrize("case", RIGHT)
def test_main_with_valid_task_reaches_engine_start(
    case: str, right_task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class EngineStartsError(Exception):
        pass

    def start_engine(*_: object, **__: object) -> None:
        raise EngineStartsError

    monkeypatch.setattr(GRPOTrainer, "start_engine", start_engine)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    argv = write(RIGHT[case], right_task, tmp_path)
    if RIGHT[case].settings.get("model_name_or_path") == "chat":
        save_tiny_model("qwen3-tied", tmp_path / "chat", chat=True)
    monkeypatch.chdir(tmp_path)

    with pytest.raises(EngineStartsError):
        main(argv)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
