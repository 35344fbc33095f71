"""Which adapter an engine samples a request with, and how long it holds one."""

import asyncio
from typing import Any

import pytest

from grpo.engine.adapters import EngineAdapters
from grpo.place.timeouts import Timeouts


class Engine:
    """Writes down what its workers are asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.version = ""

    async def collective_rpc(self, method: str, kwargs: dict[str, Any] | None = None) -> None:
        self.asked.append((method, kwargs))

    async def update_weight_version(self, version: str) -> None:
        self.version = version


def name_of(held: EngineAdapters, number: int | None) -> str | None:
    with held.used(number) as request:
        return None if request is None else request.lora_name


def test_engine_adapters_serve_adapter_named_by_request() -> None:
    engine = Engine()

    async def take() -> None:
        held = EngineAdapters(engine)  # type: ignore[arg-type]
        assert name_of(held, None) is None
        await held.take(1, "0", [])
        await held.take(2, "1", [1])
        assert [name_of(held, number) for number in (1, 2, None)] == ["policy-v0-1", "policy-v1-2", "policy-v1-2"]
        await held.take(3, "2", [2])
        with pytest.raises(RuntimeError, match=r"adapter 1 is not in this engine, which holds \[2, 3\]"):
            name_of(held, 1)

    asyncio.run(take())
    assert engine.asked[-1] == ("grpo_take_adapter", {"number": 3, "keep": [2]})


def test_take_of_older_adapter_keeps_newest_and_skips_present_one() -> None:
    """An engine that has come back gets them all; the others of its node have them."""
    engine = Engine()

    async def take() -> None:
        held = EngineAdapters(engine)  # type: ignore[arg-type]
        await held.take(5, "4", [])
        await held.take(3, "2", [5])
        assert name_of(held, None) == "policy-v4-5"
        num_asked = len(engine.asked)
        await held.take(3, "2", [5])
        assert len(engine.asked) == num_asked

    asyncio.run(take())


def test_take_of_adapter_waits_for_requests_of_dropped_one() -> None:
    """vLLM's engine would end. Its abort may be on its way."""

    async def take() -> None:
        held = EngineAdapters(Engine(), Timeouts(engine_abort_s=0.1))  # type: ignore[arg-type]
        await held.take(1, "0", [])
        with held.used(1), pytest.raises(RuntimeError, match="while requests use them"):
            await held.take(2, "1", [])
        held = EngineAdapters(Engine())  # type: ignore[arg-type]
        await held.take(3, "1", [1])
        using = held.used(3)
        using.__enter__()
        taking = asyncio.create_task(held.take(4, "2", []))
        await asyncio.sleep(0)
        assert not taking.done()
        using.__exit__(None, None, None)
        await taking

    asyncio.run(take())


def test_end_update_calls_grpo_end_and_sets_version() -> None:
    engine = Engine()
    asyncio.run(EngineAdapters(engine).end_update("7"))  # type: ignore[arg-type]
    assert (engine.asked, engine.version) == ([("grpo_end_weight_update", None)], "7")
