"""Does sampling ahead learn as well: the demo's gain with `generation_lookahead` 0, 1 and 4 and both `old_logprobs`.

The gain is the mean reward of the last steps, less that of the demo's model, which a run with a learning rate of 0
measures. Seeds are paired: with the same seed all ways get the same prompts in the same order. A way is void whose
tokens were not as old as its lookahead says: it would show what another age costs.

All ways have half of the demo's learning rate and twice its steps. What age costs depends on how far a step moves the
policy, and the demo's own rate is the largest that it bears: `--learning_rate 4e-4 --steps 150` measures that.

Not part of `make bench`: it is 31 runs of the demo.

    python -m bench.learning [--at_once 2]
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from bench.report import Figure, Ratio, Report, argument_parser, finish

ROOT = Path(__file__).resolve().parent.parent
FIRST_SEED = 42
LEARNING_RATE = 2e-4
STEPS = 300
LAST_STEPS = 20  # whose mean is the final reward
WARM_START_STEPS = 100
GOAL = 0.9  # of the gain without lookahead
MAX_MISSING_AGE = 0.5  # weight syncs
RUN_TIMEOUT_S = 1800


class Way(NamedTuple):
    """How to train."""

    lookahead: int
    old_logprobs: str

    def __str__(self) -> str:
        return f"lookahead {self.lookahead}, old_logprobs {self.old_logprobs}"


WAYS = [Way(lookahead, side) for lookahead in (0, 1, 4) for side in ("trainer", "engine")]
BASE = WAYS[0]


class Learned(NamedTuple):
    """What one run came to."""

    reward: float
    """Mean over the last steps."""
    age: float
    """Mean age of a token at first use, in weight syncs, of all steps but the first ones."""


def train(
    output_dir: Path,
    args: argparse.Namespace,
    way: Way,
    seed: int,
    *,
    steps: int,
    last_steps: int = LAST_STEPS,
    more: Sequence[str] = (),
) -> Learned:
    """One run of the demo, as a user starts it."""
    config = "cpu.yaml" if args.device == "cpu" else "1node.yaml"
    command = [str(Path(sys.executable).parent / "accelerate"), "launch", "--main_process_port", "0"]
    if args.device == "cpu":
        command += ["--num_processes", "1"]  # the same completions as with more ranks, in less time on few cores
    command += ["--config_file", str(ROOT / "configs" / config), str(ROOT / "train.py")]
    command += ["--output_dir", str(output_dir), "--seed", str(seed), "--max_steps", str(steps)]
    command += ["--generation_lookahead", str(way.lookahead), "--old_logprobs", way.old_logprobs]
    command += ["--learning_rate", str(args.learning_rate), "--logging_steps", "1", "--disable_tqdm", "True", *more]
    if args.short:  # an engine that is ready soon
        command += ["--vllm_engine_kwargs", '{"enforce_eager": true}']
    threads = {"OMP_NUM_THREADS": "1"} if args.at_once > 1 else {}
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False, env={**os.environ, **threads}
    )
    if run.returncode:
        raise RuntimeError(f"{' '.join(command)} exited {run.returncode}:\n{run.stdout[-2000:]}\n{run.stderr[-4000:]}")
    written = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in written if "rollout/staleness_mean" in line]
    rewards = [line["reward"] for line in lines[-last_steps:]]
    ages = [line["rollout/staleness_mean"] for line in lines[min(way.lookahead, len(lines) - 1) :]]
    learned = Learned(statistics.mean(rewards), statistics.mean(ages))
    print(f"{', '.join([str(way), f'seed {seed}', *more])}: {learned.reward:.3f}, age {learned.age:.2f}", flush=True)
    return learned


def mean_and_error(values: list[float]) -> str:
    error = f" +- {statistics.stdev(values) / math.sqrt(len(values)):.3f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.3f}{error}"


def main() -> None:
    parser = argument_parser(__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps of a run")
    parser.add_argument("--learning_rate", type=float, default=LEARNING_RATE)
    parser.add_argument(
        "--at_once", type=int, default=1, help="runs at a time, each process with one thread if several"
    )
    parser.set_defaults(repetitions=5)
    args = parser.parse_args()
    if args.short:
        args.steps, args.repetitions = 3, 1
    seeds = range(FIRST_SEED, FIRST_SEED + args.repetitions)
    with tempfile.TemporaryDirectory(prefix="bench-learning-") as folder, ThreadPoolExecutor(args.at_once) as runs:
        untrained = runs.submit(
            train,
            Path(folder) / "untrained",
            args,
            BASE,
            FIRST_SEED,
            steps=min(args.steps, WARM_START_STEPS),
            last_steps=WARM_START_STEPS,
            more=("--learning_rate", "0"),
        )
        found = {
            way: [
                runs.submit(train, Path(folder) / f"{number}-{seed}", args, way, seed, steps=args.steps)
                for seed in seeds
            ]
            for number, way in enumerate(WAYS)
        }
        warm_start = untrained.result().reward
        learned = {way: [run.result() for run in of_way] for way, of_way in found.items()}
    settings = {"learning_rate": args.learning_rate, "steps": args.steps, "seeds": args.repetitions}
    finish(report_of(warm_start, learned, settings), args)


def report_of(warm_start: float, learned: dict[Way, list[Learned]], settings: dict[str, float]) -> Report:
    gains = {way: [run.reward - warm_start for run in of_way] for way, of_way in learned.items()}
    ages = {way: statistics.mean(run.age for run in of_way) for way, of_way in learned.items()}
    void = {way for way, age in ages.items() if age < way.lookahead - MAX_MISSING_AGE}
    on_policy = gains[BASE]
    # The mean of all seeds stands below the line: the gain of one would add its own chance to every ratio.
    base = statistics.mean(on_policy)
    return Report(
        benchmark="learning",
        settings=settings,
        ratios=tuple(
            Ratio(
                name=f"gain, {way} / {BASE}{': void' * (way in void)}",
                values=tuple(gain / base for gain in of_way),
                goal=None if way in void else GOAL,
            )
            for way, of_way in gains.items()
            if way != BASE and base > 0  # else nothing was learned, as in the short form
        ),
        figures=(
            Figure(name="reward of the demo's model", unit="", values=(warm_start,)),
            *(
                Figure(name=f"final reward, {way}", unit="", values=tuple(run.reward for run in of_way))
                for way, of_way in learned.items()
            ),
            *(
                Figure(name=f"age of a token, {way}", unit="syncs", values=tuple(run.age for run in of_way))
                for way, of_way in learned.items()
                if way.lookahead
            ),
        ),
        notes=(
            f"the final reward is that of the last {LAST_STEPS} steps' completions, by the policies that sampled them",
            *(
                f"{way}: gain {mean_and_error(of_way)} (mean and standard error over seeds); less that of {BASE}, "
                f"seed by seed: {mean_and_error([a - b for a, b in zip(of_way, on_policy, strict=True)])}"
                for way, of_way in gains.items()
            ),
        ),
    )


if __name__ == "__main__":
    main()
