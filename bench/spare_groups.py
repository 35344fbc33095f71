"""Do spare groups learn in fewer steps: the demo's sums, of which half have no right answer and teach nothing.

Both sides train on 32 groups a step, with the same seeds and the same schedule; one samples as many spare groups beside
them. Each is evaluated on sums that neither trains on. The figure is the first step at which the mean of three
evaluations reaches the end of the run without spare groups; its own step, too, as rewards level off.

Not part of `make bench`: it is six runs of the demo.

    python -m bench.spare_groups [--at_once 2]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from bench.report import Figure, Ratio, Report, argument_parser, finish
from grpo.ops.train.demo import MODEL, demo_dataset

ROOT = Path(__file__).resolve().parent.parent
FIRST_SEED = 42
STEPS, EVAL_STEPS, WINDOW = 150, 5, 3
GROUPS = 32
NO_ANSWER = "none"
RUN_TIMEOUT_S = 1800


class Curve(NamedTuple):
    """One run."""

    steps: list[int]
    """Of the evaluations but the first ones, in order."""
    rewards: list[float]
    """The mean of `WINDOW` evaluations that end there."""
    tokens: list[float]
    """Sampled and read until then."""
    flat: float
    """Share of flat groups among those that are trained on."""

    def reaches(self, reward: float) -> int | None:
        """The index of the first evaluation that does; None: it never does."""
        return next((index for index, own in enumerate(self.rewards) if own >= reward), None)


def write_data(folder: Path) -> None:
    rows = [
        {"prompt": row["prompt"], "answer": NO_ANSWER if number % 2 else row["answer"]}
        for number, row in enumerate(demo_dataset("train"))
    ]
    for name, each in (("train", rows), ("test", list(demo_dataset("test")))):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in each))


def train(folder: Path, args: argparse.Namespace, spares: int, seed: int) -> Curve:
    """One run, as a user starts it."""
    out = folder / f"{spares}-{seed}"
    config = "cpu.yaml" if args.device == "cpu" else "1node.yaml"
    command = [str(Path(sys.executable).parent / "accelerate"), "launch", "--main_process_port", "0"]
    command += ["--num_processes", "1", "--config_file", str(ROOT / "configs" / config), str(ROOT / "train.py")]
    command += ["--config", str(ROOT / "configs" / "train" / "demo.yaml"), "--model_name_or_path", str(MODEL)]
    command += ["--dataset_name", str(folder / "train.jsonl"), "--output_dir", str(out), "--seed", str(seed)]
    command += ["--eval_datasets", json.dumps({"test": str(folder / "test.jsonl")}), "--eval_strategy", "steps"]
    command += ["--eval_steps", str(EVAL_STEPS if not args.short else 1), "--num_generations_eval", "1"]
    command += ["--per_device_train_batch_size", str(8 * GROUPS), "--per_device_eval_batch_size", "512"]
    command += ["--max_steps", str(args.steps), "--spare_groups", str(spares), "--logging_steps", "1"]
    command += ["--log_completions_prompts", "0", "--disable_tqdm", "True"]
    threads = {"OMP_NUM_THREADS": "1"} if args.at_once > 1 else {}
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False, env={**os.environ, **threads}
    )
    if run.returncode:
        raise RuntimeError(f"{' '.join(command)} exited {run.returncode}:\n{run.stdout[-2000:]}\n{run.stderr[-4000:]}")
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    evaluated = {line["step"]: line["eval_test_avg@1"] for line in lines if "eval_test_avg@1" in line}
    tokens = {line["step"]: line["num_tokens"] for line in lines if "frac_reward_zero_std" in line}
    steps = list(evaluated)
    curve = Curve(
        steps=steps[WINDOW - 1 :],
        rewards=[
            statistics.mean(list(evaluated.values())[end - WINDOW : end]) for end in range(WINDOW, len(steps) + 1)
        ],
        tokens=[tokens[step] for step in steps[WINDOW - 1 :]],
        flat=statistics.mean(line["frac_reward_zero_std"] for line in lines if "frac_reward_zero_std" in line),
    )
    print(f"{spares} spare groups, seed {seed}: {curve.rewards[0]:.3f} -> {curve.rewards[-1]:.3f}", flush=True)
    return curve


def main() -> None:
    parser = argument_parser(__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps of a run")
    parser.add_argument("--spare_groups", type=int, default=GROUPS)
    parser.add_argument("--at_once", type=int, default=1, help="runs at a time, each with one thread if several")
    parser.set_defaults(repetitions=3)
    args = parser.parse_args()
    if args.short:
        args.steps, args.repetitions = 3, 1
    seeds = range(FIRST_SEED, FIRST_SEED + args.repetitions)
    with tempfile.TemporaryDirectory(prefix="bench-spares-") as folder, ThreadPoolExecutor(args.at_once) as runs:
        write_data(Path(folder))
        asked = {
            (spares, seed): runs.submit(train, Path(folder), args, spares, seed)
            for seed in seeds
            for spares in (0, args.spare_groups)
        }
        plain = [asked[0, seed].result() for seed in seeds]
        spared = [asked[args.spare_groups, seed].result() for seed in seeds]
    settings = {"steps": args.steps, "groups": GROUPS, "spare_groups": args.spare_groups, "seeds": args.repetitions}
    finish(report_of(plain, spared, settings), args)


def report_of(plain: list[Curve], spared: list[Curve], settings: dict[str, int]) -> Report:
    last = settings["steps"]
    goals = [curve.rewards[-1] for curve in plain]
    at = [curve.reaches(goal) for curve, goal in zip(spared, goals, strict=True)]
    own = [curve.reaches(goal) or 0 for curve, goal in zip(plain, goals, strict=True)]
    steps = [last if index is None else curve.steps[index] for curve, index in zip(spared, at, strict=True)]
    plain_steps = [curve.steps[index] for curve, index in zip(plain, own, strict=True)]
    tokens = [curve.tokens[-1 if index is None else index] for curve, index in zip(spared, at, strict=True)]
    plain_tokens = [curve.tokens[-1] for curve in plain]
    never = sum(index is None for index in at)
    return Report(
        benchmark="spare_groups",
        settings=settings,
        ratios=(
            Ratio(
                name="steps without / with, to its final reward",
                values=tuple(last / step for step in steps),
                goal=4 / 3,
            ),
            Ratio(
                name="the same, to the step at which it first had it",
                values=tuple(mine / step for mine, step in zip(plain_steps, steps, strict=True)),
            ),
            Ratio(
                name="tokens without / with, to its final reward",
                values=tuple(mine / spent for mine, spent in zip(plain_tokens, tokens, strict=True)),
            ),
        ),
        figures=(
            Figure(name="final reward, without", unit="", values=tuple(goals)),
            Figure(name="final reward, with", unit="", values=tuple(curve.rewards[-1] for curve in spared)),
            Figure(name="steps to the final reward without, with", unit="steps", values=tuple(map(float, steps))),
            Figure(name="tokens until then, with", unit="tokens", values=tuple(tokens)),
            Figure(name="tokens, without", unit="tokens", values=tuple(plain_tokens)),
            Figure(name="flat among those trained on, without", unit="", values=tuple(curve.flat for curve in plain)),
            Figure(name="flat among those trained on, with", unit="", values=tuple(curve.flat for curve in spared)),
        ),
        notes=(
            f"half of the prompts have no right answer; rewards: 512 other sums, the mean of {WINDOW} evaluations",
            *((f"{never} of {len(at)} runs with spare groups never had that reward",) if never else ()),
        ),
    )


if __name__ == "__main__":
    main()
