"""Between TRL's trainer and ours: the chat template, as agents at a door of ours need it."""

import contextlib
import weakref
from typing import Any

from jinja2 import TemplateError
from trl.chat_template_utils import add_response_schema, get_training_chat_template, parse_response

from grpo.rollout.agents.episode import Tools
from grpo.rollout.turns.tools import Message

_DUMMY: list[Message] = [{"role": "user", "content": "dummy"}, {"role": "assistant", "content": "dummy"}]


class AgentTemplate:
    """Messages and tokens as TRL has them (1.16), for conversations of which each has tools of its own.

    Args:
        reads_calls: whether the tokenizer can tell calls of tools from text.
    """

    def __init__(self, trainer: Any, *, reads_calls: bool) -> None:
        self._trainer, self._reads_calls = weakref.proxy(trainer), reads_calls

    def render(self, messages: list[Message], tools: Tools) -> list[int]:
        if tools and not self._reads_calls:
            raise ValueError(
                "tools, but nothing says how this model writes calls: set the tokenizer's response_template"
            )
        return self._tokens(messages, tools=tools, add_generation_prompt=True)

    def suffix(self, messages: list[Message]) -> list[int]:
        if messages[0]["role"] == "tool":
            return self._trainer._get_tool_suffix_ids(messages)
        # As TRL does it behind calls of tools: what a template has behind the end of a turn belongs to the next one.
        prefix = self._tokens(_DUMMY)
        whole = self._tokens([*_DUMMY, *messages], add_generation_prompt=True)
        end = self._trainer._tokenizer.eos_token_id
        if end in prefix:
            prefix = prefix[: len(prefix) - prefix[::-1].index(end)]
        if whole[: len(prefix)] != prefix:
            raise ValueError("messages that follow change how the ones before are written")
        return whole[len(prefix) :]

    def parse(self, token_ids: list[int], *, prefix: list[int], tools: Tools) -> Message:
        tokenizer = self._trainer._tokenizer
        text = {"role": "assistant", "content": tokenizer.decode(token_ids, skip_special_tokens=True)}
        if not self._reads_calls:
            return text
        message = parse_response(tokenizer, token_ids, prefix=prefix, tools=[*tools] if tools else None)
        return message if tools or not message.get("tool_calls") else text

    def _tokens(self, messages: list[Message], **more: Any) -> list[int]:
        trainer = self._trainer
        template = trainer.chat_template or trainer.processing_class.chat_template
        return trainer._tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=True, return_dict=False, **trainer.chat_template_kwargs, **more
        )


def fitting_template(trainer: Any) -> AgentTemplate:
    """A template under which what was said stays as it was said: the model's own, or TRL's for training.

    Raises:
        ValueError: there is none.
    """
    tokenizer, processor = trainer._tokenizer, trainer.processing_class
    if processor.chat_template is None:
        raise ValueError(
            "agents speak in messages, and the model's tokenizer has no chat template: train a model that was tuned "
            "for conversations, or set the tokenizer's chat_template"
        )
    if tokenizer_reads_nothing(tokenizer):
        with contextlib.suppress(ValueError):  # a template that TRL does not know
            add_response_schema(processor)
    template = AgentTemplate(trainer, reads_calls=not tokenizer_reads_nothing(tokenizer))
    try:
        if not _keeps_prefixes(template):
            trainer.chat_template = get_training_chat_template(processor)
    except ValueError as error:
        raise ValueError(f"{_CHANGES}; TRL has no other for it: {error}") from error
    if not _keeps_prefixes(template):
        raise ValueError(f"{_CHANGES}, and so does TRL's for training")
    return template


_CHANGES = (
    "the model's chat template writes earlier messages in another way once others follow, so what an agent's model has "
    "said could not stay the tokens that it has sampled [GRPO-219]: set the tokenizer's chat_template to one that only "
    "appends"
)


def tokenizer_reads_nothing(tokenizer: Any) -> bool:
    return getattr(tokenizer, "response_template", None) is None and getattr(tokenizer, "response_schema", None) is None


def _keeps_prefixes(template: AgentTemplate) -> bool:
    """Whether messages of users and, where the template has them, of tools are only put behind the others."""
    try:
        template.suffix([{"role": "user", "content": "dummy"}])
    except ValueError:
        return False
    try:
        template.suffix([{"role": "tool", "name": "dummy", "content": "dummy"}])
    except ValueError:
        return False
    except (TemplateError, TypeError):  # it has none
        pass
    return True
