"""The simulation of `bench.scale` against a run: what it says of the steps of `bench.overlap --ragged`.

One engine and one rank in the same loop, with what that benchmark has measured: an engine's decoding steps and how much
training slows them down; for each N the mean length, the weight sync, and training (a step less the wait and the weight
sync). So what is predicted is the wait: how far the ranks are held up by lengths that differ.
"""

import math
import random
import re
from collections.abc import Mapping
from typing import Any

from bench.scale_lengths import GROUP, Loop
from bench.scale_model import Node
from bench.scale_sites import Site


def predict(ragged: Mapping[str, Any] | None) -> dict[int, tuple[float, float]]:
    """Seconds of a step by lookahead: what the model says, and what the result of `bench.overlap --ragged` does."""
    median = {figure["name"]: figure["median"] for figure in (ragged or {}).get("figures", [])}
    if ragged is None or "engine: a decoding step" not in median:  # none is there, or one without lookahead 0
        return {}
    found = {}
    for name, measured_s in median.items():
        if match := re.fullmatch(r"lookahead (\d+): step", name):
            place = name.removesuffix("step")
            sync_s = median[f"{place}weight sync"]
            model_s = step_of_one_engine(
                int(match[1]),
                tokens=median[f"{place}tokens of a completion"],
                longest=ragged["settings"]["cut at"],
                completions=ragged["settings"]["completions"],
                engine=(median["engine: a decoding step"], median["engine: more for each sequence"]),
                beside=median["sampling beside training / alone"],
                train_s=measured_s - median[f"{place}waiting for completions"] - sync_s,
                sync_s=sync_s,
            )
            found[int(match[1])] = (model_s, measured_s)
    return found


def step_of_one_engine(
    lookahead: int,
    *,
    tokens: float,
    longest: int,
    completions: int,
    engine: tuple[float, float],
    beside: float,
    train_s: float,
    sync_s: float,
    steps: int = 400,
) -> float:
    """Seconds of a step of one engine and one rank, whose completions end at every token with the same probability.

    `tokens`: of a completion, in the mean. `engine`: seconds of a decoding step, and more for each sequence; `beside`
    times as long while the rank trains. `train_s`: of a batch.
    """
    rate = rate_of(tokens, longest)

    def group(rng: random.Random) -> list[int]:
        return [min(longest, math.ceil(rng.expovariate(rate))) for _ in range(GROUP)]

    node = Node(
        name="one engine",
        gpus=2,
        parameters=0,
        completions=completions,
        completion_tokens=1,
        sample_s=0.0,
        train_s=train_s / completions / tokens,
    )
    site = Site([1.0], completions * (lookahead + 1), step_s=engine[0], sequence_s=engine[1])
    loop = Loop(node, group, [site], random.Random(0), nodes=1, ranks=1, sync_s=sync_s, speed_beside=1 / beside)
    loop.warm_up(lookahead)
    begun_s = loop.now
    for _ in range(steps):
        loop.step(lookahead)
    return (loop.now - begun_s) / steps


def rate_of(tokens: float, longest: int) -> float:
    """Of the exponential distribution that, cut at `longest`, has this mean."""
    low, high = 1 / (1000 * longest), 1.0
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if (1 - math.exp(-middle * longest)) / middle < tokens else (middle, high)
    return low
