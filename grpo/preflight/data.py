"""Checks of the data: a column of prompts, and a first row accepted by the chat template and the engines."""

import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from transformers import ProcessorMixin
from trl.data_utils import is_conversational, prepare_multimodal_messages

from grpo.config import GRPOConfig
from grpo.model.pictures import in_rgb, kinds_of_parts

LONG_PROMPTS_S = 30.0
SAMPLED_ROWS = 256
TEMPLATE_TOKENS = 64  # added to a message by a chat template, its own system prompt included

_MEANT = ("question", "query", "problem", "instruction", "input", "text", "messages", "conversations", "conversation")


def check_columns(dataset: Any, setting: str) -> None:
    """Check that a data set has prompts; in a mapping, that every data set has them.

    Raises:
        ValueError: names the existing columns.
    """
    parts = dataset.items() if isinstance(dataset, Mapping) else [(None, dataset)]
    for name, part in parts:
        where = setting if name is None else f"{setting}[{name!r}]"
        columns = getattr(part, "column_names", None)
        if columns is not None and "prompt" not in columns:
            meant = next((column for column in _MEANT if column in columns), columns[0] if columns else "question")
            raise ValueError(
                f"{where} has no column 'prompt', but {', '.join(map(repr, columns)) or 'none at all'} [GRPO-203]: "
                f'rename the one that holds the prompts: --dataset_columns \'{{"{meant}": "prompt"}}\', or in a '
                f"script dataset.rename_column('{meant}', 'prompt')"
            )
        if hasattr(part, "__len__") and len(part) == 0:
            raise ValueError(f"{where} has no rows: look at its split and at what filters it")


def check_enough_rows(dataset: Any, args: GRPOConfig) -> None:
    """Check that there are rows for one generation batch; the sampler drops incomplete ones.

    Raises:
        ValueError: has the numbers.
    """
    prompts = args.generation_batch_size // args.num_generations + args.spare_groups
    if hasattr(dataset, "__len__") and len(dataset) < prompts:
        raise ValueError(
            f"train_dataset has {len(dataset)} rows, but a generation batch takes {prompts} prompts "
            f"({args.generation_batch_size} completions in groups of num_generations {args.num_generations}): add "
            "rows, or lower per_device_train_batch_size or steps_per_generation"
        )


def first_row(dataset: Any) -> dict[str, Any]:
    """Return the first row, which stands for all in later checks.

    Raises:
        ValueError: there is none, or its prompt is neither text nor messages.
    """
    try:
        row = next(iter(dataset))
    except StopIteration:
        raise ValueError("train_dataset has no rows: look at its split and at what filters it") from None
    if "prompt" not in row:  # of a data set that does not list its columns
        raise ValueError(f"the first row of train_dataset has no 'prompt', but {', '.join(map(repr, row))}")
    prompt = row["prompt"]
    if not isinstance(prompt, str) and not _is_conversation(prompt):
        raise ValueError(
            f"the first prompt of train_dataset is {_shown(prompt)}: a prompt is text, or a list of messages "
            "{'role': …, 'content': …}"
        )
    if not prompt:
        raise ValueError("the first prompt of train_dataset is empty")
    if kinds := kinds_of_parts(prompt) - {"text", "image"}:
        raise ValueError(
            f"the first prompt of train_dataset has a part of type {sorted(kinds)[0]!r} [GRPO-214]: local mode takes "
            "text and images; leave such parts out"
        )
    return row


def prompt_ids(
    row: Mapping[str, Any], tokenizer: Any, args: GRPOConfig, tools: Sequence[Any] | None = None
) -> list[int]:
    """Return the first prompt's token ids, and check their number.

    Args:
        tokenizer: or a processor, for prompts with images.
        tools: described by the template, beside the prompt.

    Raises:
        ValueError: messages without a chat template, or a prompt too long for any completion.
    """
    prompt, limit = row["prompt"], args.vllm_max_model_length
    name = getattr(tokenizer, "tokenizer", tokenizer).name_or_path
    is_chat, kwargs = is_conversational({"prompt": prompt}), args.chat_template_kwargs or {}
    if is_chat and not (tokenizer.chat_template or kwargs.get("chat_template")):
        raise ValueError(
            f"the prompts are conversations, but the tokenizer of {name} has no chat template "
            "[GRPO-204]: take an instruct model, write each prompt as a text in the place of messages (no "
            "--system_prompt), or give a tokenizer with a template as processing_class"
        )
    try:
        if isinstance(tokenizer, ProcessorMixin):
            prompt = in_rgb(prepare_multimodal_messages(prompt, row.get("images")))
        ids = prompt_tokens(prompt, tokenizer, args, tools)
    except Exception as error:
        what = "the chat template" if is_chat else "the tokenizer"
        raise ValueError(
            f"{what} of {name} does not take the first prompt, {_shown(prompt)}: {type(error).__name__}: {error}"
        ) from error
    if is_chat and not _keeps_content(prompt, tokenizer, kwargs):
        raise ValueError(
            f"the chat template of {name} leaves out what the first prompt says, {_shown(prompt)} "
            "[GRPO-215]: some templates of multimodal models take contents in parts alone: make each content a list, "
            "[{'type': 'text', 'text': …}]"
        )
    if not ids:
        raise ValueError(f"the first prompt, {_shown(prompt)}, becomes no tokens: is {name} the right tokenizer?")
    if limit is not None and len(ids) >= limit:
        raise ValueError(
            f"the first prompt has {len(ids)} tokens, but vllm_max_model_length, prompt and completion together, is "
            f"{limit}: set vllm_max_model_length to {len(ids) + args.max_completion_length} or more (the longest "
            "prompt + max_completion_length)"
        )
    return ids


def check_prompt_lengths(dataset: Any, tokenizer: Any, args: GRPOConfig, tools: Sequence[Any] | None = None) -> None:
    """Check that every prompt is short enough for a sampled token; for streamed or generated data, only the first ones.

    A prompt has at most as many tokens as bytes, plus its template's: only prompts that may be too long are tokenized,
    for at most `LONG_PROMPTS_S`.

    Raises:
        ValueError: has the number of overlong prompts, and the fix.
    """
    limit = args.vllm_max_model_length
    if limit is None:
        return
    until, too_long, num_rows = time.monotonic() + LONG_PROMPTS_S, {}, 0
    of_tools = len(prompt_tokens([{"role": "user", "content": ""}], tokenizer, args, tools)) if tools else 0
    for row, prompt in enumerate(_prompts(dataset)):
        num_rows += 1
        if _most_tokens(prompt) + of_tools >= limit and time.monotonic() < until:
            num_tokens = len(prompt_tokens(prompt, tokenizer, args, tools))
            if num_tokens >= limit:
                too_long[row] = num_tokens
    if too_long:
        row, longest = next(iter(too_long)), max(too_long.values())
        raise ValueError(
            f"{len(too_long)} of {num_rows} prompts of train_dataset are too long: that of row {row} has "
            f"{too_long[row]} tokens, the longest {longest}, but vllm_max_model_length, prompt and completion "
            f"together, is {limit} [GRPO-208]: set it to {longest + args.max_completion_length} or more (the longest "
            "prompt + max_completion_length), or leave such rows out (dataset.filter)"
        )


def _prompts(dataset: Any) -> Iterable[Any]:
    is_stored = hasattr(dataset, "__len__") and getattr(dataset, "format", {}).get("type") != "custom"
    if is_stored and hasattr(dataset, "column_names"):
        return dataset["prompt"]
    return (row["prompt"] for row in itertools.islice(dataset, SAMPLED_ROWS))


def _most_tokens(prompt: Any) -> int:
    if isinstance(prompt, str):
        return len(prompt.encode()) + TEMPLATE_TOKENS
    return sum(len(str(message.get("content")).encode()) + TEMPLATE_TOKENS for message in prompt) + TEMPLATE_TOKENS


def prompt_tokens(prompt: Any, tokenizer: Any, args: GRPOConfig, tools: Sequence[Any] | None = None) -> list[int]:
    """Return a prompt's token ids, as in TRL (1.16, `_tokenize_prompts`)."""
    if not is_conversational({"prompt": prompt}):
        return tokenizer(prompt)["input_ids"]
    settings = {"add_generation_prompt": True, "tokenize": True, "tools": tools or None}
    made = tokenizer.apply_chat_template([prompt], return_dict=True, **settings, **(args.chat_template_kwargs or {}))
    return made["input_ids"][0]


def _keeps_content(prompt: Any, tokenizer: Any, kwargs: Mapping[str, Any]) -> bool:
    """True if the rendered prompt contains the text of any message; templates may change some, such as a system
    prompt."""
    contents = [content.strip() for message in prompt if isinstance(content := message.get("content"), str)]
    text = tokenizer.apply_chat_template(prompt, tokenize=False, **kwargs)
    return not any(contents) or any(content in text for content in contents if content)


def _is_conversation(prompt: Any) -> bool:
    return (
        isinstance(prompt, Sequence)
        and len(prompt) > 0
        and all(isinstance(message, Mapping) and "role" in message for message in prompt)
    )


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 80 else text[:79] + '…'} ({type(value).__name__})"
