"""Checks of tools: their signatures, the chat template, the prompts."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers.utils import get_json_schema
from trl.chat_template_utils import supports_tool_calling
from trl.data_utils import is_conversational

from grpo.config import GRPOConfig
from grpo.preflight.model import reason_of


def check_tools(tools: Sequence[Callable[..., Any]], tokenizer: Any) -> None:
    """Check that the model can be given each tool, and can call it.

    Raises:
        ValueError: names the tool, or the missing part of the chat template.
    """
    names = set()
    for tool in tools:
        name = getattr(tool, "__name__", None)
        if not callable(tool) or name is None:
            raise ValueError(f"tools holds {tool!r} ({type(tool).__name__}): a tool is a function, with a name")
        if name in names:
            raise ValueError(f"tools holds two functions of the name {name}: a model calls them by it; rename one")
        names.add(name)
        try:
            get_json_schema(tool)
        except Exception as error:
            raise ValueError(
                f"tool {name} cannot be described to a model ({reason_of(error)}): give each parameter a type hint, "
                "and the docstring a line for each in a section 'Args:'"
            ) from error
    if not supports_tool_calling(tokenizer):
        raise ValueError(
            f"the chat template of {tokenizer.name_or_path or 'the tokenizer'} shows no tool calls, or not what they "
            "return: take a model whose template does (Qwen3, say), or give a tokenizer with one as processing_class"
        )


def check_conversational(row: Mapping[str, Any]) -> None:
    """Raise ValueError for plain-text prompts, which cannot describe tools."""
    if not is_conversational({"prompt": row["prompt"]}):
        raise ValueError(
            f"the first prompt is {row['prompt']!r}, plain text, but a model is shown its tools by the chat template: "
            "make prompts lists of messages, [{'role': 'user', 'content': …}]"
        )


def check_environments_data(factories: Any, args: GRPOConfig) -> None:
    """Check TRL's requirements for prompts given by an environment (1.16), before engines start.

    Raises:
        ValueError: names the argument.
    """
    if isinstance(factories, Mapping):
        raise ValueError(
            "train_dataset is None, but environment_factory has several environments: give a data set whose column "
            f"'environment' says which one a row is for ({', '.join(map(repr, factories))})"
        )
    if args.max_steps <= 0:
        raise ValueError(
            "train_dataset is None, so the environment gives the prompts, and nothing says when training ends: set "
            "max_steps"
        )
