"""How long tools and rollouts may take, and how many run at once: fields of `GRPOConfig`, and their checks."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class ConversationConfig:
    """Fields that matter with `tools`, `environment_factory` and `rollout_func`."""

    tool_timeout: float = field(
        default=120.0,
        metadata={
            "help": "Seconds that one call of a tool may take. Then it is left alone and counted, and the model is "
            "told that it failed."
        },
    )
    max_tool_threads: int = field(
        default=64,
        metadata={
            "help": "How many calls of synchronous tools run at a time on a rank, each in a thread: 1 for tools that "
            "cannot be called from several threads."
        },
    )
    max_abandoned_tools: int = field(
        default=16,
        metadata={
            "help": "How many calls of tools may be left alone on a rank because of tool_timeout, over the run; with "
            "more the job ends."
        },
    )
    rollout_timeout: float = field(
        default=3600.0,
        metadata={
            "help": "Seconds that one generation batch may take with tools, a rollout function or a declared reward, "
            "all turns of all conversations together; then the job ends, and its failure says what it waited for."
        },
    )


def check_conversing(args: Any) -> None:
    for name in ("tool_timeout", "rollout_timeout", "max_tool_threads"):
        if getattr(args, name) <= 0:
            raise ValueError(f"{name} is {getattr(args, name)}; it must be above 0")
    if args.max_abandoned_tools < 0:
        raise ValueError(f"max_abandoned_tools is {args.max_abandoned_tools}; it must be 0 or more")
    if args.tool_timeout >= args.rollout_timeout:
        raise ValueError(
            f"tool_timeout is {args.tool_timeout:g} s, but rollout_timeout, all turns of a batch together, is "
            f"{args.rollout_timeout:g} s: raise rollout_timeout, or lower tool_timeout"
        )
