"""Environments that live in a thread each: what TRL and rewards see of them, and where their code runs."""

import asyncio
import copy
import gc
import inspect
import threading
import time
import weakref
from typing import Any

import pytest
from transformers.utils import get_json_schema

from grpo import in_threads
from grpo.rollout.turns.environments import home_of, in_their_threads
from grpo.rollout.turns.main_calls import MainThread
from grpo.rollout.turns.tools import Toolbox, ToolRunner

DEADLINE_S = 20.0


class Home:
    """Where everything has been called."""

    def __init__(self) -> None:
        self.threads = [threading.get_ident()]
        self.last = ""

    def reset(self, **columns: Any) -> str:
        self._note("reset")
        return f"hello, {columns['who']}"

    def enter(self, door: int) -> str:
        """Enter.

        Args:
            door: which
        """
        self._note("enter")
        return self.look()

    def look(self) -> str:
        """Look around."""
        self._note("look")
        return f"{len(self.threads)} calls"

    async def listen(self) -> str:
        """Listen."""
        return threading.current_thread().name

    @staticmethod
    def rules() -> str:
        """The rules."""
        return "none"

    def get_reward(self) -> float:
        self._note("get_reward")
        return float(len(set(self.threads)))

    def _note(self, what: str) -> None:
        self.last = what
        self.threads.append(threading.get_ident())


def spaces(number: int, kind: Any = Home) -> list[Any]:
    factory = in_their_threads(kind, of_all=True, prepare=lambda: None)
    return [factory() for _ in range(number)]


def test_in_their_threads_gives_each_environment_its_own_thread() -> None:
    one, two = spaces(2)
    for space in (one, two):
        assert space.reset(who="you") == "hello, you"
        assert space.enter(door=1) == "4 calls"
        assert space.get_reward() == 1.0
        assert space.last == "get_reward"
    assert len({one.threads[0], two.threads[0], threading.get_ident()}) == 3


def test_threaded_environment_keeps_class_name_and_tools() -> None:
    """As TRL 1.16 looks for tools, names rewards and tells kinds apart."""
    one, two = spaces(2)
    assert type(one) is type(two)
    assert isinstance(one, Home)
    assert type(one).__name__ == "Home"
    names = [name for name, _ in inspect.getmembers(type(one), inspect.isfunction) if not name.startswith("_")]
    assert names == ["enter", "get_reward", "listen", "look", "reset", "rules"]
    assert get_json_schema(one.enter) == get_json_schema(Home().enter)
    assert one.enter.__name__ == "enter"
    assert inspect.iscoroutinefunction(one.listen)
    assert one.rules() == "none"
    assert copy.deepcopy(one).look() == "2 calls"  # which lives nowhere


def test_in_their_threads_wraps_only_declared_factories() -> None:
    class Plain(Home): ...

    @in_threads
    class Declared(Home): ...

    factories = {"plain": Plain, "declared": Declared}
    wrapped = in_their_threads(factories, of_all=False, prepare=lambda: None)
    assert wrapped["plain"] is Plain
    assert wrapped["declared"]().threads[0] != threading.get_ident()
    assert in_their_threads(None, of_all=True, prepare=lambda: None) is None


def test_threaded_environment_error_reaches_caller() -> None:
    class Broken(Home):
        def reset(self, **columns: Any) -> str:
            raise OSError("the game server is down")

    with pytest.raises(OSError, match="the game server is down"):
        spaces(1, Broken)[0].reset()


def test_in_their_threads_with_slotted_class_raises() -> None:
    class Slotted:
        __slots__ = ()

    with pytest.raises(TypeError, match=r"Slotted cannot live in a thread of its own .* leave max_tool_threads"):
        spaces(1, Slotted)


def test_environment_thread_ends_with_environment() -> None:
    (space,) = spaces(1)
    thread = next(each for each in threading.enumerate() if each.ident == space.threads[0])
    gone = weakref.ref(space)
    del space
    gc.collect()
    assert gone() is None
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def reported(space: Any, *names: str, **runner: Any) -> list[str]:
    tools = ToolRunner(timeout_s=DEADLINE_S, main=MainThread(), max_threads=None, max_abandoned=4)
    tools.timeout_s = runner.pop("timeout_s", DEADLINE_S)
    tools.begin(1)
    calls = [{"type": "function", "function": {"name": name, "arguments": {}}} for name in names]
    box = Toolbox(sync={name: getattr(space, name) for name in names})
    return [message["content"] for message in asyncio.run(tools.run(calls, box, 0))]


def test_environment_tools_run_in_its_thread() -> None:
    (space,) = spaces(1)
    assert reported(space, "look", "look") == ["2 calls", "3 calls"]
    assert set(space.threads) == {space.threads[0]}


def test_environment_with_hanging_tool_still_gives_reward() -> None:
    release = threading.Event()

    class Stuck(Home):
        def wait(self) -> None:
            """Wait."""
            release.wait()

    (space,) = spaces(1, Stuck)
    assert reported(space, "wait", timeout_s=0.1) == [
        "{'error': 'tool wait has not returned within 0.1 s (tool_timeout)'}"
    ]
    begun = time.monotonic()
    assert space.get_reward() == 2.0
    assert time.monotonic() - begun < DEADLINE_S
    home = home_of(space.wait)
    assert home is not None
    assert home.is_lost
    release.set()
