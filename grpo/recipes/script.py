"""What `train.py` runs: TRL's `trl grpo` script with this project's trainer, and the demo task when no model is named.

Flags and YAML files are those of TRL's own script; `GRPOScriptArguments` adds two that adapt a data set.
"""

import difflib
import itertools
import json
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import ProgressCallback, TrainerControl, TrainerState, TrainingArguments
from trl import DatasetMixtureConfig, ModelConfig, TrlParser, get_dataset, get_peft_config, get_quantization_config
from trl.scripts.grpo import GRPOScriptArguments as TrlScriptArguments

from grpo.config import GRPOConfig
from grpo.job.launch import read_launch
from grpo.recipes.demo import demo_dataset
from grpo.recipes.rewards import load_reward_funcs
from grpo.run.telling import telling_mistakes

if TYPE_CHECKING:
    from datasets import DatasetDict, IterableDatasetDict

    from grpo.trainer import GRPOTrainer

# The demo's settings; configs/train/demo.yaml holds the same for people to copy. Every one can be overridden.
DEMO_DEFAULTS: dict[str, Any] = {
    "output_dir": "runs/demo",
    "reward_funcs": ["exact_match"],
    "max_steps": 200,
    "num_generations": 8,
    "gradient_accumulation_steps": 1,
    "steps_per_generation": 1,
    "learning_rate": 4.0e-4,
    "lr_scheduler_type": "cosine_with_min_lr",
    "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
    "warmup_steps": 10,
    "beta": 0.0,
    "temperature": 1.0,
    "max_completion_length": 4,
    "vllm_max_model_length": 32,
    "bf16": False,
    "gradient_checkpointing": False,
    "logging_steps": 5,
    "save_strategy": "no",
    "report_to": "none",
}
DEMO_COMPLETIONS = 256  # per generation batch, on any number of ranks

DemoModel = Callable[..., Path]  # (folder, *, is_local_main) -> folder, as `examples.demo_model.ensure_demo_model`

_DATA_BUILDERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}


@dataclass
class GRPOScriptArguments(TrlScriptArguments):
    """TRL's script arguments, plus two that turn a data set of questions into prompts."""

    dataset_columns: dict[str, str] | str | None = field(
        default=None,
        metadata={
            "help": "Columns to rename, old name to new (a JSON object on the command line), for example "
            '\'{"question": "prompt", "answer": "solution"}\'.'
        },
    )
    system_prompt: str | None = field(
        default=None,
        metadata={
            "help": "Makes a prompt of plain text a conversation: this system message, then the text as the user's."
        },
    )

    def __post_init__(self) -> None:
        if isinstance(self.dataset_columns, str):
            self.dataset_columns = json.loads(self.dataset_columns)
        reward_funcs: Any = vars(self)["reward_funcs"]
        if isinstance(reward_funcs, str):  # a single name in a YAML file
            self.reward_funcs = [reward_funcs]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The parsed command line."""

    script: GRPOScriptArguments
    training: GRPOConfig
    model: ModelConfig
    mixture: DatasetMixtureConfig

    @property
    def is_demo(self) -> bool:
        return self.model.model_name_or_path is None


def main(argv: Sequence[str] | None = None, *, demo_model: DemoModel | None = None) -> None:
    """Trains as `argv` says (default: the command line). Called by every rank.

    Args:
        demo_model: puts the demo's model where it is told to; None: a model has to be named.
    """
    # DeepSpeed calls collectives by names that torch 2.13 deprecates: a line for each place, in the progress bar.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    argv = sys.argv[1:] if argv is None else argv
    with telling_mistakes(_flag(argv, "output_dir")) as teller:
        arguments = parse_arguments(argv)
        teller.output_dir = Path(arguments.training.output_dir)
        trainer = run_demo(arguments, demo_model) if arguments.is_demo else run(arguments)
        trainer.accelerator.end_training()  # or threads of the process group meet the interpreter's exit


def parse_arguments(argv: Sequence[str]) -> Arguments:
    """Parses flags over `--config FILE` over defaults, the demo's where no model is named.

    `--resume auto` is short for `--resume_from_checkpoint auto`.

    Raises:
        ValueError: names the flags and YAML keys that do not exist.
    """
    argv = _spell_out(argv)
    parser = TrlParser((GRPOScriptArguments, GRPOConfig, ModelConfig, DatasetMixtureConfig))
    # Defaults have to stand before anything is checked, so the question whether a model is named comes first.
    peek = TrlParser(ModelConfig, add_help=False).parse_args_and_config(argv, return_remaining_strings=True)[0]
    if peek.model_name_or_path is None:
        parser.set_defaults_with_config(**demo_defaults(world_size=read_launch(os.environ).world_size))
    *parsed, in_file, in_argv = parser.parse_args_and_config(
        argv, return_remaining_strings=True, separate_remaining_strings=True
    )
    unknown = [word for word in in_argv if word.startswith("-")] + in_file[::2]
    if unknown or in_argv:
        known = [option for action in parser._actions for option in action.option_strings]
        raise ValueError(_unknown_arguments(unknown or in_argv, known))
    script, training, model, mixture = parsed
    return Arguments(script=script, training=training, model=model, mixture=mixture)


def demo_defaults(*, world_size: int) -> dict[str, Any]:
    """`DEMO_DEFAULTS` with the batch of a rank: about `DEMO_COMPLETIONS` over all ranks, whole groups of 8 on each."""
    per_rank = max(8, DEMO_COMPLETIONS // world_size // 8 * 8)
    return DEMO_DEFAULTS | {"per_device_train_batch_size": per_rank, "per_device_eval_batch_size": per_rank}


def run(arguments: Arguments) -> "GRPOTrainer":
    """Trains the named model on the named data, saves it, and pushes it to the hub if asked to."""
    script, training = arguments.script, arguments.training
    rewards = _rewards(script)
    if not rewards:
        raise ValueError(
            "there is nothing to score completions with: name reward functions with --reward_funcs, or a reward model "
            "with --reward_model_name_or_path"
        )
    dataset = load_data(arguments)
    trainer = build_trainer(
        arguments,
        model=arguments.model.model_name_or_path,
        reward_funcs=rewards,
        train_dataset=_split(dataset, script.dataset_train_split, "dataset_train_split"),
        eval_dataset=(
            _split(dataset, script.dataset_test_split, "dataset_test_split") if training.eval_strategy != "no" else None
        ),
    )
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    trainer.save_model(training.output_dir)
    trainer.accelerator.print(f"model saved to {training.output_dir}")
    if training.push_to_hub:
        trainer.push_to_hub(dataset_name=script.dataset_name)
        trainer.accelerator.print(f"model pushed to https://huggingface.co/{trainer.hub_model_id}")
    return trainer


def run_demo(arguments: Arguments, demo_model: DemoModel | None) -> "GRPOTrainer":
    """Trains the demo model on two-digit addition and prints on rank 0 in one line what came of it."""
    script, training = arguments.script, arguments.training
    if script.dataset_name or arguments.mixture.datasets or script.dataset_columns or script.system_prompt:
        raise ValueError(
            "a data set is given, but no model: name one with --model_name_or_path. Without a model the demo task "
            "runs, which has a data set of its own"
        )
    if demo_model is None:
        raise ValueError("no model is named: name one with --model_name_or_path. Only train.py brings the demo's model")
    folder = demo_model(Path(training.output_dir) / "model", is_local_main=read_launch(os.environ).local_rank == 0)
    trainer = build_trainer(
        arguments,
        model=str(folder),
        reward_funcs=_rewards(script),
        train_dataset=demo_dataset("train"),
        eval_dataset=demo_dataset("test") if training.eval_strategy != "no" else None,
    )
    # Its own bar instead of the default one, which prints fifty metrics at every log; they are in metrics.jsonl.
    trainer.remove_callback(ProgressCallback)
    if not training.disable_tqdm:
        trainer.add_callback(RewardProgress)
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    trainer.accelerator.print(demo_summary(trainer.state.log_history))
    return trainer


class RewardProgress(ProgressCallback):
    """A progress bar that shows the reward beside the steps."""

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        if self.training_bar is not None and logs and "reward" in logs:
            self.training_bar.set_postfix_str(f"reward {logs['reward']:.2f}")


def build_trainer(arguments: Arguments, **kwargs: Any) -> "GRPOTrainer":
    """A `GRPOTrainer` from the parsed arguments; `kwargs` are its `model`, `reward_funcs`, data sets and the like."""
    from grpo.trainer import GRPOTrainer

    model, training = arguments.model, arguments.training
    training.model_init_kwargs = {
        "revision": model.model_revision,
        "trust_remote_code": training.trust_remote_code,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
        **(training.model_init_kwargs or {}),
    }
    return GRPOTrainer(
        args=training,
        quantization_config=get_quantization_config(model),
        peft_config=get_peft_config(model),
        **kwargs,
    )


def load_data(arguments: Arguments) -> "DatasetDict | IterableDatasetDict":
    """The data set by split: a mixture, a hub data set, or a local file or folder, its columns renamed as asked.

    Raises `ValueError` when none is named or a local path does not hold one.
    """
    from datasets import load_dataset
    from transformers import set_seed

    script = arguments.script
    if arguments.mixture.datasets:
        # TRL splits a mixture with numpy's global generator: without the same seed, every rank has rows of its own.
        set_seed(arguments.training.seed)
        dataset = get_dataset(arguments.mixture)
    elif not script.dataset_name:
        raise ValueError("there is no data to train on: name it with --dataset_name, or list `datasets` in a YAML file")
    else:
        path = local_data(script.dataset_name)
        if path is not None and path.is_file():
            dataset = load_dataset(
                _DATA_BUILDERS[path.suffix],
                data_files={script.dataset_train_split: str(path)},
                streaming=script.dataset_streaming,
            )
        else:
            name = script.dataset_name if path is None else str(path)
            dataset = load_dataset(name, name=script.dataset_config, streaming=script.dataset_streaming)
    return _adapt(dataset, script)


def local_data(name: str) -> Path | None:
    """The local path that a data set's name stands for; None for a hub id.

    Raises `ValueError` for a path that does not exist or holds no data that can be read.
    """
    path = Path(name).expanduser()
    kinds = ", ".join(_DATA_BUILDERS)
    if path.is_file():
        if path.suffix not in _DATA_BUILDERS:
            raise ValueError(f"dataset_name is the file {name}, but only {kinds} can be read")
        return path
    if path.is_dir():
        if not any(file.suffix in _DATA_BUILDERS for file in path.rglob("*")):
            raise ValueError(f"dataset_name is the folder {name}, which holds none of {kinds}")
        return path
    if path.suffix in _DATA_BUILDERS or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ValueError(
            f"dataset_name is {name}, but {path.absolute()} does not exist: a data set is a hub id such as "
            f"openai/gsm8k, or a local file ({kinds}) or a folder of such files"
        )
    return None


def demo_summary(log_history: Sequence[Mapping[str, Any]]) -> str:
    """One line: reward of the first 10 and the last 20 steps, steps, seconds, tokens (prompts too) per second."""
    logs = [log for log in log_history if "reward" in log]
    totals = next(log for log in reversed(log_history) if "train_runtime" in log)
    steps, seconds = totals["step"], totals["train_runtime"]
    if not logs:
        return f"demo: {steps} steps in {seconds:.0f} s, none of them logged (logging_steps)"
    first = [log["reward"] for log in logs if log["step"] <= max(10, logs[0]["step"])]
    last = [log["reward"] for log in logs if log["step"] > min(steps - 20, logs[-1]["step"] - 1)]
    tokens_per_s = logs[-1]["num_tokens"] / seconds
    return (
        f"demo: reward {sum(first) / len(first):.3f} -> {sum(last) / len(last):.3f} "
        f"(means of the first 10 and the last 20 steps), {steps} steps in {seconds:.0f} s, {tokens_per_s:.0f} tokens/s"
    )


def _flag(argv: Sequence[str], name: str) -> str | None:
    """The value of `--name` on a command line that may not parse."""
    words = [word for arg in argv for word in arg.split("=", 1)]
    return dict(itertools.pairwise(words)).get(f"--{name}")


def _spell_out(argv: Sequence[str]) -> list[str]:
    """`--config=FILE` as two words, which TRL's parser wants, and `--resume` as `--resume_from_checkpoint`."""
    words = [
        word for arg in argv for word in (arg.split("=", 1) if arg.startswith(("--config=", "--resume=")) else [arg])
    ]
    return ["--resume_from_checkpoint" if word == "--resume" else word for word in words]


def _unknown_arguments(names: Sequence[str], known: Sequence[str]) -> str:
    parts = []
    for name in names:
        close = difflib.get_close_matches(name.split("=")[0], known, n=1)
        parts.append(name + (f" (did you mean {close[0]}?)" if close else ""))
    return (
        f"unknown arguments: {', '.join(parts)}. Fields of GRPOConfig, TRL's ModelConfig, DatasetMixtureConfig and "
        "GRPOScriptArguments can be given as flags or as keys of the --config file; --help lists them"
    )


def _rewards(script: GRPOScriptArguments) -> list[Any]:
    model = script.reward_model_name_or_path
    return [*([model] if model else []), *load_reward_funcs(script.reward_funcs or [])]


def _split(dataset: "DatasetDict | IterableDatasetDict", split: str, option: str) -> Any:
    if split not in dataset:
        raise ValueError(
            f"{option} is {split!r}, but the data set has the splits {', '.join(map(repr, dataset))}: set {option} to "
            "one of them (a local folder has those that its files are named after, such as train.jsonl and test.jsonl)"
        )
    return dataset[split]


def _adapt(dataset: Any, script: GRPOScriptArguments) -> Any:
    """Renames columns and makes conversations, as `dataset_columns` and `system_prompt` say."""
    columns = script.dataset_columns or {}
    assert not isinstance(columns, str), "__post_init__ parses it"
    for split in dataset:
        names = dataset[split].column_names
        missing = [column for column in columns if names is not None and column not in names]
        if missing:
            raise ValueError(f"dataset_columns renames {', '.join(missing)}, but the data set has {', '.join(names)}")
    if columns:
        dataset = dataset.rename_columns(columns)
    if script.system_prompt is not None:
        dataset = dataset.map(_to_conversation, fn_kwargs={"system_prompt": script.system_prompt})
    return dataset


def _to_conversation(row: dict[str, Any], system_prompt: str) -> dict[str, Any]:
    if not isinstance(row["prompt"], str):
        raise ValueError("system_prompt is set, but the prompts of the data set are conversations already: remove it")
    messages = [{"role": "system", "content": system_prompt}, {"role": "user", "content": row["prompt"]}]
    return {"prompt": messages}
