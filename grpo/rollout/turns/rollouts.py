"""A rank's multi-turn rollouts: episodes of model and tools in parallel, or a rollout function of the user's."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Protocol

from trl.trainer.utils import start_event_loop_in_daemon

from grpo.rollout.turns.episode import Episode, EpisodeLimits, Template, run_episode
from grpo.rollout.turns.sampler import Sampler
from grpo.rollout.turns.tools import Toolbox, ToolRunner

OnEnd = Callable[[int, Episode], None]
"""Called with each episode that has ended, and its row."""


class ClosableFunction(Protocol):
    """A rollout function with threads, such as `AgentRollout`."""

    def pending(self) -> str:
        """Describe its pending calls."""

    def close(self) -> None:
        """Release its resources. Safe to call twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRow:
    """One of the rank's rows, before its episode."""

    prompt: Callable[[], Awaitable[list[int]]]
    """Returns its token ids, once its environment is reset."""
    toolbox: Toolbox | None
    """Tools of the episode; None without tools."""
    schema: Any
    """See `Template.parse`."""

    @staticmethod
    def of(token_ids: list[int], toolbox: Toolbox | None, schema: Any) -> "EpisodeRow":
        """Make a row with a known prompt."""

        async def prompt() -> list[int]:
            return token_ids

        return EpisodeRow(prompt=prompt, toolbox=toolbox, schema=schema)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A rank's episodes of a generation batch, started on training's request or ahead of it."""

    num_rows: int
    asked: Callable[[], Any]
    """Returns the prompts training will request for them; known at the latest at their end."""
    start: "Callable[[Sampler, ToolRunner], Future[Any]] | None" = None
    """Starts the episodes; returns their future."""
    func: Callable[[], dict[str, Any]] | None = None
    """Alternative to `start`: a rollout function of the user's, for a thread of its own."""
    drop: Callable[[], object] = lambda: None
    """Called if training will not take them."""


@dataclass(eq=False)
class Rollouts:
    """Runs an episode for each of the rank's prompts, all at once."""

    _: KW_ONLY
    limits: EpisodeLimits
    """Limits of each episode."""
    tools: ToolRunner
    """Runs the model's tool calls."""
    is_function: bool
    """The user's own function runs the episodes."""
    prepare: Callable[[], None]
    """Called first in the function's thread, and in the event loop's."""
    template: Template
    rows_of: Callable[[Sequence[list[int]]], Sequence[EpisodeRow]]
    """Returns the rows with these prompt token ids, of the current batch."""
    planned: Callable[[int], Planned | None] = lambda number: None
    """Returns the episodes of the generation batch with a number, to start ahead of training's request; None, on every
    rank, after the end of training."""
    on_end: Callable[[], OnEnd | None] = lambda: None
    """Returns the `on_end` of `start` for the current batch."""
    loop: asyncio.AbstractEventLoop | None
    """Event loop for the episodes, that of asynchronous tools; None: a new one."""
    func: ClosableFunction | None = None
    """The user's function, if it describes its waits (`pending`) and has threads to end (`close`)."""
    _own_loop: asyncio.AbstractEventLoop | None = field(default=None, init=False)

    def start(
        self, rows: Sequence[EpisodeRow], on_end: OnEnd | None, sampler: Sampler, tools: ToolRunner
    ) -> "Future[list[Episode]]":
        """Start the episodes; the future has the result for each of the rank's rows, or the first exception.

        Args:
            on_end: called from the event loop.
            tools: of this batch alone.
        """
        limits = self.limits.under(sampler.sampling)

        async def hold(number: int, row: EpisodeRow) -> Episode:
            try:
                episode = await run_episode(
                    number,
                    await row.prompt(),
                    sampler,
                    limits=limits,
                    template=self.template,
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
                for task in tasks:  # the others must not call more tools
                    task.cancel()
                raise

        if self.loop is None:
            _, self.loop, ready = start_event_loop_in_daemon("grpo-episodes")
            self._own_loop = self.loop
            ready.wait()
        self.loop.call_soon_threadsafe(self.prepare)  # asynchronous tools run in its thread
        return asyncio.run_coroutine_threadsafe(hold_all(), self.loop)

    def close(self) -> None:
        """End the event loop, if it is ours, and release the function's resources. Safe to call twice."""
        if self._own_loop is not None:
            self._own_loop.call_soon_threadsafe(self._own_loop.stop)
            self._own_loop = self.loop = None
        if self.func is not None:
            self.func.close()

    def pending(self, tools: ToolRunner) -> str:
        """Describe the running agents or tools."""
        if self.func is not None:
            return self.func.pending()
        running = [*tools.running.values()]
        more = f" and {len(running) - 3} more" if len(running) > 3 else ""
        return ", ".join(running[:3]) + more


def as_trl_takes_them(episodes: Sequence[Episode], decoded: Sequence[Any], tools: Mapping[str, int]) -> tuple[Any, ...]:
    """Convert episodes to the result of TRL's `_tool_call_loop` (1.16).

    Args:
        decoded: TRL's own decoding of each first turn, for refused rows.
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
    """Fill empty, left-out rows in a rollout function's output: TRL does not accept empty completions."""
    empty = [row for row in left_out if not len(output["completion_ids"][row])]
    fillers: dict[str, list[Any]] = {"completion_ids": token_ids, "logprobs": logprobs, "env_mask": [1]}
    filled = {name: [*output[name]] for name in fillers if empty and output.get(name) is not None}
    for name, values in filled.items():
        for row in empty:
            values[row] = fillers[name]
    return {name: values for name, values in {**output, **filled}.items() if name != "failed"}
