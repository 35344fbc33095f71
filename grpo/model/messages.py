"""Tokens of growing multi-turn rollouts: earlier messages keep their sampled tokens."""

import contextlib
from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError
from trl.chat_template_utils import add_response_schema, get_training_chat_template, parse_response

Message = dict[str, Any]
Tools = Sequence[dict[str, Any]] | None
_CHANGES = (
    "the model's chat template renders earlier messages differently once others follow, so the tokens that the model "
    "has sampled for an agent could not be kept [GRPO-219]: set the tokenizer's chat_template to one that only appends"
)


class MessageTemplate:
    """Chat template of a model, or TRL's training template if the model's own rewrites earlier messages.

    Args:
        processor: a tokenizer or processor. If it cannot parse tool calls and TRL knows how, the schema is added
            (`add_response_schema`).
        kwargs: for the template.

    Raises:
        ValueError: there is no template, or none that only appends.
    """

    def __init__(self, processor: Any, kwargs: dict[str, Any] | None = None) -> None:
        self._tokenizer = getattr(processor, "tokenizer", processor)
        self._kwargs = kwargs or {}
        if processor.chat_template is None:
            raise ValueError(
                "agents speak in messages, and the model's tokenizer has no chat template: train a model that was "
                "tuned for conversations, or set the tokenizer's chat_template"
            )
        if not self._reads_calls:
            with contextlib.suppress(ValueError):  # a template unknown to TRL
                add_response_schema(processor)
        self.template: str = processor.chat_template
        if self._keeps_prefixes():
            return
        try:
            self.template = get_training_chat_template(processor) or self.template
        except ValueError as error:
            raise ValueError(f"{_CHANGES}; TRL has no other for it: {error}") from error
        if not self._keeps_prefixes():
            raise ValueError(f"{_CHANGES}; TRL's for training does it, too")

    def render(self, messages: list[Message], tools: Tools) -> list[int]:
        """Return the tokens of a multi-turn rollout, up to the start of the model's next message.

        Raises:
            ValueError: tools are given, but the tokenizer cannot parse tool calls.
        """
        if tools and not self._reads_calls:
            raise ValueError("there are tools, but the tokenizer cannot read calls of them: set its response_template")
        return self._tokens(messages, tools=tools, add_generation_prompt=True)

    def suffix(self, messages: list[Message]) -> list[int]:
        """Return the tokens of messages after one of the model's, up to the start of its next message.

        Same as TRL after tool calls (1.16, `_get_tool_suffix_ids`): template text after a turn's end token belongs to
        the suffix.

        Raises:
            ValueError: the messages change how an earlier one is rendered.
        """
        before: list[Message] = [{"role": "user", "content": "dummy"}, {"role": "assistant", "content": "dummy"}]
        if messages[0]["role"] == "tool":  # some templates write the called name before the result
            call = {"type": "function", "function": {"name": messages[0]["name"], "arguments": {}}}
            before[1] = {"role": "assistant", "content": "", "tool_calls": [call]}
        prefix = self._tokens(before)
        whole = self._tokens([*before, *messages], add_generation_prompt=True)
        if (end := self._tokenizer.eos_token_id) in prefix:
            prefix = prefix[: len(prefix) - prefix[::-1].index(end)]
        if whole[: len(prefix)] != prefix:
            raise ValueError("messages that follow change how the ones before are written")
        return whole[len(prefix) :]

    def parse(self, token_ids: list[int], *, prefix: list[int], tools: Tools) -> Message:
        """Parse the model's message; tool calls only if tools were given."""
        text = {"role": "assistant", "content": self._tokenizer.decode(token_ids, skip_special_tokens=True)}
        if not self._reads_calls:
            return text
        message = parse_response(self._tokenizer, token_ids, prefix=prefix, tools=[*tools] if tools else None)
        return message if tools or not message.get("tool_calls") else text

    @property
    def _reads_calls(self) -> bool:
        names = ("response_template", "response_schema")
        return any(getattr(self._tokenizer, name, None) is not None for name in names)

    def _tokens(self, messages: list[Message], **more: Any) -> list[int]:
        return self._tokenizer.apply_chat_template(
            messages, chat_template=self.template, tokenize=True, return_dict=False, **self._kwargs, **more
        )

    def _keeps_prefixes(self) -> bool:
        """True if messages of users and, where the template has them, of tools are only appended."""
        try:
            self.suffix([{"role": "user", "content": "dummy"}])
            with contextlib.suppress(TemplateError, TypeError):  # no tool messages in this template
                self.suffix([{"role": "tool", "name": "dummy", "content": "dummy"}])
        except ValueError:
            return False
        return True
