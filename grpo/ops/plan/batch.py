"""Arithmetic of a batch: completions, groups, nodes, optimizer steps and tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from grpo.config import GRPOConfig

ASSUMED_PROMPT_TOKENS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedBatch:
    """Sizes of one generation batch and one optimizer step."""

    num_generations: int
    """Completions of one prompt: a group."""
    micro_batch_completions: int
    """Completions in one forward and backward of a rank."""
    accumulated_micro_batches: int
    """`gradient_accumulation_steps`; follows from `completions_per_step` if set."""
    is_pinned: bool
    """True if `completions_per_step` is set: the step is the same on any number of ranks."""
    completions_per_step: int
    """Completions of all ranks per optimizer step; each counts once for every iteration over it."""
    generation_completions: int
    """Completions of one generation batch, over all nodes."""
    generation_prompts: int
    steps_per_generation: int
    """Micro-batches of one generation batch, per rank."""
    optimizer_steps_per_generation: float
    """Optimizer steps per generation batch; below 1 if a step takes several."""
    generation_lookahead: int
    """Batches of asynchronous generation; each one adds a weight sync of policy lag."""
    node_completions: tuple[int, ...]
    """Completions of one generation batch to train on, per node."""
    node_samples: tuple[int, ...]
    """The same with spare groups; if nodes have different numbers of engines, other nodes sample some of them."""
    straddles: bool
    """True if some group has completions on two nodes."""
    engine_completions: tuple[int, ...]
    """Upper bound of completions per generation batch for an engine, per node."""
    prompt_tokens: int
    """Length of the longest prompt, given or assumed."""
    sequence_tokens: int
    """Length of the longest prompt with its completion."""
    tokens_per_step: int
    """Upper bound: every trained sequence at its full length."""


def prompt_tokens_of(args: GRPOConfig, asked: int | None) -> tuple[int, str | None]:
    """Return the length of the longest prompt, and the assumption behind it (None if the length was given)."""
    if asked is not None:
        return asked, None
    if args.vllm_max_model_length is not None:
        tokens = max(1, args.vllm_max_model_length - args.max_completion_length)
        return tokens, f"prompts of {tokens} tokens: vllm_max_model_length - max_completion_length (--prompt-tokens)"
    return ASSUMED_PROMPT_TOKENS, f"prompts of {ASSUMED_PROMPT_TOKENS} tokens (--prompt-tokens)"


def plan_batch(
    args: GRPOConfig,
    *,
    ranks: Sequence[int],
    engines: Sequence[int],
    moves: bool,
    prompt_tokens: int,
    engine_limit: int | None,
) -> PlannedBatch:
    """Compute the batch of a job; TRL has checked its divisibility (`GRPOConfig.__post_init__`).

    Args:
        ranks: per node.
        engines: per node.
        moves: True if prompts move between nodes, in proportion to their engines.
        engine_limit: maximum sequence length of an engine, in tokens; None: no limit.
    """
    world_size, sampled = sum(ranks), args.generation_batch_size + args.spare_groups * args.num_generations
    node_completions = tuple(args.generation_batch_size // world_size * count for count in ranks)
    node_samples = tuple(sampled // world_size * count for count in ranks)
    of_engines = [(samples, count) for samples, count in zip(node_samples, engines, strict=True)]
    if moves:
        of_engines = [(sampled, sum(engines))] * len(engines)
    sequence_tokens = prompt_tokens + args.max_completion_length
    if engine_limit is not None:
        sequence_tokens = min(sequence_tokens, engine_limit)
    completions_per_step = args.per_device_train_batch_size * world_size * args.gradient_accumulation_steps
    return PlannedBatch(
        num_generations=args.num_generations,
        micro_batch_completions=args.per_device_train_batch_size,
        accumulated_micro_batches=args.gradient_accumulation_steps,
        is_pinned=args.completions_per_step is not None,
        completions_per_step=completions_per_step,
        generation_completions=args.generation_batch_size,
        generation_prompts=args.generation_batch_size // args.num_generations,
        steps_per_generation=args.steps_per_generation,
        optimizer_steps_per_generation=(
            args.steps_per_generation * args.num_iterations / args.gradient_accumulation_steps
        ),
        generation_lookahead=args.generation_lookahead,
        node_completions=node_completions,
        node_samples=node_samples,
        # TRL's sampler lays the copies of a prompt end to end over the ranks; ranks are numbered node by node.
        straddles=any(end % args.num_generations for end in accumulate(node_completions)),
        engine_completions=tuple(-(-samples // count) for samples, count in of_engines),
        prompt_tokens=prompt_tokens,
        sequence_tokens=sequence_tokens,
        tokens_per_step=completions_per_step * sequence_tokens,
    )
