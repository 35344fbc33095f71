"""Episodes of later generation batches: their rows, their tools, and the environments lent to them.

With `generation_lookahead` they run while the main thread trains, and so outside of it: tools are asynchronous or run
in threads, environments live in threads of their own, and rollout functions run in threads as well.
"""

import asyncio
import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from trl.data_utils import prepare_multimodal_messages

from grpo.faults.users_code import own_streams
from grpo.rollout.agents.rollout import AgentBatch, AgentRollout
from grpo.rollout.turns.declared import may_run_in_threads
from grpo.rollout.turns.environments import Home, home_of
from grpo.rollout.turns.episode import Episode
from grpo.rollout.turns.rollouts import EpisodeRow, OnEnd, Planned
from grpo.rollout.turns.sampler import Sampler
from grpo.rollout.turns.tools import Toolbox, ToolRunner
from grpo.seam.ordering import PromptOrder
from grpo.seam.scoring import BatchRewards
from grpo.seam.view import TrainerView


class EpisodesAhead:
    """Planner of the episodes of later batches.

    Args:
        tools: tools of all rows.
        func: the rollout function, or None.
        start: starts the episodes of these rows.
        agent_batch: returns the batch of these prompts and rows for `grpo.agents`.
    """

    def __init__(
        self,
        view: TrainerView,
        order: PromptOrder,
        rewards: BatchRewards,
        *,
        tools: Sequence[Callable[..., Any]],
        func: Callable[..., dict[str, Any]] | None,
        start: "Callable[[Sequence[EpisodeRow], OnEnd | None, Sampler, ToolRunner], Future[list[Episode]]]",
        agent_batch: Callable[[Sequence[Any], Sequence[Any], Sampler], AgentBatch],
    ) -> None:
        self._view, self._order, self._rewards, self._tools, self._func = view, order, rewards, tools, func
        self._start, self._agent_batch = start, agent_batch
        self._lent: dict[int, list[tuple[Any, Any]]] = {}
        """Name and environment of each row, by batch number."""

    def planned(self, number: int) -> Planned | None:
        """Return the planned episodes of generation batch `number`; None if training ends before it.

        Raises:
            ValueError: a row names an environment without a factory.
        """
        if self._func is None and self._view.environment_factories is None:
            if (prompts := self._order.prompts_of_batch(number)) is None:
                return None
            box = toolbox(self._tools) if self._tools else None
            on_end = self._rewards.begin_ahead(number, partial(self._order.rows_of_batch, number))
            return self._of_episodes(
                [EpisodeRow.of(ids, box, self._tools) for ids in prompts],
                on_end,
                lambda: prompts,
                drop=partial(self._rewards.drop_ahead, number),
            )
        if (rows := self._order.rows_of_batch(number)) is None:
            return None
        if self._func is not None:
            return self._of_function(self._func, rows)
        return self._in_environments(number, rows)

    def _of_episodes(
        self, rows: Sequence[EpisodeRow], on_end: OnEnd | None, asked: Callable[[], Any], *, drop: Callable[[], object]
    ) -> Planned:
        return Planned(num_rows=len(rows), start=partial(self._start, rows, on_end), asked=asked, drop=drop)

    def _of_function(self, func: Callable[..., dict[str, Any]], rows: Sequence[Mapping[str, Any]]) -> Planned:
        prompts, trainer = [row["prompt"] for row in rows], self._view.trainer
        batch: dict[str, Any] = {"num_rows": len(rows), "asked": lambda: prompts}
        if not isinstance(func, AgentRollout):
            return Planned(func=lambda: func(prompts, trainer), **batch)
        begin = func.start
        return Planned(start=lambda sampler, tools: begin(self._agent_batch(prompts, rows, sampler)), **batch)

    # -- environments ---------------------------------------------------------------------------------------------

    def _in_environments(self, number: int, rows: Sequence[Mapping[str, Any]]) -> Planned:
        is_named = None not in self._view.environment_factories  # TRL's key of a single factory is None (1.16)
        names = [row.get("environment") if is_named else None for row in rows]
        lent = self._lent[number] = [(name, self._borrow(name)) for name in names]
        for _, environment in lent:
            _home(environment).coming = Future()
        prompts: dict[int, list[int]] = {}

        def of_row(row: int) -> EpisodeRow:
            _, environment = lent[row]
            tools = [*self._tools, *methods(environment)]

            async def prompt() -> list[int]:
                observation = await _reset(environment, rows[row], is_named=is_named)
                messages = rows[row].get("prompt", [{"role": "user", "content": ""}])
                prompts[row] = self._tokens(_with_observation(messages, observation), tools)
                return prompts[row]

            return EpisodeRow(prompt=prompt, toolbox=toolbox(tools), schema=tools)

        return self._of_episodes(
            [of_row(row) for row in range(len(rows))],
            None,  # rewards that read environments need them in the trainer
            lambda: [prompts[row] for row in range(len(rows))],
            drop=partial(self._lent.pop, number, None),
        )

    def lend(self, number: int) -> None:
        """Put the environments of batch `number` first in TRL's pools, which TRL draws from in order."""
        mine: dict[Any, list[Any]] = defaultdict(list)
        for name, environment in self._lent.pop(number, ()):
            mine[name].append(environment)
        for name, environments in mine.items():
            self._view.environment_pool[name][:0] = environments

    def _borrow(self, name: Any) -> Any:
        """Take a free environment from the pool, or make a new one."""
        if (pool := self._view.environment_pool.get(name)) is None:
            known = ", ".join(map(repr, self._view.environment_pool))
            raise ValueError(f"a row has environment {name!r}, which is none of environment_factory: {known}")
        taken = {id(each) for each in self._view.environments or ()}
        free = next((place for place, each in enumerate(pool) if id(each) not in taken), None)
        return self._view.environment_factories[name]() if free is None else pool.pop(free)

    def _tokens(self, prompt: list[dict[str, Any]], tools: Sequence[Callable[..., Any]]) -> list[int]:
        """Tokenize one row's prompt as TRL's `_tokenize_prompts` does (1.16), outside the main thread."""
        processing = self._view.processing_class
        tokenized = processing.apply_chat_template(
            conversation=[prepare_multimodal_messages(prompt) if self._view.has_processor else prompt],
            tools=tools or None,
            chat_template=self._view.chat_template,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            **(self._view.args.chat_template_kwargs or {}),
        )
        return tokenized["input_ids"][0]


def refuse_main_thread_ahead(arguments: Mapping[str, Any]) -> None:
    """Refuse tools, environments and rollout functions that run in the main thread, with `generation_lookahead`.

    Args:
        arguments: the trainer's arguments, by name.

    Raises:
        ValueError: one of them needs the main thread; names the first.
    """
    args = arguments["args"]
    if not args.generation_lookahead:
        return
    factories = arguments["environment_factory"]
    environments = factories.values() if isinstance(factories, Mapping) else [factories] if factories else []
    tools = [tool for tool in arguments["tools"] or () if not inspect.iscoroutinefunction(tool)]
    in_main = [each for each in [*tools, *environments] if not may_run_in_threads(each)]
    what, fix = None, ""
    if args.max_tool_threads is None and in_main:
        what = f"{getattr(in_main[0], '__name__', in_main[0])!r}, which runs in the main thread"
        fix = "write tools as async def, mark tools and environments with grpo.in_threads, set max_tool_threads"
    func = arguments["rollout_func"]
    if func is not None and not isinstance(func, AgentRollout) and not may_run_in_threads(func):
        what = "a rollout_func that is not declared to run in threads"
        fix = "mark it with grpo.in_threads, if it may run in several threads at once, or let it be grpo.agents(...)"
    if what is not None:
        raise ValueError(
            f"generation_lookahead is {args.generation_lookahead} with {what} [GRPO-220]: the main thread trains while "
            f"later batches are sampled; {fix}, or set generation_lookahead to 0"
        )


async def _reset(environment: Any, row: Mapping[str, Any], *, is_named: bool) -> Any:
    """Reset an environment in its own thread. TRL's later `reset` of the same batch returns the same observation."""
    home = _home(environment)
    coming = home.coming
    assert coming is not None, "it was lent"
    columns = {name: value for name, value in row.items() if not (is_named and name == "environment")}

    def reset() -> Any:
        with own_streams("reset of an environment"):
            return environment.reset(**columns)

    try:
        observation = await asyncio.wrap_future(home.run(reset))
    except BaseException as error:
        coming.set_exception(error if isinstance(error, Exception) else RuntimeError("the reset was given up"))
        raise
    coming.set_result(observation)
    return observation


def _home(environment: Any) -> Home:
    home = home_of(environment.reset)
    assert home is not None, "others are refused with generation_lookahead"
    return home


def _with_observation(prompt: list[dict[str, Any]], observation: Any) -> list[dict[str, Any]]:
    """Append the observation to the last message, as TRL does (1.16)."""
    if observation is None:
        return prompt
    content = prompt[-1]["content"]
    if isinstance(observation, list) and isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if isinstance(observation, str) and isinstance(content, list):
        observation = [{"type": "text", "text": observation}]
    return [*prompt[:-1], {**prompt[-1], "content": content + observation}]


def methods(environment: Any) -> list[Callable[..., Any]]:
    """Return an environment's tools, as TRL finds them (1.16)."""
    names = [name for name, _ in inspect.getmembers(type(environment), inspect.isfunction) if not name.startswith("_")]
    return [getattr(environment, name) for name in names if name not in ("reset", "get_reward")]


def toolbox(tools: Sequence[Callable[..., Any]]) -> Toolbox:
    """Return the tools by name, asynchronous ones apart."""
    named = {tool.__name__: tool for tool in tools}
    asynchronous = {name: tool for name, tool in named.items() if inspect.iscoroutinefunction(tool)}
    return Toolbox(sync={name: named[name] for name in named.keys() - asynchronous}, asynchronous=asynchronous)
