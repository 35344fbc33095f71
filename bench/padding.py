"""Training on rows of unequal lengths, trimmed to what they need against padded as TRL pads them, in one run.

One trainer of a made-up model learns the same batches in turns, with and without `trim_padding`; nothing is sampled:
completions are given, of log-normal lengths, cut off at the longest. What counts is a batch's training:
log-probabilities before the step, as where an engine samples, then forward and backward passes of all micro-batches.

    python -m bench.padding [--rows 8] [--micro-batches 4] [--mean 300] [--longest 1024]
"""

import argparse
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset

from bench.multi_turn import save_model
from bench.report import Figure, Report, argument_parser, finish, interleave, ratio
from grpo import GRPOConfig, GRPOTrainer

GOAL = 1 / 0.6
SIGMA = 0.8  # of the logarithm of a length: one in fifty is four times as long as the mean
GENERATIONS = 8
PROMPT_TOKENS = (20, 120)


class Given(GRPOTrainer):
    """A trainer whose completions are there already."""

    lengths: np.ndarray

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        rows = [np.random.default_rng(row).integers(2, 100, each) for row, each in enumerate(self.lengths)]
        logprobs = [[-5.0] * len(row) for row in rows]
        return [row.tolist() for row in rows], logprobs


def main() -> None:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--rows", type=int, default=8, help="of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=4, help="of an optimizer step")
    parser.add_argument("--mean", type=int, default=300, help="tokens of a completion, before the longest are cut")
    parser.add_argument("--longest", type=int, default=1024, help="tokens of a completion")
    options = parser.parse_args()
    if options.short:
        options.mean, options.longest, options.repetitions = 30, 100, 1
    with tempfile.TemporaryDirectory(prefix="bench-padding-") as folder:
        finish(measure(options, Path(folder)), options)


def make_trainer(options: argparse.Namespace, folder: Path) -> Given:
    model = save_model(folder / "model")
    args = GRPOConfig(
        output_dir=str(folder / "run"),
        use_vllm=False,
        use_cpu=options.device == "cpu",
        bf16=options.device != "cpu",
        per_device_train_batch_size=options.rows,
        gradient_accumulation_steps=options.micro_batches,
        num_generations=GENERATIONS,
        max_completion_length=options.longest,
        gradient_checkpointing=False,
        report_to="none",
        disable_tqdm=True,
    )
    prompts = ["7" * tokens for tokens in np.linspace(*PROMPT_TOKENS, 16, dtype=int)]
    data = Dataset.from_dict({"prompt": prompts})

    def reward(prompts: list[str], **_: Any) -> list[float]:
        return [float(row % GENERATIONS) for row, _ in enumerate(prompts)]

    trainer = Given(model=str(model), reward_funcs=reward, args=args, train_dataset=data)
    trainer.use_vllm = trainer.args.use_vllm = True  # from now on it computes as beside an engine
    trainer.current_gradient_accumulation_steps = options.micro_batches
    return trainer


def drawn(options: argparse.Namespace, batch: int) -> np.ndarray:
    """Lengths of a batch's completions."""
    random = np.random.default_rng(batch)
    mu = np.log(options.mean) - SIGMA**2 / 2
    lengths = random.lognormal(mu, SIGMA, options.rows * options.micro_batches)
    return np.clip(lengths.astype(int), 1, options.longest)


def seconds_of(trainer: Given, batches: list[np.ndarray], *, trims: bool) -> float:
    """Of all batches."""
    trainer.args.trim_padding = trims
    trainer.model.train()
    seconds = 0.0
    for lengths in batches:
        trainer.lengths = lengths
        rows = [row for row in trainer.train_dataset for _ in range(GENERATIONS)][: len(lengths)]
        begun = time.perf_counter()
        for _ in range(trainer.args.gradient_accumulation_steps):
            trainer.training_step(trainer.model, rows, None)
        trainer.model.zero_grad()
        seconds += time.perf_counter() - begun
    return seconds


def measure(options: argparse.Namespace, folder: Path) -> Report:
    trainer = make_trainer(options, folder)
    batches = [drawn(options, number) for number in range(2)]
    variants = {"as TRL pads": partial(seconds_of, trainer, batches, trims=False)}
    variants |= {"trimmed": partial(seconds_of, trainer, batches, trims=True)}
    shares = {}
    for name, run in variants.items():  # warm, and how much of it is padding
        run()
        seen = trainer._metrics["train"].pop("train/padding_share")
        shares[name] = Figure(name=f"share of padding, {name}", unit="", values=tuple(seen))
    found = interleave(variants, options.repetitions)
    seconds = {name: Figure(name=f"training, {name}", unit="s", values=tuple(each)) for name, each in found.items()}
    trainer.close()
    return Report(
        benchmark="padding",
        settings={
            "rows": options.rows,
            "micro_batches": options.micro_batches,
            "mean": options.mean,
            "longest": options.longest,
            "sigma": SIGMA,
            "batches": len(batches),
        },
        ratios=(ratio("as TRL pads / trimmed", seconds["as TRL pads"], seconds["trimmed"], GOAL),),
        figures=(*seconds.values(), *shares.values()),
        notes=(
            f"prompts of {PROMPT_TOKENS[0]} to {PROMPT_TOKENS[1]} tokens; the old policy's log-probabilities, "
            "forward and backward passes, and what TRL does around them; no optimizer's step",
        ),
    )


if __name__ == "__main__":
    main()
