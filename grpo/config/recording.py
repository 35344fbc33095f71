"""What a run leaves to look at: fields of `GRPOConfig`, and their checks."""

import os
import re
from dataclasses import dataclass
from typing import Any

from transformers.training_args import trainer_log_levels

from grpo.config.documented import documented
from grpo.place.launch import read_launch


@documented
@dataclass
class RecordingConfig:
    """Fields that say what is recorded of a run, beside metrics and timelines."""

    log_completions_prompts: int = 8
    """For how many prompts of a log step all completions are kept, with rewards, advantages and where they were
    sampled, in completions/ of the output folder (200 MB at most). 0: for none."""
    usage_interval_s: float = 5.0
    """Seconds between two looks at what GPUs, memory and processes of each node are used for; 0: nobody looks."""
    profile_steps: str | None = None
    """Optimizer steps, counted from 1, in which torch's profiler runs: '10-12', or '10'. Writes Chrome traces to
    profile/ of the output folder, and logs the shares of computation and communication."""
    profile_ranks: str = "0"
    """Ranks on which it runs: '0', '0,7,14' or 'all'."""


def check_recording(args: Any) -> None:
    for name in ("log_completions_prompts", "usage_interval_s"):
        if not getattr(args, name) >= 0:
            raise ValueError(f"{name} is {getattr(args, name)}; it must be 0 or more")
    if profiled_steps(args.profile_steps):
        profiled_ranks(args.profile_ranks, args.world_size)


def profiled_steps(text: str | None) -> range:
    """`profile_steps`, counted from 1; none for None. Raises ValueError."""
    if text is None:
        return range(0)
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", str(text).strip())
    first = int(found[1]) if found else 0
    last = int(found[2] or first) if found else 0
    if not 1 <= first <= last:
        raise ValueError(f"profile_steps is {text!r}; say '10-12', or '10': steps are counted from 1")
    return range(first, last + 1)


def profiled_ranks(text: str, world_size: int) -> set[int]:
    """`profile_ranks`. Raises ValueError."""
    if text == "all":
        return {*range(world_size)}
    found = {int(word) if word.strip().isdigit() else -1 for word in str(text).split(",")}
    if not found <= {*range(world_size)}:
        raise ValueError(f"profile_ranks is {text!r}; say 'all' or numbers from 0 to {world_size - 1}, as in '0,1'")
    return found


def own_log_level(args: Any) -> int | None:
    """The level that transformers' `log_level`, on other ranks `log_level_replica`, sets for this rank; None where
    it is as transformers has it."""
    launch = read_launch(os.environ)
    is_main = (launch.local_rank if args.log_on_each_node else launch.rank) == 0
    name, default = (args.log_level, "passive") if is_main else (args.log_level_replica, "warning")
    return None if name in (default, "passive") else trainer_log_levels[name]
