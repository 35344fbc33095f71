"""A rollout function with agents as rows: each agent controls its own loop; the chain of its last answer is trained
on."""

import asyncio
import inspect
import shlex
import shutil
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trl.trainer.utils import start_event_loop_in_daemon

from grpo.faults.users_code import Worker, surviving
from grpo.model.messages import MessageTemplate
from grpo.rollout.agents.command import AgentFailed, AgentProcess
from grpo.rollout.agents.door import Door, DoorServer
from grpo.rollout.agents.episode import AgentEpisode, Chain
from grpo.rollout.turns.episode import EpisodeLimits
from grpo.rollout.turns.sampler import BatchOver, Sampler

Row = Mapping[str, Any]
Agent = Callable[[Door, Row], Coroutine[Any, Any, Mapping[str, Any] | None]]
POLL_S = 0.2
GRACE_S = 5.0  # from an agent's cancellation until it is abandoned


class TooManyFailed(RuntimeError):
    """More agents have failed than the user allows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentBatch:
    """Inputs of a rank's agents for one batch; made by `GRPOTrainer.agent_batch`."""

    rows: Sequence[Row]
    """One row per completion, with all columns of the data set."""
    is_chat: bool
    """True if the data set's prompts are messages; rewards then receive messages."""
    sampler: Sampler
    template: MessageTemplate
    limits: EpisodeLimits
    """Limits of each chain."""
    timeout_s: float
    """Time limit of an agent, without the restart of engines."""
    max_at_once: int | None
    max_failed: int
    """Failed agents allowed over the whole run."""
    host: str
    log: Path
    """Log file for the standard error of commands."""
    covers: Callable[[Path, int], None]
    uncovers: Callable[[Path], None]
    """See `AgentProcess`."""
    say: Callable[[str], None]
    prepare: Callable[[], None]
    """Called first in each thread."""
    end_token: int


@dataclass(slots=True, kw_only=True)
class _AgentOutcome:
    """Result of an agent."""

    episode: AgentEpisode
    columns: Mapping[str, Any]
    failure: str | None
    chain: Chain | None
    """Chain of its last answer."""


def agents(agent: Agent | str | Sequence[str]) -> "AgentRollout":
    """Make a `rollout_func` in which your agent, unchanged, queries the node's engines by OpenAI's protocol.

        async def agent(door, row):
            client = AsyncOpenAI(base_url=door.url, api_key=door.key)
            answer = await client.chat.completions.create(model=door.model, messages=row["prompt"])
            return {"solved": float(answer.choices[0].message.content == row["answer"])}

        trainer = GRPOTrainer(..., rollout_func=grpo.agents(agent))

    Args:
        agent: a coroutine function of a `Door` and a row of the data set, a mapping of its columns. It returns extra
            columns for the reward functions, or None. Or a command, run once per row: it finds the endpoint in
            `OPENAI_BASE_URL`, `OPENAI_API_KEY` and `OPENAI_MODEL`, the row as JSON on its standard input, and writes
            its columns as a JSON object in its last line.

    Returns:
        For `GRPOTrainer` in local mode: `rollout_func=agents(...)`. One object for one trainer.

    Raises:
        TypeError: it is no coroutine function; run blocking code by `await asyncio.to_thread(...)`.
        ValueError: there is no such command.

    Token ids are recorded; text is never tokenised again. See docs/agents.md and
    https://platform.openai.com/docs/api-reference/chat.
    """
    return AgentRollout(agent)


class AgentRollout:
    """Rollout function made by `agents`."""

    speaks_in_messages = True
    """Needs a chat template."""

    def __init__(self, agent: Agent | str | Sequence[str]) -> None:
        self._argv: list[str] | None = None
        if isinstance(agent, str) or not callable(agent):
            self._argv = shlex.split(agent) if isinstance(agent, str) else [*agent]
            if not self._argv or shutil.which(self._argv[0]) is None:
                raise ValueError(f"agent is {agent!r}: there is no such command; write one such as 'python agent.py'")
        elif not _is_async(agent):
            raise TypeError(
                f"agent is {getattr(agent, '__name__', agent)!r}, which is no coroutine function: write `async def "
                "agent(door, row)`, and run code that blocks by `await asyncio.to_thread(...)`"
            )
        self._agent = agent
        self._server: DoorServer | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._renderer: Worker | None = None
        self._running: set[tuple[int, int]] = set()  # (id of the batch, row) of running agents
        self._num_failed = 0
        self._first_failure = ""
        self._known_kinds: set[str] = set()

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        """Run the agents; called by TRL as a rollout function. Returns lists with one entry per prompt: `prompt_ids`,
        `completion_ids`, `logprobs`, `env_mask`, `completions`, `failed`, and each column returned by an agent.

        Raises:
            TypeError: the trainer is not `grpo.GRPOTrainer`.
            TooManyFailed: more agents than `max_failed_agents` have failed on this rank.
        """
        if not hasattr(trainer, "agent_batch"):
            raise TypeError(f"grpo.agents is for grpo.GRPOTrainer, and this is {type(trainer).__name__}")
        batch: AgentBatch = trainer.agent_batch(prompts)
        future = self.start(batch)
        while wait([future], POLL_S).not_done:
            if batch.sampler.is_over:
                future.cancel()
                raise BatchOver("the batch that these agents belong to is over")
        return future.result()

    def start(self, batch: AgentBatch) -> "Future[dict[str, Any]]":
        """Start the agents; the future has the result of `__call__`. Several batches may run at once."""
        if self._server is None or self._loop is None:
            self._renderer = Worker("grpo-templates", batch.prepare)
            self._server = DoorServer(batch.host, batch.say)
            _, self._loop, ready = start_event_loop_in_daemon("grpo-agents")
            ready.wait()
            self._loop.call_soon_threadsafe(batch.prepare)
        return asyncio.run_coroutine_threadsafe(self._run_all(batch), self._loop)

    def close(self) -> None:
        """Close the server and the threads. Safe to call twice; another batch starts them again."""
        if self._server is not None:
            self._server.close()
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._server = self._loop = self._renderer = None

    def pending(self) -> str:
        """Describe the running agents."""
        rows = sorted({row for _, row in self._running})
        if not rows:
            return ""
        more = f" and {len(rows) - 8} more" if len(rows) > 8 else ""
        return f"the agents of rows {', '.join(map(str, rows[:8]))}{more}"

    # -- one batch ------------------------------------------------------------------------------------------------

    async def _run_all(self, batch: AgentBatch) -> dict[str, Any]:
        places = asyncio.Semaphore(batch.max_at_once or len(batch.rows) or 1)
        tasks = [asyncio.ensure_future(self._run(row, batch, places)) for row in range(len(batch.rows))]
        try:
            outcomes = list(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
            raise
        self._count(outcomes, batch)
        return _as_trl_takes_them(outcomes, batch)

    async def _run(self, row: int, batch: AgentBatch, places: asyncio.Semaphore) -> _AgentOutcome:
        assert self._server is not None
        assert self._renderer is not None
        renderer = self._renderer
        episode = AgentEpisode(
            row,
            sampler=batch.sampler,
            template=batch.template,
            limits=batch.limits,
            render=lambda call: asyncio.wrap_future(renderer.run(call)),
        )
        async with places:
            ticket, door = self._server.admit(episode)
            self._running.add((id(batch), row))
            columns: Mapping[str, Any] = {}
            failure = None
            try:
                columns = await self._bounded(self._started(door, batch.rows[row], batch), batch)
            except Exception as error:
                if batch.sampler.is_over:
                    raise
                failure = f"{type(error).__name__}: {error}"
            finally:
                self._running.discard((id(batch), row))
                self._server.dismiss(ticket)
            return _AgentOutcome(episode=episode, columns=columns, failure=failure, chain=episode.chosen())

    async def _started(self, door: Door, row: Row, batch: AgentBatch) -> Mapping[str, Any]:
        if self._argv is None:
            assert callable(self._agent)
            columns = await surviving(self._agent(door, {**row}))
        else:
            process = AgentProcess(self._argv, door, row, batch.log, batch.covers, batch.uncovers)
            try:
                columns = await asyncio.wrap_future(process.start())
            except asyncio.CancelledError:
                process.end()
                raise
        if columns is None:
            return {}
        if not isinstance(columns, Mapping):
            raise TypeError(f"it returned {type(columns).__name__}: an agent returns a dict of columns, or None")
        if reserved := columns.keys() & RESERVED:
            raise ValueError(f"it returned a column {min(reserved)!r}, which is the trainer's own: choose another name")
        return columns

    async def _bounded(self, started: Coroutine[Any, Any, Mapping[str, Any]], batch: AgentBatch) -> Mapping[str, Any]:
        """Await an agent within its time limit, which excludes time without engines."""
        task = asyncio.ensure_future(started)
        used_s, seen = 0.0, time.monotonic()
        try:
            while not task.done():
                await asyncio.wait([task], timeout=min(POLL_S, batch.timeout_s))
                now = time.monotonic()
                used_s += 0.0 if batch.sampler.is_stalled else now - seen
                seen = now
                if used_s > batch.timeout_s and not task.done():
                    raise TimeoutError(f"it has not ended after {batch.timeout_s:g} s (agent_timeout)")
            if task.cancelled():  # by the agent itself, which must not end the batch
                raise AgentFailed("it was cancelled from inside")
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait([task], timeout=GRACE_S)  # one that ignores it is abandoned

    def _count(self, outcomes: Sequence[_AgentOutcome], batch: AgentBatch) -> None:
        """Count metrics of the batch, and mark rows left out."""
        counts = batch.sampler.counts
        counts["agent_episodes"] += len(outcomes)
        for row, outcome in enumerate(outcomes):
            episode = outcome.episode
            counts["agent_requests"] += episode.num_requests
            counts["agent_dropped_tokens"] += episode.num_dropped()
            if outcome.chain is None and episode.refusal is not None:
                batch.sampler.refused[row] = episode.refusal
                outcome.failure = None
                continue
            if outcome.failure is None and outcome.chain is None:
                outcome.failure = "it ended without having asked for anything"
            if outcome.failure is None:
                continue
            self._num_failed += 1
            failure = f"the agent of row {row} failed: {outcome.failure}"
            self._first_failure = self._first_failure or failure
            if self._num_failed > batch.max_failed:
                raise TooManyFailed(
                    f"more than {batch.max_failed} agents have failed on this rank (max_failed_agents) [GRPO-619]; the "
                    f"first one: {self._first_failure}"
                )
            kind = outcome.failure.partition(":")[0]
            if kind not in self._known_kinds:  # each kind once: the metric counts them
                self._known_kinds.add(kind)
                batch.say(f"WARNING: {failure}; its row is left out, as others are that fail (agents/failed)")


RESERVED = frozenset({"prompt", "prompt_ids", "completion_ids", "completions", "logprobs", "env_mask", "failed"})
"""Columns an agent cannot return."""


def _is_async(agent: Any) -> bool:
    return inspect.iscoroutinefunction(agent) or inspect.iscoroutinefunction(getattr(agent, "__call__", None))  # noqa: B004


def _as_trl_takes_them(outcomes: Sequence[_AgentOutcome], batch: AgentBatch) -> dict[str, Any]:
    """Convert results for TRL; see `AgentRollout.__call__`."""
    nothing = [batch.end_token]  # for rows without a prompt
    chains = [outcome.chain if outcome.failure is None else None for outcome in outcomes]
    names = dict.fromkeys(name for outcome in outcomes for name in outcome.columns)
    output: dict[str, Any] = {name: [outcome.columns.get(name) for outcome in outcomes] for name in names}
    output |= {
        "prompt_ids": [nothing if chain is None else chain.prompt for chain in chains],
        "completion_ids": [[] if chain is None else chain.episode.token_ids for chain in chains],
        "logprobs": [[] if chain is None else chain.episode.logprobs for chain in chains],
        "env_mask": [[] if chain is None else chain.episode.tool_mask for chain in chains],
        "failed": [outcome.failure for outcome in outcomes],
    }
    if batch.is_chat:
        output["completions"] = [None if chain is None else chain.episode.messages or None for chain in chains]
    return output
