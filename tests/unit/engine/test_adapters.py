"""Which adapter an engine samples a request with."""

import asyncio
from typing import Any

import pytest

from grpo.engine.adapters import HeldAdapters


class Engine:
    """Writes down what its workers are asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.version = ""

    async def collective_rpc(self, method: str, kwargs: dict[str, Any] | None = None) -> None:
        self.asked.append((method, kwargs))

    async def update_weight_version(self, version: str) -> None:
        self.version = version


def take(held: HeldAdapters, number: int, *kept: int, is_newest: bool = True) -> None:
    asyncio.run(held.take(number, f"{number - 1}", kept, is_newest=is_newest))


def test_a_request_is_sampled_by_the_adapter_that_it_names() -> None:
    engine = Engine()
    held = HeldAdapters(engine)  # type: ignore[arg-type]
    assert held.of(None) is None
    take(held, 1)
    take(held, 2, 1)
    assert [held.of(number).lora_name for number in (1, 2, None)] == ["policy-v0-1", "policy-v1-2", "policy-v1-2"]  # type: ignore[union-attr]
    assert engine.asked[-1] == ("grpo_take_adapter", {"number": 2, "kept": [1]})


def test_one_that_is_no_longer_held_is_no_folder_to_look_for() -> None:
    held = HeldAdapters(Engine())  # type: ignore[arg-type]
    take(held, 1)
    take(held, 2)
    with pytest.raises(RuntimeError, match=r"adapter 1 is not in this engine, which holds \[2\]"):
        held.of(1)


def test_an_older_one_that_comes_again_is_not_the_newest() -> None:
    """To an engine that has come back."""
    held = HeldAdapters(Engine())  # type: ignore[arg-type]
    take(held, 5)
    take(held, 3, 5, is_newest=False)
    assert held.newest is held.of(5)
    assert held.of(3) is not None


def test_an_update_of_adapters_alone_ends_in_a_way_of_its_own() -> None:
    engine = Engine()
    asyncio.run(HeldAdapters(engine).finish("7"))  # type: ignore[arg-type]
    assert (engine.asked, engine.version) == ([("grpo_finish_adapters", None)], "7")
