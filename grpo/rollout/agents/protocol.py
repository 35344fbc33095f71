"""Requests and answers of agents: OpenAI's chat completions, and vLLM's interface with token ids."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from grpo.model.messages import Message

MODEL = "policy"
"""Model name of the endpoint; any requested name means the trained model."""
NEUTRAL = ("model", "user", "metadata", "store", "seed", "parallel_tool_calls", "stream_options", "request_id")
"""Request fields ignored without a warning."""


class RequestError(Exception):
    """A refused request, in a form OpenAI's clients understand.

    Args:
        status: of HTTP.
        code: OpenAI's name of the error.
    """

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code

    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code}}


# -- requests ---------------------------------------------------------------------------------------------------------


class _ContentPart(BaseModel):
    type: str
    text: str = ""


class _Function(BaseModel):
    name: str
    arguments: str | dict[str, Any] = "{}"


class _AskedCall(BaseModel):
    id: str | None = None
    function: _Function


class _Message(BaseModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_ContentPart] | None = None
    tool_calls: list[_AskedCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class _Request(BaseModel):
    model_config = ConfigDict(extra="allow")

    stream: bool | None = None

    def ignored(self) -> list[str]:
        """Names of set fields without an effect."""
        return _set_in(self.model_extra or {}, but=NEUTRAL)


class ChatRequest(_Request):
    """`POST /v1/chat/completions`; https://platform.openai.com/docs/api-reference/chat/create."""

    messages: list[_Message] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None
    n: int | None = 1
    stop: str | list[str] | None = None

    @property
    def stops(self) -> list[str]:
        return _stops(self.stop)

    @property
    def includes_usage(self) -> bool:
        return bool(((self.model_extra or {}).get("stream_options") or {}).get("include_usage"))

    def ignored(self) -> list[str]:
        return [*super().ignored(), *(["tool_choice"] if self.tool_choice not in (None, "auto", "none") else [])]


class GenerateRequest(_Request):
    """`POST /inference/v1/generate`, documented by vLLM under disaggregated serving (0.31)."""

    token_ids: list[int] = Field(min_length=1)
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    request_id: str | None = None

    @property
    def stops(self) -> list[str]:
        return _stops(self.sampling_params.get("stop"))

    @property
    def max_tokens(self) -> int | None:
        most = self.sampling_params.get("max_tokens")
        return most if isinstance(most, int) and most > 0 else None

    def ignored(self) -> list[str]:
        own = _set_in(self.sampling_params, but=("max_tokens", "logprobs", "seed", "n", "stop"))
        return [*super().ignored(), *own]


def _set_in(given: Mapping[str, Any], *, but: Sequence[str]) -> list[str]:
    return sorted(name for name, value in given.items() if name not in but and value not in (None, False, [], {}))


def _stops(stop: Any) -> list[str]:
    return [stop] if isinstance(stop, str) else [each for each in stop or [] if each]


def parse(kind: "type[Any]", body: bytes) -> Any:
    """Parse a request of this kind.

    Raises:
        RequestError: 400, with the cause.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise RequestError(400, "invalid_request", f"{where}: {first['msg']}") from None


def messages_of(request: ChatRequest) -> list[Message]:
    """Convert messages for chat templates: text, call arguments as objects, and the tool's name in a tool message.

    Raises:
        RequestError: 400, for content other than text.
    """
    names: dict[str | None, str] = {}
    messages = []
    for given in request.messages:
        message: Message = {"role": "system" if given.role == "developer" else given.role, "content": _text(given)}
        if given.tool_calls:
            message["tool_calls"] = [*map(_call, given.tool_calls)]
            names |= {call.id: call.function.name for call in given.tool_calls}
        if given.role == "tool":
            message["name"] = given.name or names.get(given.tool_call_id) or "unknown"
            if given.tool_call_id is not None:
                message["tool_call_id"] = given.tool_call_id
        messages.append(message)
    return messages


def _call(call: _AskedCall) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": _arguments(call)}
    return {"type": "function", "function": function, **({} if call.id is None else {"id": call.id})}


def _text(message: _Message) -> str:
    if message.content is None or isinstance(message.content, str):
        return _encodable(message.content or "")
    if other := {part.type for part in message.content} - {"text"}:
        raise RequestError(400, "unsupported_content", f"a part of a message is {min(other)!r}: messages are text here")
    return _encodable("".join(part.text for part in message.content))


def _encodable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def _arguments(call: _AskedCall) -> Any:
    if not isinstance(call.function.arguments, str):
        return call.function.arguments
    try:
        found = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        return call.function.arguments
    return found if isinstance(found, dict) else call.function.arguments


def canonical(message: Message) -> str:
    """Key for equal messages: role, text, and calls by name and arguments. Clients change call ids, drop reasoning, and
    may strip the model's text."""
    content = message.get("content") or ""
    calls = [
        [call["function"]["name"], call["function"].get("arguments") or {}] for call in message.get("tool_calls") or []
    ]
    text = content.strip() if message["role"] == "assistant" else content
    return json.dumps([message["role"], text, calls], sort_keys=True, default=str)


# -- answers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AgentReply:
    """One turn, as sent to the agent."""

    message: Message
    """Parsed by the chat template; empty for requests by token ids."""
    token_ids: Sequence[int]
    """[T]"""
    logprobs: Sequence[float]
    """[T], natural log."""
    finish_reason: str
    num_prompt_tokens: int
    digest: str
    """Hash of all token ids up to here, used to derive ids."""


def chat_completion(reply: AgentReply) -> dict[str, Any]:
    """Body of a complete answer."""
    choice = {
        "index": 0,
        "message": _openai_message(reply),
        "logprobs": None,
        "finish_reason": _finish_reason(reply),
    }
    return {**_head(reply, "chat.completion"), "choices": [choice], "usage": _usage(reply)}


def chat_chunks(reply: AgentReply, *, usage: bool) -> Iterator[str]:
    """Lines of a streamed answer: all content is in the first chunk."""
    message = _openai_message(reply)
    calls = [{"index": number, **call} for number, call in enumerate(message.pop("tool_calls", []))]
    head = _head(reply, "chat.completion.chunk")
    delta = {**message, **({"tool_calls": calls} if calls else {})}
    bodies: list[dict[str, Any]] = [
        {**head, "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}]},
        {**head, "choices": [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": _finish_reason(reply)}]},
    ]
    if usage:
        bodies.append({**head, "choices": [], "usage": _usage(reply)})
    yield from (f"data: {json.dumps(body)}\n\n" for body in bodies)
    yield "data: [DONE]\n\n"


def generated(reply: AgentReply, request_id: str | None) -> dict[str, Any]:
    """Body of an answer in token ids, with their log-probabilities."""
    content: list[dict[str, Any]] = [
        {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in zip(reply.token_ids, reply.logprobs, strict=True)
    ]
    choice = {
        "index": 0,
        "logprobs": {"content": content},
        "finish_reason": reply.finish_reason,
        "token_ids": list(reply.token_ids),
    }
    return {
        "request_id": request_id or f"generate-{reply.digest}",
        "choices": [choice],
        "prompt_logprobs": None,
        "usage": _usage(reply),
    }


def models() -> dict[str, Any]:
    """Body of `GET /v1/models`."""
    return {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "grpo"}]}


def _openai_message(reply: AgentReply) -> dict[str, Any]:
    said = reply.message
    calls = [
        {
            "id": f"{reply.digest[:8]}{number}",  # nine letters and digits: some templates accept no other ids
            "type": "function",
            "function": {
                "name": call["function"]["name"],
                "arguments": _as_text(call["function"].get("arguments") or {}),
            },
        }
        for number, call in enumerate(said.get("tool_calls") or [])
    ]
    message = {"role": "assistant", "content": said.get("content") or (None if calls else "")}
    for name in ("reasoning_content", "thinking"):
        if said.get(name):
            message["reasoning_content"] = said[name]
    if calls:
        message["tool_calls"] = calls
    return message


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def _finish_reason(reply: AgentReply) -> str:
    return "tool_calls" if reply.message.get("tool_calls") else reply.finish_reason


def _head(reply: AgentReply, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{reply.digest}", "object": kind, "created": int(time.time()), "model": MODEL}


def _usage(reply: AgentReply) -> dict[str, int]:
    prompt, said = reply.num_prompt_tokens, len(reply.token_ids)
    return {"prompt_tokens": prompt, "completion_tokens": said, "total_tokens": prompt + said}
