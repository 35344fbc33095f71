"""Rewards beside sampling and beside the log-probabilities, against TRL's place for them, in one run.

Trainers of the same model, each with an engine that is up all the time; one works at a time, on the same batch with
the same seeds. A completion ends where the random model happens to say one of some tokens: few are long. The reward
waits for so long a completion, as one that asks a service does. Synchronous, it asks for one completion after the
other. Declared (`scores_each`), it begins with the first completion that ends; undeclared, when all are there, beside
the log-probabilities. A batch in which rewards take no time shows what everything else takes: were both to overlap
fully, a batch would take the longer of the two.

As `async def` it asks for all completions at once, in TRL's place too: what a user of TRL writes for such a service
where that answers many at a time. The synchronous one is for a service that does not, and for work in Python.

    python -m bench.rewards [--completions 64] [--reward-ms 50]
"""

import asyncio
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from datasets import Dataset

from bench.multi_turn import save_model
from bench.report import Figure, Ratio, Report, argument_parser, finish, interleave, ratio
from grpo import GRPOConfig, GRPOTrainer, scores_each
from grpo.rollout import ahead

GOAL = 0.9
STOPS = 2  # of 128 tokens: a completion has about 64
TOKENS = 600
SEED = 7
GENERATIONS = 4


class Service:
    """What a reward waits for."""

    delay_s = 0.0

    def ask(self, completions: list[Any], **_: Any) -> list[float]:
        time.sleep(self.delay_s * len(completions))
        return scores_of(completions)

    async def ask_at_once(self, completions: list[Any], **_: Any) -> list[float]:
        await asyncio.gather(*(asyncio.sleep(self.delay_s) for _ in completions))
        return scores_of(completions)


def scores_of(completions: list[Any]) -> list[float]:
    return [float(len(said[0]["content"])) for said in completions]


def main() -> None:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--completions", type=int, default=64, help="of a batch")
    parser.add_argument("--reward-ms", type=float, default=50.0, help="that a reward waits for a completion")
    options = parser.parse_args()
    if options.short:
        options.completions, options.repetitions = 16, 1
    with tempfile.TemporaryDirectory(prefix="bench-rewards-") as folder:
        finish(measure(options, Path(folder)), options)


def make_trainer(reward: Any, model: Path, folder: Path, options: Any, *, overlaps: bool) -> GRPOTrainer:
    on_cpu = options.device == "cpu"
    args = GRPOConfig(
        output_dir=str(folder),
        use_cpu=on_cpu,
        bf16=False,
        per_device_train_batch_size=options.completions,
        num_generations=GENERATIONS,
        max_completion_length=TOKENS,
        vllm_max_model_length=TOKENS + 100,
        generation_kwargs={"stop_token_ids": [*range(120, 120 + STOPS)]},
        vllm_gpu_memory_utilization=0.3,  # one GPU may hold all engines
        vllm_engine_kwargs={"enforce_eager": True} if on_cpu else None,
        overlap_rewards=overlaps,
        report_to="none",
        check_rewards=False,
        disable_tqdm=True,
    )
    prompts = [[{"role": "user", "content": f"row {row}"}] for row in range(options.completions // GENERATIONS)]
    data = Dataset.from_dict({"prompt": prompts})
    return GRPOTrainer(model=str(model), reward_funcs=reward, args=args, train_dataset=data)


def seconds_of(trainer: Any, service: Service, delay_s: float) -> float:
    """Of one batch, from its prompts to its advantages; the weights are there."""
    inputs = [row for row in trainer.train_dataset for _ in range(GENERATIONS)]
    service.delay_s = delay_s
    begun = time.perf_counter()
    trainer._generate_and_score_completions(inputs)
    return time.perf_counter() - begun


def measure(options: Any, folder: Path) -> Report:
    service, delay_s = Service(), options.reward_ms / 1000
    model = save_model(folder / "model")

    @scores_each("completion")
    def declared(**arguments: Any) -> list[float]:
        return service.ask(**arguments)

    @scores_each("completion")
    async def declared_async(**arguments: Any) -> list[float]:
        return await service.ask_at_once(**arguments)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(ahead, "seed_base", return_value=SEED))  # all batches are the same one
        trainers: dict[str, Any] = {}
        for name, reward, overlaps in (
            ("declared", declared, True),
            ("undeclared", service.ask, True),
            ("TRL's place", service.ask, False),
            ("TRL's place, async def", service.ask_at_once, False),
            ("declared, async def", declared_async, True),
        ):
            trainer = make_trainer(reward, model, folder / name.replace(" ", "-"), options, overlaps=overlaps)
            stack.callback(trainer.close)
            trainer.model.train()
            trainer.vllm_generation.sync_weights()
            trainer._last_loaded_step = trainer.state.global_step
            seconds_of(trainer, service, 0.0)  # warm
            trainers[name] = trainer
        variants = {name: partial(seconds_of, trainer, service, delay_s) for name, trainer in trainers.items()}
        variants["declared, and no reward to wait for"] = partial(seconds_of, trainers["declared"], service, 0.0)
        seconds = interleave(variants, options.repetitions)
    figures = {name: Figure(name=name, unit="s", values=tuple(values)) for name, values in seconds.items()}
    in_trls_place = figures["TRL's place, async def"]
    rewards_s = delay_s * options.completions
    pairs = zip(seconds["declared, and no reward to wait for"], seconds["declared"], strict=True)
    share = tuple(max(rest_s, rewards_s) / taken_s for rest_s, taken_s in pairs)
    return Report(
        benchmark="rewards",
        settings={
            "completions": options.completions,
            "a reward's time, ms": options.reward_ms,
            "rewards' time of a batch, s": round(rewards_s, 2),
        },
        ratios=(
            Ratio(name="full overlap / declared", values=share, goal=GOAL),
            ratio("TRL's place / declared", figures["TRL's place"], figures["declared"]),
            ratio("TRL's place / undeclared", figures["TRL's place"], figures["undeclared"]),
            ratio("TRL's place, async def / declared", in_trls_place, figures["declared"]),
            ratio("TRL's place, async def / declared, async def", in_trls_place, figures["declared, async def"]),
        ),
        figures=tuple(figures.values()),
        notes=(
            "Full overlap is the longer of two times: a batch whose rewards take no time, and the rewards alone.",
            "async def: the service answers all completions at once; the other rows ask for one after the other.",
        ),
    )


if __name__ == "__main__":
    main()
