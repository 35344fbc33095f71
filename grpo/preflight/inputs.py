"""Checks of a trainer's arguments, before its model is loaded and its engines start."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import ProcessorMixin

from grpo.config import GRPOConfig
from grpo.config.models import base_of, readable_config
from grpo.model.messages import MessageTemplate
from grpo.model.pictures import with_list_of_images
from grpo.model.text_part import placeholder_ids
from grpo.place.spelling import did_you_mean
from grpo.preflight.data import check_columns, check_enough_rows, check_prompt_lengths, first_row, prompt_ids
from grpo.preflight.model import check_hub, check_model, local_model
from grpo.preflight.processor import load_tokenizer
from grpo.preflight.rewards import check_reward_list, try_rewards
from grpo.preflight.tools import check_conversational, check_environments_data, check_tools
from grpo.preflight.versions import warn_of_untested


def check_model_name(inputs: Mapping[str, Any]) -> None:
    """Check that the model is a folder, or a Hub id within reach. Goes before all that reads its configuration.

    Raises:
        ValueError: names the model and the fix.
    """
    if isinstance(inputs["model"], str) and local_model(inputs["model"], "the model") is None:
        check_hub(inputs["model"], "the model", revision=(inputs["args"].model_init_kwargs or {}).get("revision"))


def check_inputs(inputs: Mapping[str, Any]) -> None:
    """Check the trainer's arguments on each rank; fast, and without communication.

    Raises:
        ValueError: names the argument and the fix.
    """
    args: GRPOConfig = inputs["args"]
    has_environment = bool(inputs["environment_factory"])
    if inputs["reward_funcs"] is not None or not has_environment:  # an environment may score by itself
        check_reward_list(inputs["reward_funcs"], args)
    if inputs["train_dataset"] is None and has_environment:
        check_environments_data(inputs["environment_factory"], args)
        return
    if inputs["train_dataset"] is None:
        raise ValueError("train_dataset is None: give the trainer a data set with a column 'prompt'")
    if isinstance(inputs["train_dataset"], Mapping):
        splits = ", ".join(map(repr, inputs["train_dataset"]))
        raise ValueError(
            f"train_dataset has the splits {splits}: give the trainer one of them, such as dataset['train']"
        )
    if not has_environment:  # whose `reset` may give the prompt
        check_columns(inputs["train_dataset"], "train_dataset")
    check_enough_rows(inputs["train_dataset"], args)
    if inputs["eval_dataset"] is not None:
        if not has_environment:
            check_columns(inputs["eval_dataset"], "eval_dataset")
    elif args.eval_strategy != "no":
        raise ValueError(
            f"eval_strategy is {args.eval_strategy.value!r}, but eval_dataset is None: give one, or set it to 'no'"
        )
    sets = [*inputs["eval_dataset"]] if isinstance(inputs["eval_dataset"], Mapping) else []
    if unknown := [name for name in args.eval_sets or {} if name not in sets]:
        there = f"eval_dataset has the sets {', '.join(sets)}" if sets else "eval_dataset is no dict of sets by name"
        raise ValueError(f"eval_sets speaks of {', '.join(unknown)}, but {there}{did_you_mean(unknown[0], sets)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstRow:
    """Results of `try_first_row`."""

    text: list[int] = field(default_factory=list)
    """Token ids of the first row's prompt, without image placeholders; empty if an environment gives the prompts."""
    reward_loop: asyncio.AbstractEventLoop | None = None
    """Event loop from `try_rewards`."""


def try_first_row(inputs: Mapping[str, Any]) -> FirstRow:
    """Try the first row with tokenizer and rewards. On one rank; takes seconds.

    Raises:
        ValueError: names the cause, and in the user's own code the line.
    """
    warn_of_untested()
    args: GRPOConfig = inputs["args"]
    revision = (args.model_init_kwargs or {}).get("revision")
    if isinstance(inputs["model"], str):
        check_model(inputs["model"], "the model", revision=revision, trust_remote_code=args.trust_remote_code)
    tokenizer = inputs["processing_class"] or load_tokenizer(inputs["model"], args)  # or a processor
    if inputs["tools"] or inputs["environment_factory"]:
        check_tools(inputs["tools"] or [], tokenizer)
    if getattr(inputs["rollout_func"], "speaks_in_messages", False):  # agents
        MessageTemplate(tokenizer, args.chat_template_kwargs)
    if inputs["environment_factory"]:
        return FirstRow()  # which gives prompts, and the columns for rewards, only with engines
    row = with_list_of_images(first_row(inputs["train_dataset"]))
    if inputs["tools"]:
        check_conversational(row)
    ids = prompt_ids(row, tokenizer, args, inputs["tools"])
    text = ids
    if isinstance(tokenizer, ProcessorMixin):  # the text does not give the length of a prompt with images
        config = readable_config(base_of(inputs["model"]), args)
        marks = {*tokenizer.tokenizer.all_special_ids, *(set() if config is None else placeholder_ids(config))}
        text = [token for token in ids if token not in marks]
    else:
        check_prompt_lengths(inputs["train_dataset"], tokenizer, args, inputs["tools"])
    if inputs["rollout_func"] is not None or not args.check_rewards:
        return FirstRow(text=text)  # a rollout function gives rewards more columns than the data set has
    return FirstRow(text=text, reward_loop=try_rewards(inputs["reward_funcs"], row, ids, args))
