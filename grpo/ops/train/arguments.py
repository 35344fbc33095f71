"""Arguments of `train.py`: TRL's own, four more, and the demo's if no model is named."""

import argparse
import copy
import importlib.util
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from types import SimpleNamespace
from typing import Any

import trl
from trl import DatasetMixtureConfig, ModelConfig, get_quantization_config
from trl.scripts.grpo import GRPOScriptArguments as TrlScriptArguments

from grpo.config import GRPOConfig, own_fields
from grpo.config.documented import documented
from grpo.ops.train.adapters import ADAPTERS
from grpo.ops.train.parser import StrictParser, TaskParser
from grpo.ops.train.rewards import REWARD_NAMES
from grpo.place.files import settings_of
from grpo.place.launch import read_launch
from grpo.place.spelling import did_you_mean

# The demo's settings; configs/train/demo.yaml has the same for people to copy. Every one can be overridden.
DEMO_DEFAULTS: dict[str, Any] = {
    "output_dir": "runs/demo",
    "reward_funcs": ["exact_match"],
    "max_steps": 150,
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
    "vllm_engine_kwargs": {"enforce_eager": True},
    "bf16": False,
    "gradient_checkpointing": False,
    "logging_steps": 5,
    "save_strategy": "no",
    "report_to": "none",
}
_HELP = {"-h", "--help", "--help-all"}
_SHORT = {"--resume": "--resume_from_checkpoint", "--model": "--model_name_or_path"}
_TASK_SETTINGS = '{"chain_sum": {"max_terms": 3}}'
DEMO_COMPLETIONS = 256  # per generation batch, on any number of ranks


@documented
@dataclass
class GRPOScriptArguments(TrlScriptArguments):
    """TRL's script arguments, and more for data sets, prompts, evaluation, agents and reports."""

    reward_funcs: list[str] | None = field(
        default=None,
        metadata={"help": f"Reward functions: {', '.join(REWARD_NAMES)}, or dotted paths such as my_rewards.score."},
    )
    dataset_adapter: str | None = field(
        default=None,
        metadata={
            "help": "How rows become prompts and what rewards read, for data sets that are known by name: "
            f"{', '.join(ADAPTERS)}. Other columns are dropped."
        },
    )
    dataset_columns: dict[str, str] | str | None = None
    """Columns to rename, old name to new (a JSON object on the command line), for example '{"question": "prompt",
    "answer": "solution"}'."""
    system_prompt: str | None = None
    """Makes a prompt of plain text a conversation: this system message, then the text as the user's."""
    eval_datasets: dict[str, Any] | str | None = None
    """Evaluation sets by name (a JSON object on the command line): a Hub id, or a local file or folder, each with the
    split dataset_test_split, or an object of name, config and split, for example '{"math": "math.jsonl", "gsm8k":
    {"name": "openai/gsm8k", "config": "main", "split": "test"}}'. Rows become prompts as those of training do. None:
    dataset_test_split of the data set."""
    dataset_size: int = 10_000
    """Rows of a data set that is made where it is read, as reasoning_gym:TASK is."""
    dataset_test_size: int = 200
    """Likewise, of its test split."""
    dataset_seed: int = 42
    """Likewise, of its rows; the seed of the test split follows from it."""
    task_settings: dict[str, Any] | str | None = None
    """Difficulty of reasoning-gym's tasks, by their names (a JSON object on the command line), for example
    '{"chain_sum": {"max_terms": 3, "max_digits": 2}}'."""
    agent: str | None = None
    """A command that is run for each completion, such as 'python agent.py': an agent that asks the node's engines in
    OpenAI's protocol, and writes columns for reward functions, as JSON, into its last line. Without reward_funcs its
    column 'reward' is the reward."""
    report_every_s: float = 0.0
    """Seconds between two pages of `grpo report`, which rank 0 writes to report.html of the output folder in a process
    of its own; 0: only on request."""

    def __post_init__(self) -> None:
        for name, example in (
            ("dataset_columns", '{"question": "prompt"}'),
            ("eval_datasets", '{"math": "math.jsonl"}'),
            ("task_settings", _TASK_SETTINGS),
        ):
            if isinstance(value := getattr(self, name), str):
                try:
                    setattr(self, name, json.loads(value))
                except ValueError as error:
                    raise ValueError(
                        f"{name} is {value!r}, which is no JSON object ({error}): write '{example}'"
                    ) from None
        _check_eval_datasets(self.eval_datasets)
        _check_task_settings(self.task_settings)
        for name in ("dataset_size", "dataset_test_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        if self.dataset_adapter is not None and self.dataset_adapter not in ADAPTERS:
            raise ValueError(
                f"there is no dataset_adapter {self.dataset_adapter!r}{did_you_mean(self.dataset_adapter, ADAPTERS)}: "
                f"write one of {', '.join(ADAPTERS)}, or rename columns with dataset_columns"
            )
        if not self.report_every_s >= 0:
            raise ValueError(f"report_every_s is {self.report_every_s}; it must be 0 or more")
        if self.report_every_s and not importlib.util.find_spec("altair"):
            raise ValueError("report_every_s needs altair, which is not installed: pip install 'grpo-local[report]'")
        if self.dataset_adapter is not None and self.dataset_columns is not None:
            raise ValueError("dataset_adapter and dataset_columns both say what rows become: remove one of the two")
        reward_funcs: Any = vars(self)["reward_funcs"]
        if isinstance(reward_funcs, str):  # a single name in a YAML file
            self.reward_funcs = [reward_funcs]


def _check_task_settings(settings: Any) -> None:
    by_task = settings.values() if isinstance(settings, dict) else [settings]
    if settings is not None and not all(isinstance(each, dict) for each in by_task):
        raise ValueError(f"task_settings is {settings!r}: write an object for each task, such as '{_TASK_SETTINGS}'")


def _check_eval_datasets(sets: Any) -> None:
    keys = ("name", "config", "split")
    for of_set, spec in (
        sets if isinstance(sets, dict) else {"eval_datasets": sets} if sets is not None else {}
    ).items():
        is_object = isinstance(spec, dict) and "name" in spec and spec.keys() <= {*keys}
        if not isinstance(sets, dict) or not (isinstance(spec, str) or is_object):
            raise ValueError(
                f"eval_datasets has {spec!r} for {of_set}: write a Hub id, a local file or folder, or an object of "
                f"{', '.join(keys)}"
            )


@documented
@dataclass
class ModelArguments(ModelConfig):
    """TRL's `ModelConfig`, without dropout in adapters: with dropout, two forwards of the same tokens would differ."""

    lora_dropout: float = 0.0
    """LoRA dropout; TRL's own script has 0.05."""


def quantisation_of(model: ModelArguments) -> Any:
    """Return TRL's `BitsAndBytesConfig` of the flags, None without them.

    Unlike in TRL (1.16), `dtype` does not set the compute dtype of its layers: it follows from the engines'.
    """
    asked = copy.copy(model)
    asked.dtype = None
    return get_quantization_config(asked)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Parsed command line."""

    script: GRPOScriptArguments
    training: GRPOConfig
    model: ModelArguments
    mixture: DatasetMixtureConfig

    @property
    def is_demo(self) -> bool:
        return self.model.model_name_or_path is None


def parse_arguments(
    argv: Sequence[str],
    *,
    check: Callable[[Arguments], None] = lambda arguments: None,
    config_type: type[GRPOConfig] = GRPOConfig,
    world_size: int | None = None,
) -> Arguments:
    """Parse flags over `--config FILE` over defaults; without a model, the demo's defaults.

    `--resume` is short for `--resume_from_checkpoint`, `--model` for `--model_name_or_path`.

    Args:
        check: called before `training` is made, which joins the process group. Its `training` has the values of the
            fields and `local_mode`, but no derived values.
        config_type: type of `training`.
        world_size: ranks of the job; None: from the launcher.

    Raises:
        ValueError: unknown flags or YAML keys, or invalid values; the message names them.
    """
    argv = _spell_out(argv)
    settings_of(argv)  # reports errors of the file in one line, before TRL reads it

    def check_values(values: argparse.Namespace) -> None:
        given = vars(values)
        local_mode = given["use_vllm"] and given["vllm_mode"] == "local"
        kinds = {"script": GRPOScriptArguments, "model": ModelArguments, "mixture": DatasetMixtureConfig}
        parts = {
            name: kind(**{each.name: given[each.name] for each in fields(kind) if each.init})
            for name, kind in kinds.items()
        }
        check(Arguments(training=SimpleNamespace(**given, local_mode=local_mode), **parts))  # type: ignore[arg-type]

    parser = TaskParser(
        (GRPOScriptArguments, config_type, ModelArguments, DatasetMixtureConfig),
        own=(*own_fields(GRPOScriptArguments, TrlScriptArguments), *own_fields(GRPOConfig, trl.GRPOConfig)),
        check=check_values,
        prog="train.py",
    )
    # Defaults must be set before anything is checked, so a first pass looks for a model.
    peek = StrictParser(ModelConfig).parse_args_and_config(argv, return_remaining_strings=True)[0]
    if peek.model_name_or_path is None and not _HELP & set(argv):  # help shows the defaults for a named model
        world_size = read_launch(os.environ).world_size if world_size is None else world_size
        parser.set_defaults_with_config(**demo_defaults(world_size=world_size))
    script, training, model, mixture = parser.parse_args_and_config(argv)
    return Arguments(script=script, training=training, model=model, mixture=mixture)


def demo_defaults(*, world_size: int) -> dict[str, Any]:
    """Return `DEMO_DEFAULTS` with a rank's batch: about `DEMO_COMPLETIONS` over all ranks, whole groups of 8 on
    each."""
    per_rank = max(8, DEMO_COMPLETIONS // world_size // 8 * 8)
    return DEMO_DEFAULTS | {"per_device_train_batch_size": per_rank, "per_device_eval_batch_size": per_rank}


def _spell_out(argv: Sequence[str]) -> list[str]:
    """Split `--config=FILE` into two words, as TRL's parser requires, and expand short names."""
    two = tuple(f"{name}=" for name in ("--config", *_SHORT))
    words = [word for arg in argv for word in (arg.split("=", 1) if arg.startswith(two) else [arg])]
    return [_SHORT.get(word, word) for word in words]
