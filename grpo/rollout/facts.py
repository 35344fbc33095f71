"""Origin and stop reason of completions, for displays."""

from collections.abc import Collection, Sequence

import numpy as np

from grpo.rollout.packing import REFUSED, Completions, node_and_engine

STOPPED, TOO_LONG, LEFT_OUT = range(3)


def facts_of(completions: Completions, prompt_tokens: Sequence[int], end_tokens: Collection[int]) -> np.ndarray:
    """Return [C, 6] int64: node, engine, policy version, prompt tokens, completion tokens, and stop reason.

    Args:
        prompt_tokens: [C].
        end_tokens: a completion ending with one of them has stopped by itself, as in TRL.
    """
    refused = completions.policy_versions == REFUSED
    last = np.cumsum(completions.lengths)[~refused] - 1
    reasons = np.full(len(refused), LEFT_OUT)
    reasons[~refused] = np.where(np.isin(completions.token_ids[last], list(end_tokens)), STOPPED, TOO_LONG)
    nodes, engines = node_and_engine(completions.engines)
    columns = (nodes, engines, completions.policy_versions, prompt_tokens, completions.lengths, reasons)
    return np.stack([np.asarray(column, np.int64) for column in columns], axis=1)


def sampled_by(completions: Completions, policy_version: int) -> np.ndarray:
    """Return [C] int64: the node that sampled each completion with these weights; `REFUSED` for all others."""
    nodes, _ = node_and_engine(completions.engines)
    return np.where(completions.policy_versions == policy_version, nodes, REFUSED).astype(np.int64)
