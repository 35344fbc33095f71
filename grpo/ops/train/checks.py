"""Checks of a task's arguments: `train.py` exits on a mistake before anything starts, and a plan lists it."""

import os
from collections.abc import Callable
from pathlib import Path

from grpo import agents
from grpo.ops.train.arguments import Arguments, ModelArguments
from grpo.ops.train.code_reward import code_reward
from grpo.ops.train.data import local_data
from grpo.ops.train.rewards import RewardFunc, load_reward_funcs
from grpo.ops.train.sandbox import must_isolate
from grpo.place.launch import read_launch
from grpo.preflight.model import check_model, local_model
from grpo.preflight.rewards import check_reward_list
from grpo.record.folder import check_writable


def check_weights_trained(arguments: Arguments) -> None:
    """Refuse quantised models without adapters, before TRL asks for their libraries."""
    model = arguments.model
    if not arguments.training.local_mode:
        return
    if not model.use_peft:
        flags = ("lora_r", "lora_target_modules")
        given = [name for name in flags if getattr(model, name) != getattr(ModelArguments, name)]
        if given:
            raise ValueError(f"{', '.join(given)} without use_peft: add --use_peft, or remove them")
        if model.load_in_4bit:
            raise ValueError(
                "load_in_4bit without use_peft: weights of four bits have no gradients; add --use_peft, or remove it"
            )
    if model.load_in_8bit:
        raise ValueError(
            "load_in_8bit: local mode trains adapters on a base of four bits; no engine could hold what layers of 8 "
            "bits compute with: set load_in_4bit, or set vllm_mode to 'server' or 'colocate', where TRL takes it"
        )


def check_task(arguments: Arguments) -> None:
    """Refuse data or an agent without a model, a model without data or rewards, and an agent that is not a command."""
    script, mixture = arguments.script, arguments.mixture
    has_data = bool(script.dataset_name or mixture.datasets)
    if arguments.is_demo:
        if has_data or script.dataset_adapter or script.dataset_columns or script.system_prompt or script.eval_datasets:
            raise ValueError(
                "a data set is given, but no model: name one with --model_name_or_path. Without a model the demo task "
                "runs, which has a data set of its own"
            )
        if script.agent is not None:
            raise ValueError(
                f"agent is {script.agent!r}, but no model: name one with --model_name_or_path. The demo's has no chat "
                "template"
            )
        return
    if script.agent is not None:
        agents(script.agent)
    if not has_data:
        raise ValueError("there is no data to train on: name it with --dataset_name, or list `datasets` in a YAML file")
    if script.dataset_name and not mixture.datasets:
        local_data(script.dataset_name)


def check_rewards(arguments: Arguments) -> None:
    """Refuse missing rewards, or a number other than that of `reward_weights`; imports the modules of reward
    functions."""
    check_reward_list(rewards_of(arguments), arguments.training)


def rewards_of(arguments: Arguments) -> "list[RewardFunc | str]":
    """Return the reward model's name, if any, and the reward functions.

    Raises:
        ValueError: there are none, or a name is unknown.
    """
    script = arguments.script
    model = script.reward_model_name_or_path
    names = script.reward_funcs or (["agent_reward"] if script.agent is not None and not model else [])
    rewards = [*([model] if model else []), *load_reward_funcs(names)]
    if not rewards:
        raise ValueError(
            "there is nothing to score completions with: name reward functions with --reward_funcs, or a reward model "
            "with --reward_model_name_or_path"
        )
    return rewards


def check_local_models(arguments: Arguments) -> None:
    """Refuse nonexistent paths of models."""
    for setting in ("model_name_or_path", "reward_model_name_or_path"):
        name = getattr(arguments.model, setting, None) or getattr(arguments.script, setting, None)
        if name is not None:
            local_model(name, setting)


CHECKS: tuple[Callable[[Arguments], None], ...] = (check_weights_trained, check_task, check_local_models, check_rewards)
"""Checks of every rank and of a plan; each raises ValueError, or an error from a reward function's module."""


def check_arguments(arguments: Arguments) -> None:
    """Run all of `CHECKS`, and check the sandbox if `code_reward` is used.

    On rank 0 also check that the output folder is writable and the model readable.
    """
    for check in CHECKS:
        check(arguments)
    if code_reward in rewards_of(arguments):
        must_isolate()
    if read_launch(os.environ).rank != 0:
        return
    name, training = arguments.model.model_name_or_path, arguments.training
    check_writable(Path(training.output_dir or "trainer_output"))
    if name is not None:
        revision = (training.model_init_kwargs or {}).get("revision") or arguments.model.model_revision
        check_model(name, "model_name_or_path", revision=revision, trust_remote_code=training.trust_remote_code)
