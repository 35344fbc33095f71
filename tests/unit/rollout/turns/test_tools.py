"""Tools as a model meets them: code that raises, hangs, returns anything; and what it costs the others."""

import asyncio
import io
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from grpo.rollout.turns.main_calls import MainThread
from grpo.rollout.turns.tools import Toolbox, ToolRunner, TooManyAbandoned

DEADLINE_S = 20.0


def runner(**more: Any) -> ToolRunner:
    return ToolRunner(**{"timeout_s": DEADLINE_S, "main": MainThread(), "max_threads": 8, "max_abandoned": 4, **more})


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def run(tools: ToolRunner, *calls: dict[str, Any], **sync: Callable[..., Any]) -> list[Any]:
    messages = asyncio.run(tools.run(calls, Toolbox(sync=sync), row=3))
    assert {message["role"] for message in messages} <= {"tool"}
    return [message["content"] for message in messages]


class Unshown:
    def __str__(self) -> str:
        raise RuntimeError("not for you")


@pytest.mark.parametrize(
    ("returned", "shown"),
    [
        (5, "5"),
        (None, "None"),
        (b"\xff\xfe", r"b'\xff\xfe'"),
        (b"a\xff".decode(errors="surrogateescape"), "a?"),
        ("x" * 1_000_000, "x" * 1_000_000),
        ([{"type": "text", "text": "a block"}], [{"type": "text", "text": "a block"}]),
        (["a", 1], "['a', 1]"),
        ([{"a": 1}], "[{'a': 1}]"),
        (Unshown(), "{'error': 'its result cannot be shown: RuntimeError: not for you'}"),
    ],
)
def test_tool_result_of_any_type_becomes_message(returned: Any, shown: Any) -> None:
    assert run(runner(), call("tool"), tool=lambda: returned) == [shown]


@pytest.mark.parametrize("kind", ["image", "video"])
def test_tool_result_with_image_or_video_raises(kind: str) -> None:
    """Its placeholder would stand in the episode with nothing behind it."""
    with pytest.raises(ValueError, match=rf"tool shows returned a part of type '{kind}' \[GRPO-617\]: .*from tools"):
        run(runner(), call("shows"), shows=lambda: [{"type": "text", "text": "see"}, {"type": kind, kind: object()}])


def test_tool_errors_are_reported_in_trl_form() -> None:
    def fails(a: int) -> int:
        raise ValueError(f"no {a}")

    tools = runner()
    calls = [
        call("fails", a=1),
        call("fails", b=1),
        call("unknown"),
        {"type": "code", "name": "python"},
        {"type": "function", "function": {"name": "fails", "arguments": "not a dict"}},
    ]
    first, second, third, fourth, fifth = run(tools, *calls, fails=fails)
    assert first == "{'error': 'no 1'}"
    assert "unexpected keyword argument 'b'" in second
    assert third == "{'error': 'Tool unknown not found.'}"
    assert fourth == "{'error': 'Unsupported tool call type: code'}"
    assert "error" in fifth
    assert tools.counts == {"calls": 5, "failures": 5}


def test_async_tools_run_together_after_sync_ones() -> None:
    """In TRL's order."""
    met = threading.Barrier(2)

    async def one(who: str) -> str:
        await asyncio.get_running_loop().run_in_executor(None, met.wait, DEADLINE_S)
        if who == "bad":
            raise ValueError("bad")
        return who

    box = Toolbox(sync={"now": lambda: "now"}, asynchronous={"one": one})
    calls = [call("one", who="good"), call("now"), call("one", who="bad"), call("one")]
    tools = runner()
    messages = asyncio.run(tools.run(calls, box, row=0))
    first, missing, *others = (message["content"] for message in messages)
    assert (first, others) == ("now", ["good", "{'error': 'bad'}"])
    assert "missing 1 required" in missing
    assert tools.counts == {"calls": 4, "failures": 2}


@pytest.mark.parametrize("ends", [SystemExit(3), KeyboardInterrupt()])
def test_exit_in_tool_is_reported_as_error(ends: BaseException) -> None:
    """Code that the model wrote, say; it would end the event loop, and its thread."""

    async def leaves() -> None:
        raise ends

    def leaves_too() -> None:
        raise ends

    box = Toolbox(sync={"too": leaves_too}, asynchronous={"leaves": leaves})
    messages = asyncio.run(runner().run([call("too"), call("leaves")], box, row=0))
    assert all("error" in message["content"] for message in messages)
    assert type(ends).__name__ in messages[1]["content"]


def test_tool_errors_with_lone_surrogates_stay_encodable() -> None:
    half = json.loads('"\\ud83d"')  # of a pair, as a model may write it
    screen = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)

    def fails(city: str) -> None:
        raise ValueError(f"no such city: {city}")

    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise RuntimeError("not for you")

    def unspeakable() -> None:
        raise Unspeakable

    tools = runner(say=lambda line: print(line, file=screen))
    calls = [call("fails", city=half), call(half), call("unspeakable")]
    box = Toolbox(sync={"fails": fails, "unspeakable": unspeakable})
    for message in asyncio.run(tools.run(calls, box, row=0)):
        (message["name"] + message["content"]).encode()
        assert "error" in message["content"]


def test_hanging_tool_is_abandoned_counted_and_named() -> None:
    said: list[str] = []
    release = threading.Event()
    tools = runner(timeout_s=0.1, say=said.append)

    async def deaf() -> None:
        while True:
            try:
                await asyncio.sleep(DEADLINE_S)
            except asyncio.CancelledError:
                if release.is_set():
                    raise

    async def both() -> list[Any]:
        box = Toolbox(sync={"stuck": release.wait}, asynchronous={"deaf": deaf})
        messages = [*await tools.run([call("stuck")], box, row=3), *await tools.run([call("deaf")], box, row=4)]
        release.set()
        return messages

    messages = asyncio.run(both())
    assert "tool stuck has not returned within 0.1 s (tool_timeout)" in messages[0]["content"]
    assert "tool deaf has not returned within 0.1 s (tool_timeout)" in messages[1]["content"]
    assert tools.counts == {"calls": 2, "failures": 2, "abandoned": 2}
    assert "tool stuck, called in row 3, has not returned" in said[0]
    assert not tools.running


def test_abandoned_tools_above_limit_raise() -> None:
    release = threading.Event()
    tools = runner(timeout_s=0.05, max_abandoned=1)
    run(tools, call("stuck"), stuck=release.wait)
    with pytest.raises(TooManyAbandoned, match=r"more than 1 .*GRPO-609.* tool stuck, called in row"):
        run(tools.begin(4), call("stuck"), stuck=release.wait)
    release.set()


def test_tool_runner_max_threads_limits_concurrent_calls() -> None:
    """As many calls at a time as are allowed, and one that hangs gives its place back."""
    now, most, lock = 0, 0, threading.Lock()

    def counted() -> int:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.02)
        with lock:
            now -= 1
        return now

    release = threading.Event()

    async def all_rows(tools: ToolRunner, names: list[str]) -> list[Any]:
        box = Toolbox(sync={"counted": counted, "stuck": release.wait})
        return await asyncio.gather(*(tools.run([call(name)], box, row) for row, name in enumerate(names)))

    asyncio.run(all_rows(runner(max_threads=2), ["counted"] * 10))
    assert most == 2
    asyncio.run(all_rows(runner(max_threads=1, timeout_s=0.1), ["stuck", "counted"]))
    release.set()


def test_tool_runner_with_one_thread_replaces_it_after_hang() -> None:
    """For what belongs to a thread: a connection of sqlite's, a browser."""
    seen: list[int | None] = []
    prepared: list[int | None] = []
    release = threading.Event()
    tools = runner(max_threads=1, timeout_s=0.2, prepare=lambda: prepared.append(threading.current_thread().ident))
    box = Toolbox(sync={"who": lambda: seen.append(threading.current_thread().ident), "stuck": release.wait})

    async def calls() -> None:
        for row, name in enumerate(["who", "who", "stuck", "who", "who"]):
            await tools.run([call(name)], box, row)

    asyncio.run(calls())
    first, second, third, fourth = seen
    assert first == second != third == fourth
    assert prepared == [first, third]
    release.set()


def test_episode_with_hanging_call_calls_no_more_tools() -> None:
    release = threading.Event()
    said: list[str] = []

    async def never() -> None:
        raise AssertionError("it is called")

    tools = runner(timeout_s=0.1, say=said.append)
    box = Toolbox(sync={"stuck": release.wait, "other": lambda: 1 / 0}, asynchronous={"never": never})

    async def calls() -> list[Any]:
        first = await tools.run([call("stuck"), call("other"), call("never")], box, 2)
        refused = await tools.run([call("other")], box, 2)
        return [
            *first[1:],
            *refused,
            *await tools.run([call("other")], box, 3),
            *await tools.run([call("other")], box, 3),
        ]

    behind, beside, refused, failed, again = asyncio.run(calls())
    assert (
        behind["content"] == beside["content"] == refused["content"] == "{'error': 'an earlier call has not returned'}"
    )
    assert failed["content"] == again["content"] == "{'error': 'division by zero'}"
    assert tools.hanging_rows == {2}
    assert [line for line in said if "ZeroDivisionError" in line] == [
        "WARNING: tool other raised ZeroDivisionError: division by zero; the model sees it"
    ]
    assert not tools.begin(4).hanging_rows
    release.set()
