"""Options by subject, combined by `GRPOConfig`: recording, multi-turn rollouts, evaluation, groups; and their
checks."""

import math
import os
import re
from dataclasses import dataclass
from typing import Any

from transformers.training_args import trainer_log_levels

from grpo.config.documented import documented
from grpo.place.launch import either, multiples_around, read_launch
from grpo.place.spelling import did_you_mean


@documented
@dataclass
class RecordingConfig:
    """Options for recordings of a run, beside metrics and timelines."""

    log_completions_prompts: int = 8
    """For how many prompts of a log step all completions are kept, with rewards, advantages and where they were
    sampled, in completions/ of the output folder (200 MB at most). 0: for none."""
    usage_interval_s: float = 5.0
    """Seconds between two samples of what each node's GPUs, memory and processes are used for; 0 disables
    it."""
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
    """Parse `profile_steps`, counted from 1; an empty range for None. Raises ValueError."""
    if text is None:
        return range(0)
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", str(text).strip())
    first = int(found[1]) if found else 0
    last = int(found[2] or first) if found else 0
    if not 1 <= first <= last:
        raise ValueError(f"profile_steps is {text!r}; say '10-12', or '10': steps are counted from 1")
    return range(first, last + 1)


def profiled_ranks(text: str, world_size: int) -> set[int]:
    """Parse `profile_ranks`. Raises ValueError."""
    if text == "all":
        return {*range(world_size)}
    found = {int(word) if word.strip().isdigit() else -1 for word in str(text).split(",")}
    if not found <= {*range(world_size)}:
        raise ValueError(f"profile_ranks is {text!r}; say 'all' or numbers from 0 to {world_size - 1}, as in '0,1'")
    return found


def own_log_level(args: Any) -> int | None:
    """Level for this rank by transformers' `log_level`, or `log_level_replica` on other ranks; None if at the
    default."""
    launch = read_launch(os.environ)
    is_main = (launch.local_rank if args.log_on_each_node else launch.rank) == 0
    name, default = (args.log_level, "passive") if is_main else (args.log_level_replica, "warning")
    return None if name in (default, "passive") else trainer_log_levels[name]


@documented
@dataclass
class MultiTurnConfig:
    """Options for `tools`, `environment_factory` and `rollout_func`, agents included."""

    tool_timeout: float = 120.0
    """Seconds that one call of a tool may take. Then it is interrupted in the main thread, or abandoned in a thread or
    an event loop, and counted, and the model receives an error."""
    max_tool_threads: int | None = None
    """None: synchronous tools and environments run in the main thread, one call at a time in TRL's order, and those
    marked with grpo.in_threads in threads. A number: all calls run in threads, so many at a time on a rank, and each
    environment in one of its own; with 1 all tools in the same thread."""
    max_abandoned_tools: int = 16
    """How many calls of tools may pass tool_timeout on a rank, over the run; with more the job ends."""
    rollout_timeout: float = 3600.0
    """Seconds that one generation batch may take with tools, a rollout function or a reward marked with scores_each,
    all turns of all episodes together; then the job ends, and its failure says what it waited for."""
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


def check_multi_turn(args: Any) -> None:
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


_OF_A_SET = {"temperature": "temperature", "top_p": "top_p", "max_completion_length": "max_tokens"}
"""Settings allowed per evaluation set, and vLLM's names for them."""


@documented
@dataclass
class EvaluationConfig:
    """Options of evaluation, beside transformers' `eval_strategy`, `eval_steps` and TRL's `num_generations_eval`."""

    eval_temperature: float | None = None
    """Temperature of evaluation; 0 is greedy. None: temperature."""
    eval_top_p: float | None = None
    """top_p of evaluation. None: top_p."""
    eval_max_completion_length: int | None = None
    """Tokens of a completion in evaluation, at most; all turns together where there are tools. None:
    max_completion_length."""
    eval_sets: dict[str, Any] | str | None = None
    """Of evaluation sets by name (eval_dataset is a dict then), what they have of their own, of temperature, top_p and
    max_completion_length (a JSON object on the command line), for example '{"math": {"temperature": 0}}'."""
    eval_pass_at: list[int] | None = None
    """Which k of eval_pass@k are logged, each at most num_generations_eval. None: 1, 2, 4, 8, ... up to it."""
    eval_pass_reward: float | None = None
    """Reward from which on a completion counts as right in eval_pass@k. None: rewards count as they are, and
    eval_pass@k is the best of k in the mean, which is the same for rewards of 0 and 1."""


def check_evaluating(args: Any) -> None:
    """Check the options of evaluation. Raises ValueError with the value and the valid ones."""
    of_sets = args.eval_sets or {}
    if not isinstance(of_sets, dict) or not all(isinstance(own, dict) for own in of_sets.values()):
        raise ValueError(
            f"eval_sets is {of_sets!r}; it is an object by set, as in {{'math': {{'temperature': 0}}}}, of "
            f"{', '.join(_OF_A_SET)}"
        )
    for name, own in of_sets.items():
        for key, value in own.items():
            if key not in _OF_A_SET:
                raise ValueError(
                    f"eval_sets has {key!r} for {name!r}{did_you_mean(key, _OF_A_SET)}: a set has "
                    f"{', '.join(_OF_A_SET)} of its own"
                )
            _check(f"eval_sets {name}.{key}", key, value, args)
    for key in _OF_A_SET:
        _check(f"eval_{key}", key, getattr(args, f"eval_{key}"), args)
    num_generations = args.num_generations_eval or args.num_generations
    wrong = [k for k in args.eval_pass_at or [] if not 1 <= k <= num_generations]
    if wrong:
        raise ValueError(
            f"eval_pass_at has {', '.join(map(str, wrong))}; each is at least 1, and at most the completions of a "
            f"prompt, num_generations_eval, of which there are {num_generations}"
        )


def _check(name: str, key: str, value: Any, args: Any) -> None:
    if value is None:
        return
    if key == "max_completion_length":
        limit = args.vllm_max_model_length
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value!r}; it is a number of tokens, 1 or more")
        if limit is not None and value >= limit:
            raise ValueError(
                f"{name} is {value}, but an engine holds {limit} tokens of prompt and completion together: lower it, "
                f"or raise vllm_max_model_length"
            )
    elif not isinstance(value, int | float) or not (value >= 0 if key == "temperature" else 0 < value <= 1):
        raise ValueError(f"{name} is {value!r}; it is {'0 or more' if key == 'temperature' else 'in (0, 1]'}")


def evaluation_sampling(args: Any, of_set: str | None) -> dict[str, Any]:
    """Return vLLM's sampling arguments of evaluation where they differ from training's.

    Args:
        of_set: the set's name; None for a single set without a name.
    """
    own = {key: value for key in _OF_A_SET if (value := getattr(args, f"eval_{key}")) is not None}
    own |= (args.eval_sets or {}).get(of_set, {})
    return {_OF_A_SET[key]: value for key, value in own.items()}


def passes_at(args: Any) -> list[int]:
    """Values of k for `eval_pass@k`, ascending."""
    num_generations = args.num_generations_eval or args.num_generations
    if args.eval_pass_at is not None:
        return sorted(set(args.eval_pass_at))
    return [2**power for power in range(num_generations.bit_length())]


@documented
@dataclass
class GroupConfig:
    """Options for groups whose completions all have the same reward, and so no advantage."""

    spare_groups: int = 0
    """Groups that each generation batch samples beyond those that it trains on. Trained are the first ones, in the
    order of the data, whose completions have different rewards; if they are too few, others fill the batch. 0: all
    groups that are sampled are trained on."""
    max_flat_batches: int = 50
    """With spare_groups: how many generation batches in a row may have no group with different rewards; then the job
    ends, as nothing is learnt any more. 0: any number."""


def check_groups(args: Any) -> None:
    """Check the options of groups. Raises ValueError with the value and the valid ones."""
    for name in ("spare_groups", "max_flat_batches"):
        value = getattr(args, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(f"{name} is {value!r}; it is a whole number, 0 or more")
    if not args.spare_groups:
        return
    unit = args.num_ranks // math.gcd(args.num_ranks, args.num_generations)
    if args.spare_groups % unit:
        near = either([count for count in multiples_around(args.spare_groups, unit) if count])
        raise ValueError(
            f"spare_groups is {args.spare_groups}, whose {args.spare_groups * args.num_generations} completions "
            f"{args.num_ranks} ranks cannot share evenly: set it to {near}"
        )
    for name in ("split_batches", "dispatch_batches"):
        if getattr(args.accelerator_config, name):
            raise ValueError(
                f"accelerator_config has {name}, which deals rows out in another order than spare_groups reads them: "
                "remove it, or set spare_groups to 0"
            )


def refuse_with_spare_groups(arguments: dict[str, Any], *, takes_images: bool) -> None:
    """Refuse arguments incompatible with `spare_groups`: no rows to spare, or state tied to a rank.

    Raises:
        ValueError: names the argument and the fix.
    """
    count = arguments["args"].spare_groups
    if not count:
        return
    for name in ("environment_factory", "rollout_func"):
        if arguments[name]:
            raise ValueError(
                f"spare_groups is {count} with {name}: a row may be trained on by another rank than the one that "
                "sampled it, and what it keeps there cannot follow; set spare_groups to 0"
            )
    if takes_images:
        raise ValueError(
            f"spare_groups is {count}, but the prompts come with images, which stay with their rank: set it to 0"
        )
    if not hasattr(arguments["train_dataset"], "__len__"):
        raise ValueError(
            f"spare_groups is {count}, and reads rows by their number, which a streamed data set does not have: set "
            "dataset_streaming to False, or spare_groups to 0"
        )
