"""Batches under way where completions end by chance: `generation_lookahead` 0, 1, 2 and 4 in turn.

One training process and one engine, as in `bench.overlap`, each on a core of its own. A completion ends at every token
with the same probability (a bias on the end token of a model with random weights), so that lengths are geometric: a
mean of 64 tokens, cut at four times as much, which is about where a batch's longest ends. With one batch ahead ranks
wait for it in every step; with N it has N steps.

Two works are measured before: training on a batch, in steps without lookahead, and sampling as many tokens in
completions of one length, by which the engine is never nearly empty. A step cannot be shorter than the larger of both.
So are the constants from which `bench.scale` foretells each N.

    python -m bench.overlap --ragged [--lookahead 0 1 2 4]
"""

import argparse
import contextlib
import copy
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from bench import overlap
from bench.report import Figure, Ratio, Report, argument_parser, finish
from examples.demo_model import build_tokenizer
from grpo import GRPOTrainer
from grpo.rollout.packing import Request

LOOKAHEADS = (0, 1, 2, 4)
GAIN, COST = 1.4, 1.15  # goals: of 4 over 1; of a step with 4 over the larger work
SAMPLING_TIMEOUT_S = 600.0
MEAN_TOKENS, LONGEST_TOKENS = 64, 256
CALIBRATING_BATCHES, ALONE_S = 16, 3.0
CONSTANTS = (
    ("engine: a decoding step", "s", "decoding_s"),
    ("engine: more for each sequence", "s", "sequence_s"),
    ("sampling beside training / alone", "", "sampling_beside"),
    ("training beside sampling / alone", "", "training_beside"),
)
SHAPES: dict[str, dict[str, Any]] = {
    "cpu": {"hidden_size": 128, "num_hidden_layers": 4, "completions": 32, "micro_batch": 4},
    "cuda": {"hidden_size": 2048, "num_hidden_layers": 24, "completions": 128, "micro_batch": 16},
}


def shape_of(device: str, *, ragged: bool) -> dict[str, Any]:
    """For `bench.overlap.build_trainer`: of chance's lengths, or all of the mean one."""
    if not ragged:
        return SHAPES[device] | {"completion_tokens": MEAN_TOKENS}
    bias = math.log(overlap.VOCAB_SIZE / MEAN_TOKENS)  # with random weights every token is about as probable
    ends = {"logit_bias": {build_tokenizer().eos_token_id: bias}}
    return SHAPES[device] | {"completion_tokens": LONGEST_TOKENS, "generation_kwargs": ends}


class Constants(NamedTuple):
    """Of engine and rank, for the simulation of `bench.scale`."""

    decoding_s: float
    """Of a decoding step, whatever it holds."""
    sequence_s: float
    """Of a decoding step, more for each sequence."""
    sampling_beside: float
    """Seconds of sampling beside training / alone: cores share memory and caches."""
    training_beside: float


def measure(trainer: GRPOTrainer, completions: int) -> Constants:
    """Sample the same batches with the ranks at rest, and beside passes of a copy of the model."""
    seeds = range(CALIBRATING_BATCHES)
    _, batches = ([sample(trainer, completions, seed) for seed in seeds] for _ in range(2))  # what is new is slow
    sizes = np.array([(batch.longest, batch.tokens) for batch in batches], dtype=float)
    seconds = np.array([batch.seconds for batch in batches])
    fit = np.linalg.lstsq(sizes, seconds)[0]
    # What holds the machine up for a moment is no constant of the engine: once more without the worst quarter.
    best = np.argsort(np.abs(sizes @ fit - seconds))[: len(batches) * 3 // 4]
    decoding_s, sequence_s = np.linalg.lstsq(sizes[best], seconds[best])[0].tolist()
    with passes_of(trainer) as count:
        alone = rate(count, lambda: time.sleep(ALONE_S))
        again: list[Sampled] = []
        beside = rate(count, lambda: again.extend(sample(trainer, completions, seed) for seed in seeds))
    ratios = [after.seconds / before.seconds for after, before in zip(again, batches, strict=True)]
    return Constants(decoding_s, sequence_s, statistics.median(ratios), alone / beside)


class Sampled(NamedTuple):
    seconds: float
    longest: int
    tokens: int


def sample(trainer: GRPOTrainer, completions: int, seed: int) -> Sampled:
    """A batch whose completions end by chance, the same for the same seed."""
    assert trainer._local is not None
    assert trainer._local._serving is not None
    pool = trainer._local._serving.pool
    assert pool is not None
    prompt = np.arange(4, 10, dtype=np.int32)
    requests = [Request(token_ids=prompt, n=8, seed=100 * seed + row, overrides={}) for row in range(completions // 8)]
    begun_s = time.perf_counter()
    found = pool.collect(pool.submit(requests), SAMPLING_TIMEOUT_S)
    assert found is not None
    return Sampled(time.perf_counter() - begun_s, int(found.lengths.max()), int(found.lengths.sum()))


def rate(count: list[int], act: Callable[[], object]) -> float:
    """Passes in a second, while something is done."""
    begun_s, before = time.perf_counter(), len(count)
    act()
    return (len(count) - before) / (time.perf_counter() - begun_s)


@contextlib.contextmanager
def passes_of(trainer: GRPOTrainer) -> Iterator[list[int]]:
    """Forward and backward passes of a copy of the model, one after the other; gives a list of those that are done."""
    model, done, ends = copy.deepcopy(trainer.model), [], threading.Event()
    assert model is not None
    tokens = torch.arange(4 * 2 * MEAN_TOKENS).remainder(80).add(5).reshape(4, -1).to(model.device)

    def go_on() -> None:
        while not ends.is_set():
            model(input_ids=tokens).logits.log_softmax(-1).mean().backward()
            done.append(1)

    thread = threading.Thread(target=go_on, name="bench-passes")
    thread.start()
    try:
        yield done
    finally:
        ends.set()
        thread.join()


def segment(
    args: argparse.Namespace, shape: dict[str, Any], lookahead: int, *, measures: bool = False
) -> dict[str, float]:
    """Train some steps; means over all but the first ones and the last: seconds of a step, and its parts."""
    warm_up = overlap.WARM_UP_STEPS + lookahead
    with overlap.ready(args, shape, lookahead) as (trainer, ends):
        measured = measure(trainer, shape["completions"])._asdict() if measures else {}
        trainer.args.max_steps = warm_up + args.steps + 1
        trainer.train()
        lines = [line for line in trainer.state.log_history if "rollout/wait_s" in line][warm_up:-1]
        at_s = ends.at_s[warm_up - 1 : -1]
        names = (
            "rollout/wait_s",
            "weight_sync/total_s",
            "engine/idle_share",
            "rollout/wait_share",
            "rollout/policy_lag",
        )
        parts = {name: statistics.mean(line[name] for line in lines) for name in names}
        tokens = statistics.mean(line["completions/mean_length"] for line in lines)
        longest = statistics.mean(line["completions/max_length"] for line in lines)
        return {
            "step_s": (at_s[-1] - at_s[0]) / (len(at_s) - 1),
            "tokens": tokens,
            "longest": longest,
            **parts,
            **measured,
        }


def compare(args: argparse.Namespace) -> None:
    if args.short:
        args.steps, args.repetitions = 4, 1
        args.lookahead = args.lookahead if args.lookahead != list(LOOKAHEADS) else [1, 4]
    equal: list[dict[str, float]] = []
    found: dict[int, list[dict[str, float]]] = {lookahead: [] for lookahead in args.lookahead}
    for _ in range(args.repetitions):
        equal.append(segment(args, shape_of(args.device, ragged=False), 0))
        for lookahead, segments in found.items():
            ragged = shape_of(args.device, ragged=True)
            segments.append(segment(args, ragged, lookahead, measures=not lookahead))

    # Lengths differ by chance from segment to segment: every work is that of as many tokens as the segments' mean.
    tokens = statistics.mean(parts["tokens"] for segments in found.values() for parts in segments)
    sampling = [parts["rollout/wait_s"] * tokens / parts["tokens"] for parts in equal]
    rests = [parts["step_s"] - parts["rollout/wait_s"] - parts["weight_sync/total_s"] for parts in found.get(0, equal)]
    training = [rest * tokens / parts["tokens"] for rest, parts in zip(rests, found.get(0, equal), strict=True)]
    report = Report(
        benchmark="overlap_ragged",
        settings={"steps a segment": args.steps, "mean tokens": MEAN_TOKENS, "cut at": LONGEST_TOKENS}
        | SHAPES[args.device],
        ratios=tuple(ratios_of(found, training, sampling)),
        figures=(
            Figure(name="training on a batch", unit="s", values=tuple(training)),
            Figure(name="sampling a batch of one length", unit="s", values=tuple(sampling)),
            Figure(name="tokens of a completion in both", unit="", values=(tokens,)),
            *(
                Figure(name=name, unit=unit, values=tuple(parts[key] for parts in found.get(0, [])))
                for name, unit, key in CONSTANTS
                if 0 in found
            ),
            *(figure for lookahead, segments in found.items() for figure in figures_of(lookahead, segments)),
        ),
        notes=(
            "without GPUs the training process is pinned to one core, the engine to the others",
            "training on a batch: a step without lookahead, less the wait and the weight sync; sampling: the wait for "
            "as many tokens in completions of one length",
        ),
    )
    finish(report, args)


def ratios_of(
    found: dict[int, list[dict[str, float]]], training: list[float], sampling: list[float]
) -> Iterator[Ratio]:
    def throughput(lookahead: int) -> list[float]:
        return [parts["tokens"] / parts["step_s"] for parts in found[lookahead]]

    deepest = max(found)
    for lookahead in found:
        if 1 in found and lookahead != 1:
            values = tuple(a / b for a, b in zip(throughput(lookahead), throughput(1), strict=True))
            goal = GAIN if lookahead >= 4 else None
            yield Ratio(name=f"tokens/s, lookahead {lookahead} / lookahead 1", values=values, goal=goal)
    if deepest >= 2:
        syncs = [parts["weight_sync/total_s"] for parts in found[deepest]]
        steps = [parts["step_s"] for parts in found[deepest]]
        bounds = [COST * max(t, s) + sync for t, s, sync in zip(training, sampling, syncs, strict=True)]
        yield Ratio(
            name=f"{COST} x the larger work + weight sync / step with lookahead {deepest}",
            values=tuple(bound / step for bound, step in zip(bounds, steps, strict=True)),
            goal=1.0,
        )
    works = tuple(t / s for t, s in zip(training, sampling, strict=True))
    yield Ratio(name="training work / sampling work (0.8 to 1.25 is meant)", values=works)


def figures_of(lookahead: int, segments: list[dict[str, float]]) -> Iterator[Figure]:
    rows = (
        ("step", "s", "step_s"),
        ("waiting for completions", "s", "rollout/wait_s"),
        ("weight sync", "s", "weight_sync/total_s"),
        ("share in which ranks wait", "", "rollout/wait_share"),
        ("share in which the engine is idle", "", "engine/idle_share"),
        ("policy lag", "syncs", "rollout/policy_lag"),
        ("tokens of a completion", "", "tokens"),
        ("tokens of a batch's longest", "", "longest"),
    )
    for name, unit, key in rows:
        yield Figure(name=f"lookahead {lookahead}: {name}", unit=unit, values=tuple(parts[key] for parts in segments))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lookahead", type=int, nargs="+", default=list(LOOKAHEADS), help="of lengths by chance")


def main() -> None:
    parser = argument_parser(__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=24, help="optimizer steps of a segment")
    add_arguments(parser)
    parser.set_defaults(repetitions=3)
    compare(parser.parse_args())


if __name__ == "__main__":
    main()
