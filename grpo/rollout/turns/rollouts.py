"""A rank's rollouts: episodes of model and tools side by side, or a function of the user's own."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from trl.trainer.utils import start_event_loop_in_daemon

from grpo.rollout.turns.episode import Episode, EpisodeLimits, Template, run_episode
from grpo.rollout.turns.sampler import Sampler
from grpo.rollout.turns.tools import Toolbox, ToolRunner

OnEnd = Callable[[int, Episode], None]
"""Called with each episode that has ended, and its row."""


class ClosableFunction(Protocol):
    """A rollout function that has threads, as `AgentRollout`."""

    def pending(self) -> str:
        """What it waits for now, in words."""

    def close(self) -> None:
        """End what it has. Safe to call twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRow:
    """One of the rank's rows, before its episode begins."""

    prompt: Callable[[], Awaitable[list[int]]]
    """Its token ids, once its environment is reset."""
    toolbox: Toolbox | None
    """What the episode may call; None where there are no tools."""
    schema: Any
    """See `Template.parse`."""

    @staticmethod
    def of(token_ids: list[int], toolbox: Toolbox | None, schema: Any) -> "EpisodeRow":
        """A row whose prompt is known already."""

        async def prompt() -> list[int]:
            return token_ids

        return EpisodeRow(prompt=prompt, toolbox=toolbox, schema=schema)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The episodes of a rank in a generation batch, begun when training asks for them or before."""

    num_rows: int
    asked: Callable[[], Any]
    """What training asks for when it takes them: prompts, known when they have ended at the latest."""
    start: "Callable[[Sampler, ToolRunner], Future[Any]] | None" = None
    """Begins; they end with the future."""
    func: Callable[[], dict[str, Any]] | None = None
    """In place of that: a rollout function of the user's, in a thread of its own."""
    drop: Callable[[], object] = lambda: None
    """Training will not take them."""


class Rollouts:
    """Has an episode for each of the rank's prompts, all at once.

    Args:
        limits: of each episode.
        tools: runs what the model calls.
        is_function: whether the user's own function holds the episodes.
        prepare: called first in the thread of that function, and in the event loop's.
        rows_of: the rows whose prompts have these token ids, of the batch that is being made.
        planned: episodes of the generation batch with a number, which begin before training asks for them; None,
            on every rank, where training ends before it.
        on_end: gives what `start` takes, of the batch that is being made.
        func: that function, where it names what it waits for (`pending`) and has threads to end (`close`).
        loop: the event loop to have them in, that of asynchronous tools; None: one of their own.
    """

    def __init__(
        self,
        *,
        limits: EpisodeLimits,
        tools: ToolRunner,
        is_function: bool,
        prepare: Callable[[], None],
        template: Template,
        rows_of: Callable[[Sequence[list[int]]], Sequence[EpisodeRow]],
        planned: Callable[[int], Planned | None] = lambda number: None,
        on_end: Callable[[], OnEnd | None] = lambda: None,
        loop: asyncio.AbstractEventLoop | None,
        func: ClosableFunction | None = None,
    ) -> None:
        self.tools = tools
        self.is_function, self.prepare = is_function, prepare
        self._own_loop: asyncio.AbstractEventLoop | None = None
        self.rows_of, self.planned = rows_of, planned
        self._limits, self._template = limits, template
        self.on_end, self._loop, self._func = on_end, loop, func

    def start(
        self, rows: Sequence[EpisodeRow], on_end: OnEnd | None, sampler: Sampler, tools: ToolRunner
    ) -> "Future[list[Episode]]":
        """Begin; the future ends with an episode for each of the rank's rows, or with what one has raised.

        Args:
            on_end: called from the event loop.
            tools: of this batch alone.
        """
        limits = self._limits.under(sampler.sampling)

        async def hold(number: int, row: EpisodeRow) -> Episode:
            try:
                episode = await run_episode(
                    number,
                    await row.prompt(),
                    sampler,
                    limits=limits,
                    template=self._template,
                    tools=tools,
                    toolbox=row.toolbox,
                    schema=row.schema,
                )
            finally:
                tools.turnstile.leave(number)
            if on_end is not None:
                on_end(number, episode)
            return episode

        async def hold_all() -> list[Episode]:
            tasks = [asyncio.ensure_future(hold(number, row)) for number, row in enumerate(rows)]
            try:
                return list(await asyncio.gather(*tasks))
            except (Exception, asyncio.CancelledError):
                for task in tasks:  # the others call no more tools
                    task.cancel()
                raise

        if self._loop is None:
            _, self._loop, ready = start_event_loop_in_daemon("grpo-episodes")
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

    def pending(self, tools: ToolRunner) -> str:
        """What runs now, in words: agents, or tools of a batch."""
        if self._func is not None:
            return self._func.pending()
        running = [*tools.running.values()]
        more = f" and {len(running) - 3} more" if len(running) > 3 else ""
        return ", ".join(running[:3]) + more


def as_trl_takes_them(episodes: Sequence[Episode], decoded: Sequence[Any], tools: Mapping[str, int]) -> tuple[Any, ...]:
    """What TRL's `_tool_call_loop` returns (1.16).

    Args:
        decoded: TRL's own reading of each first turn, for rows that no engine took.
        tools: calls and failures of the batch.
    """
    return (
        [episode.tool_mask for episode in episodes],
        [episode.messages if episode.refusal is None else own for episode, own in zip(episodes, decoded, strict=True)],
        [episode.token_ids for episode in episodes],
        [episode.logprobs for episode in episodes],
        tools.get("calls", 0),
        tools.get("failures", 0),
        [[] for _ in episodes],
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
