"""A rank's rollouts: conversations of model and tools side by side, or a function of the user's own."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from trl.trainer.utils import start_event_loop_in_daemon

from grpo.rollout.turns.sampler import Sampler
from grpo.rollout.turns.talk import Talk, TalkLimits, Template, hold_talk
from grpo.rollout.turns.tools import Toolbox, ToolRunner


class ClosableFunction(Protocol):
    """A rollout function that has threads, as `AgentRollout`."""

    def pending(self) -> str:
        """What it waits for now, in words."""

    def close(self) -> None:
        """End what it has. Safe to call twice."""


class Rollouts:
    """Has a conversation for each of the rank's prompts, all at once.

    Args:
        limits: of each conversation.
        tools: runs what the model calls.
        is_function: whether the user's own function holds the conversations.
        prepare: called first in the thread of that function, and in the event loop's.
        toolbox_of: what the conversation of a row may call; None where there are no tools.
        on_end: hears of each conversation that has ended, by its row, from the event loop.
        func: that function, where it names what it waits for (`pending`) and has threads to end (`close`).
        loop: the event loop to have them in, that of asynchronous tools; None: one of their own.
    """

    def __init__(
        self,
        *,
        limits: TalkLimits,
        tools: ToolRunner,
        is_function: bool,
        prepare: Callable[[], None],
        template: Template,
        toolbox_of: Callable[[int], Toolbox | None],
        on_end: Callable[[int, Talk], None] | None,
        loop: asyncio.AbstractEventLoop | None,
        func: ClosableFunction | None = None,
    ) -> None:
        self.tools = tools
        self.is_function, self.prepare = is_function, prepare
        self._own_loop: asyncio.AbstractEventLoop | None = None
        self._limits, self._template, self._toolbox_of = limits, template, toolbox_of
        self._on_end, self._loop, self._func = on_end, loop, func

    def start(self, prompts: Sequence[list[int]], sampler: Sampler) -> "Future[list[Talk]]":
        """Begin; the future ends with a conversation for each prompt, or with what one has raised.

        Args:
            prompts: token ids, in the order of the rank's rows.
        """
        turnstile, limits = self.tools.begin(len(prompts)), self._limits.under(sampler.sampling)

        async def hold(row: int, prompt: list[int]) -> Talk:
            try:
                talk = await hold_talk(
                    row,
                    prompt,
                    sampler,
                    limits=limits,
                    template=self._template,
                    tools=self.tools,
                    toolbox=self._toolbox_of(row),
                )
            finally:
                turnstile.leave(row)
            if self._on_end is not None:
                self._on_end(row, talk)
            return talk

        async def hold_all() -> list[Talk]:
            tasks = [asyncio.ensure_future(hold(row, prompt)) for row, prompt in enumerate(prompts)]
            try:
                return list(await asyncio.gather(*tasks))
            except (Exception, asyncio.CancelledError):
                for task in tasks:  # the others call no more tools
                    task.cancel()
                raise

        if self._loop is None:
            _, self._loop, ready = start_event_loop_in_daemon("grpo-conversations")
            self._own_loop = self._loop
            ready.wait()
        self._loop.call_soon_threadsafe(self.prepare)  # asynchronous tools run in its thread
        return asyncio.run_coroutine_threadsafe(hold_all(), self._loop)

    def close(self) -> None:
        """End the event loop, if it is one of ours, and what the function has. Safe to call twice."""
        if self._own_loop is not None:
            self._own_loop.call_soon_threadsafe(self._own_loop.stop)
            self._own_loop = self._loop = None
        if self._func is not None:
            self._func.close()

    def pending(self) -> str:
        """What runs now, in words: agents, or tools."""
        if self._func is not None:
            return self._func.pending()
        running = [*self.tools.running.values()]
        more = f" and {len(running) - 3} more" if len(running) > 3 else ""
        return ", ".join(running[:3]) + more


def as_trl_takes_them(talks: Sequence[Talk], decoded: Sequence[Any], tools: dict[str, int]) -> tuple[Any, ...]:
    """What TRL's `_tool_call_loop` returns (1.16).

    Args:
        decoded: TRL's own reading of each first turn, for rows that no engine took.
        tools: calls and failures of the batch.
    """
    return (
        [talk.tool_mask for talk in talks],
        [talk.messages if talk.refusal is None else own for talk, own in zip(talks, decoded, strict=True)],
        [talk.token_ids for talk in talks],
        [talk.logprobs for talk in talks],
        tools.get("calls", 0),
        tools.get("failures", 0),
        [[] for _ in talks],
    )


def without_empty(
    output: dict[str, Any], left_out: Sequence[int], token_ids: list[int], logprobs: list[float]
) -> dict[str, Any]:
    """What a rollout function gives, with something for rows that are left out, and it has nothing of: TRL takes no
    empty completion."""
    empty = [row for row in left_out if not len(output["completion_ids"][row])]
    fillers: dict[str, list[Any]] = {"completion_ids": token_ids, "logprobs": logprobs, "env_mask": [1]}
    filled = {name: [*output[name]] for name in fillers if empty and output.get(name) is not None}
    for name, values in filled.items():
        for row in empty:
            values[row] = fillers[name]
    return {name: values for name, values in {**output, **filled}.items() if name != "failed"}
