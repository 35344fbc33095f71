"""LoRA adapters of an engine: their numbers, their names in requests, and counts of their requests."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from grpo.place.timeouts import USUAL, Timeouts

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM


class EngineAdapters:
    """Adapters held by the workers of an engine. Everything runs in one event loop, the host's.

    For an adapter the workers do not hold, vLLM looks for a folder, and without one its engine ends (0.31). So no
    adapter is dropped while requests use it, and no request names a missing one.
    """

    def __init__(self, engine: "AsyncLLM", timeouts: Timeouts = USUAL) -> None:
        self._engine, self._aborted_s = engine, timeouts.engine_abort_s
        self._held: dict[int, LoRARequest] = {}
        self._newest: LoRARequest | None = None
        self._users: Counter[int] = Counter()
        self._left = asyncio.Event()  # set whenever a request has ended

    @contextlib.contextmanager
    def used(self, number: int | None) -> Iterator["LoRARequest | None"]:
        """Yield the adapter for a request, and count the request as its user.

        Args:
            number: of the adapter. None: the newest, or the base before the first weight sync of an adapter.

        Raises:
            RuntimeError: this engine does not hold it.
        """
        request = self._newest if number is None else self._held.get(number)
        if request is None:
            if number is not None:
                raise RuntimeError(f"adapter {number} is not in this engine, which holds {sorted(self._held)}")
            yield None
            return
        self._users[request.lora_int_id] += 1
        try:
            yield request
        finally:
            self._users[request.lora_int_id] -= 1
            self._left.set()

    async def take(self, number: int, policy_version: str, keep: Collection[int]) -> None:
        """Let the workers hold the adapter from the last weight sync; of the others they keep only those in `keep`.

        An adapter already held is unchanged: a weight sync meant for another engine brings it too. Name and number are
        new with every weight sync: the prefix cache is keyed on the name (vLLM 0.31).

        Raises:
            RuntimeError: requests still use an adapter to be dropped; or the workers have no free slot.
        """
        from vllm.lora.request import LoRARequest

        if number in self._held:
            return
        held, going = self._held, self._held.keys() - {*keep}
        self._held = {each: request for each, request in held.items() if each not in going}
        await self._wait_until_unused(going)
        await self._engine.collective_rpc("grpo_take_adapter", kwargs={"number": number, "keep": sorted(self._held)})
        name = f"policy-v{policy_version}-{number}"
        self._held[number] = LoRARequest(name, number, lora_path=name)  # the workers hold it: the path is never read
        self._newest = self._held[max(self._held)]

    async def end_update(self, policy_version: str) -> None:
        """End a weight sync as vLLM's `finish_weight_update` does, but keep the workers' adapters."""
        await self._engine.collective_rpc("grpo_end_weight_update")
        await self._engine.update_weight_version(policy_version)

    async def _wait_until_unused(self, numbers: Collection[int]) -> None:
        """Wait until no request uses these adapters: the local main has aborted, or is aborting, these requests."""
        try:
            async with asyncio.timeout(self._aborted_s):
                while any(self._users[number] for number in numbers):
                    self._left.clear()
                    await self._left.wait()
        except TimeoutError:
            used = {number: self._users[number] for number in sorted(numbers) if self._users[number]}
            raise RuntimeError(f"adapters are to be dropped while requests use them, by number: {used}") from None
        for number in numbers:
            del self._users[number]
