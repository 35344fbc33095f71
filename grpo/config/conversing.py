"""How long tools and rollouts may take, and how many run at once: fields of `GRPOConfig`, and their checks."""

from dataclasses import dataclass
from typing import Any

from grpo.config.documented import documented


@documented
@dataclass
class ConversationConfig:
    """Fields that matter with `tools`, `environment_factory` and `rollout_func`, agents among them."""

    tool_timeout: float = 120.0
    """Seconds that one call of a tool may take. Then it is interrupted in the main thread, or left alone in a thread or
    an event loop, and counted, and the model is told that it failed."""
    max_tool_threads: int | None = None
    """None: synchronous tools and environments run in the main thread, one call at a time in TRL's order, and those
    marked with grpo.in_threads in threads. A number: all calls run in threads, so many at a time on a rank, and each
    environment in one of its own; with 1 all tools in the same thread."""
    max_abandoned_tools: int = 16
    """How many calls of tools may pass tool_timeout on a rank, over the run; with more the job ends."""
    rollout_timeout: float = 3600.0
    """Seconds that one generation batch may take with tools, a rollout function or a declared reward, all turns of all
    conversations together; then the job ends, and its failure says what it waited for."""
    agent_timeout: float | None = None
    """Seconds that an agent (grpo.agents) may take for its row, without those in which the node has no engine. Then it
    is cancelled or ended, and its row is left out. None: half of rollout_timeout."""
    max_agents_at_once: int | None = None
    """How many agents of a rank run at once; None: all of its rows'."""
    max_failed_agents: int = 128
    """How many agents may fail on a rank, over the run: raise, run out of time, or ask for nothing; with more the job
    ends."""
    agent_host: str = "127.0.0.1"
    """The address at which a rank listens for its agents; 0.0.0.0 for agents in containers, which every host that
    reaches this machine can then connect to."""


def check_conversing(args: Any) -> None:
    for name in ("tool_timeout", "rollout_timeout", "max_tool_threads", "agent_timeout", "max_agents_at_once"):
        if getattr(args, name) is not None and getattr(args, name) <= 0:
            raise ValueError(f"{name} is {getattr(args, name)}; it must be above 0")
    for name in ("max_abandoned_tools", "max_failed_agents"):
        if getattr(args, name) < 0:
            raise ValueError(f"{name} is {getattr(args, name)}; it must be 0 or more")
    for name in ("tool_timeout", "agent_timeout"):
        if (getattr(args, name) or 0.0) >= args.rollout_timeout:
            raise ValueError(
                f"{name} is {getattr(args, name):g} s, but rollout_timeout, all turns of a batch together, is "
                f"{args.rollout_timeout:g} s: raise rollout_timeout, or lower {name}"
            )
