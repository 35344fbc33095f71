"""The adapters that an engine holds, and by which of them a request is sampled; in the engine's host."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM


class HeldAdapters:
    """What the workers hold, as requests ask for it.

    A name and a number are new with every push: vLLM's prefix cache is keyed on the first (0.31).
    """

    def __init__(self, engine: "AsyncLLM") -> None:
        self.newest: LoRARequest | None = None
        """Of the last push that has brought one."""
        self._engine = engine
        self._held: dict[int, LoRARequest] = {}

    def of(self, number: int | None) -> "LoRARequest | None":
        """The adapter with this number; None: the newest, if there is any.

        Raises:
            RuntimeError: it is not here. vLLM's engine would look for its folder, and end.
        """
        if number is None:
            return self.newest
        if number not in self._held:
            raise RuntimeError(f"adapter {number} is not in this engine, which holds {sorted(self._held)}")
        return self._held[number]

    async def finish(self, policy_version: str) -> None:
        """The end of a push of adapters alone, which leaves those alone that are in use."""
        await self._engine.collective_rpc("grpo_finish_adapters")
        await self._engine.update_weight_version(policy_version)

    async def take(self, number: int, policy_version: str, kept: Sequence[int] = (), *, is_newest: bool = True) -> None:
        """Let the workers hold the adapter that the last push has brought, and of others those that are `kept`."""
        from vllm.lora.request import LoRARequest

        await self._engine.collective_rpc("grpo_take_adapter", kwargs={"number": number, "kept": [*kept]})
        name = f"policy-v{policy_version}-{number}"
        request = LoRARequest(name, number, lora_path=name)  # nobody reads the path: the workers hold the adapter
        self._held = {**{each: held for each, held in self._held.items() if each in kept}, number: request}
        if is_newest:
            self.newest = request
