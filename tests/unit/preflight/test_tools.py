"""Tools that no model can be shown, prompts that show none, environments without an end."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from examples.calculator_model import build_tokenizer
from grpo import GRPOConfig
from grpo.preflight.tools import check_conversational, check_environments_data, check_tools

TOKENIZER = build_tokenizer()


def times(a: int, b: int) -> int:
    """The product.

    Args:
        a: the one number
        b: the other
    """
    return a * b


def without_hints(a):
    """A tool.

    Args:
        a: a number
    """
    return a


def without_words(a: int) -> int:
    return a


def test_check_tools_accepts_documented_functions() -> None:
    assert check_tools([times], TOKENIZER) is None
    assert check_tools([], TOKENIZER) is None


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        (["times"], r"tools holds 'times' \(str\): a tool is a function"),
        ([times, times], "two functions of the name times"),
        ([without_hints], r"tool without_hints cannot be described to a model.*type hint"),
        ([without_words], r"tool without_words cannot be described to a model.*'Args:'"),
    ],
)
def test_check_tools_with_invalid_tools_raises(tools: list[Callable[..., Any]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_tools(tools, TOKENIZER)


def test_check_tools_with_template_without_tools_raises() -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    with pytest.raises(ValueError, match="shows no tool calls, or not what they return"):
        check_tools([times], tokenizer)


def test_check_conversational_with_plain_text_raises() -> None:
    check_conversational({"prompt": [{"role": "user", "content": "1+1"}]})
    with pytest.raises(ValueError, match=r"the first prompt is '1\+1', plain text"):
        check_conversational({"prompt": "1+1"})


def test_check_environments_data_requires_max_steps_and_one_environment(tmp_path: Path) -> None:
    settings = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "report_to": "none"}
    check_environments_data(object, GRPOConfig(**settings, max_steps=3))
    with pytest.raises(ValueError, match="set max_steps"):
        check_environments_data(object, GRPOConfig(**settings))
    with pytest.raises(ValueError, match=r"several environments: .*'chess', 'go'"):
        check_environments_data({"chess": object, "go": object}, GRPOConfig(**settings, max_steps=3))
