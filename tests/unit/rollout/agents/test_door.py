"""The door as clients of OpenAI's protocol see it, friendly and hostile ones; behind it a fake episode."""

import asyncio
import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from grpo.rollout.agents.door import Door, DoorServer
from grpo.rollout.agents.protocol import AgentReply, RequestError
from grpo.rollout.turns.sampler import BatchOver

CALLS = [{"type": "function", "function": {"name": "times", "arguments": {"a": 2, "b": 3}}}]
HI: Any = [{"role": "user", "content": "hi"}]
DEADLINE_S = 60.0


class AgentEpisode:
    """Answers `hello`, or does what it is reported."""

    def __init__(self, does: Callable[[list[dict[str, Any]]], Any] | None = None, **message: Any) -> None:
        self.does, self.message = does, {"role": "assistant", "content": "hello", **message}
        self.asked: list[tuple[list[dict[str, Any]], Any]] = []
        self.cancelled = threading.Event()

    async def chat(self, messages: list[dict[str, Any]], tools: Any, **more: Any) -> AgentReply:
        self.asked.append((messages, {"tools": tools, **more}))
        try:
            if self.does is not None and (found := self.does(messages)) is not None:
                await found
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return self._reply(self.message)

    async def generate(self, token_ids: list[int], **more: Any) -> AgentReply:
        self.asked.append(([{"ids": token_ids}], more))
        return self._reply({})

    def _reply(self, message: dict[str, Any]) -> AgentReply:
        ids = [5, 6]
        return AgentReply(
            message=message,
            token_ids=ids,
            logprobs=[-1.0, -2.0],
            finish_reason="stop",
            num_prompt_tokens=4,
            digest="0123456789abcdef01234567",
        )


class House:
    """A server and those whom it has let in."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.server = DoorServer("127.0.0.1", self.said.append)

    def admit(self, episode: AgentEpisode | None = None) -> tuple[str, Door]:
        return self.server.admit(episode or AgentEpisode())  # type: ignore[arg-type]

    def client(self, door: Door, **more: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=door.url, api_key=door.key, timeout=DEADLINE_S, **more)

    def post(self, door: Door, body: bytes, *, key: str | None = None, path: str = "/chat/completions") -> Any:
        """Status, and the error's code."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=DEADLINE_S)
        where = door.url.partition(f":{self.server.port}")[2]
        connection.request("POST", f"{where}{path}", body, {"Authorization": f"Bearer {key or door.key}"})
        answer = connection.getresponse()
        found = json.loads(answer.read())
        connection.close()
        return answer.status, found.get("error", {}).get("code")


@pytest.fixture
def house() -> Iterator[House]:
    found = House()
    yield found
    found.server.close()


def ask(house: House, door: Door, **more: Any) -> Any:
    with house.client(door) as client:
        return client.chat.completions.create(model="gpt-4o", messages=HI, **more)


def test_chat_completion_with_tool_calls_round_trips(house: House) -> None:
    episode = AgentEpisode(content="", tool_calls=CALLS, thinking="two times three")
    _, door = house.admit(episode)
    tools: Any = [{"type": "function", "function": {"name": "times", "parameters": {}}}]
    answer = ask(house, door, tools=tools, max_tokens=7, stop="x")
    (call,) = answer.choices[0].message.tool_calls
    assert (call.id, call.function.name) == ("012345670", "times")
    assert json.loads(call.function.arguments) == {"a": 2, "b": 3}
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.choices[0].message.reasoning_content == "two times three"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 2)
    said = answer.choices[0].message.model_dump(exclude_none=True)
    with house.client(door) as client:
        result: Any = {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "6"}]}
        client.chat.completions.create(model="x", messages=[*HI, said, result])
    (_, first), (messages, _) = episode.asked
    assert first == {"tools": tools, "max_tokens": 7, "stop": ["x"]}
    assert messages[1]["tool_calls"][0]["function"] == {"name": "times", "arguments": {"a": 2, "b": 3}}
    assert messages[2] == {"role": "tool", "name": "times", "tool_call_id": call.id, "content": "6"}
    assert house.said == []


@pytest.mark.parametrize("message", [{}, {"content": "", "tool_calls": CALLS}], ids=["text", "calls"])
def test_streamed_chat_completion_matches_plain(house: House, message: dict[str, Any]) -> None:
    _, door = house.admit(AgentEpisode(**message))
    plain = ask(house, door).choices[0]
    with (
        house.client(door) as client,
        client.chat.completions.stream(model="x", messages=HI, stream_options={"include_usage": True}) as stream,
    ):
        final = stream.get_final_completion()
    assert final.choices[0].finish_reason == plain.finish_reason
    assert (final.choices[0].message.content or "") == (plain.message.content or "")
    calls = final.choices[0].message.tool_calls or []
    assert [each.function.arguments for each in calls] == [
        each.function.arguments for each in plain.message.tool_calls or []
    ]
    assert final.usage is not None
    assert final.usage.completion_tokens == 2


def test_generate_endpoint_takes_and_returns_token_ids(house: House) -> None:
    episode = AgentEpisode()
    _, door = house.admit(episode)
    sampling = {"max_tokens": 5, "logprobs": 1, "stop": ["x"]}
    body = json.dumps({"token_ids": [1, 2], "sampling_params": sampling}).encode()
    assert house.post(door, body, path="/inference/v1/generate") == (200, None)
    connection = http.client.HTTPConnection("127.0.0.1", house.server.port, timeout=DEADLINE_S)
    root = door.url.partition(f":{house.server.port}")[2].removesuffix("/v1")
    connection.request("POST", f"{root}/inference/v1/generate", body, {"Authorization": f"Bearer {door.key}"})
    choice = json.loads(connection.getresponse().read())["choices"][0]
    connection.close()
    assert choice["token_ids"] == [5, 6]
    assert [each["logprob"] for each in choice["logprobs"]["content"]] == [-1.0, -2.0]
    assert episode.asked[0] == ([{"ids": [1, 2]}], {"max_tokens": 5, "stop": ["x"]})


def test_models_endpoint_lists_policy(house: House) -> None:
    _, door = house.admit()
    with house.client(door) as client:
        assert [model.id for model in client.models.list()] == ["policy"]


def test_door_with_foreign_key_refuses_request(house: House) -> None:
    mine, theirs = AgentEpisode(), AgentEpisode()
    ticket, door = house.admit(mine)
    _, other = house.admit(theirs)
    for key in (other.key, "sk-guessed"):
        with pytest.raises(openai.AuthenticationError, match="each row has its own"):
            ask(house, Door(url=door.url, key=key, model="x"))
    assert house.post(door, b"", key="\xfc") == (401, "invalid_api_key")
    nowhere = door.url.replace(ticket, "0000")
    with pytest.raises(openai.AuthenticationError):
        ask(house, Door(url=nowhere, key=door.key, model="x"))
    assert (mine.asked, theirs.asked) == ([], [])
    assert door.key not in repr(door)


def test_dismiss_cancels_open_request_and_refuses_new_ones(house: House) -> None:
    asked, release = threading.Event(), asyncio.Event()

    def wait(messages: Any) -> Any:
        asked.set()
        return release.wait()

    episode = AgentEpisode(wait)
    ticket, door = house.admit(episode)
    failed: list[Exception] = []

    def agent() -> None:
        try:
            with house.client(door, max_retries=0) as client:
                client.chat.completions.create(model="x", messages=HI)
        except openai.OpenAIError as error:
            failed.append(error)

    thread = threading.Thread(target=agent)
    thread.start()
    assert asked.wait(DEADLINE_S)
    house.server.dismiss(ticket)
    thread.join(DEADLINE_S)
    assert episode.cancelled.wait(DEADLINE_S)
    assert len(failed) == 1
    with pytest.raises(openai.AuthenticationError):
        ask(house, door)


def test_client_disconnect_cancels_sampling(house: House) -> None:
    asked, release = threading.Event(), asyncio.Event()

    def wait(messages: Any) -> Any:
        asked.set()
        return release.wait()

    episode = AgentEpisode(wait)
    _, door = house.admit(episode)
    body = json.dumps({"messages": HI}).encode()
    with socket.create_connection(("127.0.0.1", house.server.port), timeout=DEADLINE_S) as connection:
        connection.sendall(request_of(house, door, len(body)) + body)
        assert asked.wait(DEADLINE_S)
    assert episode.cancelled.wait(DEADLINE_S)


@pytest.mark.parametrize("error", [BatchOver("over"), ConnectionError("the job is ending")])
def test_chat_completion_after_batch_end_is_not_retried(house: House, error: Exception) -> None:
    def ends(messages: Any) -> None:
        raise error

    episode = AgentEpisode(ends)
    _, door = house.admit(episode)
    with pytest.raises(openai.InternalServerError, match=str(error)):
        ask(house, door)
    assert len(episode.asked) == 1


def test_episode_errors_become_openai_errors(house: House) -> None:
    def refuses(messages: Any) -> None:
        raise RequestError(400, "context_length_exceeded", "too long")

    def breaks(messages: Any) -> None:
        raise ZeroDivisionError("of ours")

    _, door = house.admit(AgentEpisode(refuses))
    with pytest.raises(openai.BadRequestError, match="too long") as caught:
        ask(house, door)
    assert caught.value.code == "context_length_exceeded"
    _, door = house.admit(AgentEpisode(breaks))
    with pytest.raises(openai.InternalServerError, match="ZeroDivisionError: of ours"):
        ask(house, door)


def request_of(house: House, door: Door, length: int) -> bytes:
    where = door.url.partition(f":{house.server.port}")[2]
    return (
        f"POST {where}/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {door.key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    ).encode()


DEEP = b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"", (400, "invalid_request")),
        (b"{", (400, "invalid_request")),
        (b"[]", (400, "invalid_request")),
        (b"\xff\xfe", (400, "invalid_request")),
        (DEEP, (400, "invalid_request")),
        (b'{"messages": []}', (400, "invalid_request")),
        (b'{"messages": [{"role": "king", "content": "x"}]}', (400, "invalid_request")),
        (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', (400, "unsupported_content")),
        (b'{"messages": [{"role": "user", "content": "x"}], "n": 2}', (400, "unsupported_value")),
        (b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}', (400, "invalid_request")),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', (400, "invalid_request")),
        (b" " * (9 << 20), (413, "request_too_large")),
    ],
    ids=[
        "empty",
        "half",
        "a list",
        "no text",
        "deep",
        "nothing said",
        "no role",
        "image",
        "two",
        "none",
        "half a pair",
        "9 MiB",
    ],
)
def test_malformed_body_returns_client_error(house: House, body: bytes, expected: Any) -> None:
    episode = AgentEpisode()
    _, door = house.admit(episode)
    assert house.post(door, body) == expected
    assert episode.asked == []
    assert ask(house, door).choices[0].message.content == "hello"


def test_unknown_path_or_method_returns_404_or_405(house: House) -> None:
    _, door = house.admit()
    assert house.post(door, b"", path="/embeddings") == (404, "not_found")
    assert house.post(door, b"", path="/models") == (405, "not_found")


def test_half_request_times_out_without_blocking_others(house: House) -> None:
    house.server._body_s = 0.5
    _, door = house.admit()
    connections = [socket.create_connection(("127.0.0.1", house.server.port), timeout=DEADLINE_S) for _ in range(3)]
    half_body, half_head, _ = connections
    try:
        half_body.sendall(request_of(house, door, 1000) + b'{"messages')
        half_head.sendall(b"POST / HTTP/1.1\r\nHo")
        assert ask(house, door).choices[0].message.content == "hello"
        received = b""
        while b"request_timeout" not in received:
            chunk = half_body.recv(4096)
            assert chunk, received
            received += chunk
        assert received.startswith(b"HTTP/1.1 408")
    finally:
        for connection in connections:
            connection.close()


def test_slow_reader_does_not_block_others(house: House) -> None:
    """What it does not take is more than any buffer of the system holds."""
    _, door = house.admit(AgentEpisode(content="x" * (64 << 20)))
    body = json.dumps({"messages": HI}).encode()
    _, other = house.admit()
    with socket.create_connection(("127.0.0.1", house.server.port), timeout=DEADLINE_S) as slow:
        slow.sendall(request_of(house, door, len(body)) + body)
        assert slow.recv(1)
        for _ in range(5):
            assert ask(house, other).choices[0].message.content == "hello"


def test_thousand_idle_connections_do_not_block_requests(house: House) -> None:
    _, door = house.admit()
    idle = [socket.create_connection(("127.0.0.1", house.server.port), timeout=DEADLINE_S) for _ in range(1000)]
    try:
        assert ask(house, door).choices[0].message.content == "hello"
    finally:
        for connection in idle:
            connection.close()


def test_ignored_options_are_reported_once(house: House) -> None:
    _, door = house.admit()
    for _ in range(2):
        ask(house, door, temperature=0.2, seed=3, top_p=None, tool_choice="required", parallel_tool_calls=True)
    ask(house, door, temperature=0.2, response_format={"type": "json_object"})
    first, second = house.said
    assert first.startswith("an agent sets temperature, tool_choice, which has no effect")
    assert second.startswith("an agent sets response_format, which has no effect")


def test_door_server_on_foreign_address_raises() -> None:
    with pytest.raises(ValueError, match=r"agent_host is '192\.0\.2\.1', where no server can listen"):
        DoorServer("192.0.2.1", print)


def test_door_server_on_all_interfaces_gives_reachable_url() -> None:
    server = DoorServer("0.0.0.0", print)
    try:
        _, door = server.admit(AgentEpisode())  # type: ignore[arg-type]
        assert "0.0.0.0" not in door.url
        with openai.OpenAI(base_url=door.url, api_key=door.key) as client:
            assert [model.id for model in client.models.list()] == ["policy"]
    finally:
        server.close()


def test_door_server_with_http_proxy_bypasses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "example.org")
    monkeypatch.delenv("no_proxy", raising=False)
    house = House()
    try:
        _, door = house.admit()
        assert ask(house, door).choices[0].message.content == "hello"
        assert os.environ["NO_PROXY"] == "example.org,127.0.0.1,localhost"
    finally:
        house.server.close()


def test_door_server_close_ends_thread_and_listener(house: House) -> None:
    before = {thread.name for thread in threading.enumerate()}
    assert "grpo-door" in before
    house.server.close()
    until = time.monotonic() + DEADLINE_S
    while any(thread.name == "grpo-door" for thread in threading.enumerate()):
        assert time.monotonic() < until
        time.sleep(0.01)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", house.server.port), timeout=DEADLINE_S)
