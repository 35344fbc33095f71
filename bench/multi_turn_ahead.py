"""Episodes with slow tools while the ranks train: `generation_lookahead` against taking turns, in one run.

The episodes, their tool and the model are those of `bench.multi_turn`. Training takes a given share of the
episodes' time: what a step of this small model takes, and a sleep, which holds no interpreter and no core, as kernels
of a GPU do. A step cannot be shorter than the larger of both.

    python -m bench.multi_turn --lookahead 1 [--rows 32]
"""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from bench.multi_turn import Play, make_trainer, save_model
from bench.report import Figure, Ratio, Report, argument_parser, finish
from grpo import GRPOTrainer

SHARES = (0.8, 1.0, 1.2)
GOAL = 0.85
SKIPPED = 2  # steps, until as many batches are under way as there will be


class _Step(TrainerCallback):
    """Sleeps in each step, and notes how long steps take."""

    def __init__(self, sleep_s: float) -> None:
        self.sleep_s, self.ends = sleep_s, [time.perf_counter()]

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        time.sleep(self.sleep_s)

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.ends.append(time.perf_counter())

    @property
    def seconds(self) -> list[float]:
        return [end - begin for begin, end in zip(self.ends, self.ends[1:], strict=False)][SKIPPED:]


def run(play: Play, model: Path, folder: Path, options: Any, *, lookahead: int, sleep_s: float) -> tuple[Any, Any]:
    """Seconds of each step, and of each batch of episodes that training waited for."""
    step, waits = _Step(sleep_s), []
    trainer: Any = make_trainer(
        GRPOTrainer,
        play,
        model,
        folder,
        options,
        max_tool_threads=options.rows * (1 + lookahead),
        generation_lookahead=lookahead,
        max_steps=SKIPPED + options.repetitions,
        learning_rate=0.0,
        save_strategy="no",
    )
    trainer.add_callback(step)
    generate = trainer._generate

    def timed(prompts: Any) -> Any:
        begun = time.perf_counter()
        try:
            return generate(prompts)
        finally:
            waits.append(time.perf_counter() - begun)

    trainer._generate = timed
    try:
        trainer.train()
    finally:
        trainer.close()
    return step.seconds, waits[SKIPPED:]


def measure(options: Any, folder: Path) -> Report:
    play = Play(options.rows, seed=7)
    model = save_model(folder / "model")
    with play.on():
        alone, episodes = run(play, model, folder / "alone", options, lookahead=0, sleep_s=0.0)
        episodes_s = statistics.median(episodes)
        own_s = statistics.median(alone) - episodes_s
        ratios, figures = [], [Figure(name="episodes of a batch", unit="s", values=tuple(episodes))]
        for share in SHARES:
            sleep_s = max(0.0, share * episodes_s - own_s)
            seconds = {
                lookahead: run(
                    play, model, folder / f"{share}-{lookahead}", options, lookahead=lookahead, sleep_s=sleep_s
                )[0]
                for lookahead in (0, options.lookahead)
            }
            bound = max(1.0, share) * episodes_s
            name = f"training of {share:g} of the episodes"
            turns, ahead = (seconds[lookahead] for lookahead in (0, options.lookahead))
            values = tuple(bound / each for each in ahead)
            ratios.append(Ratio(name=f"{name}: the larger of both / a step", values=values, goal=GOAL))
            gains = tuple(one / other for one, other in zip(turns, ahead, strict=True))
            ratios.append(Ratio(name=f"{name}: taking turns / {options.lookahead} ahead", values=gains))
            figures.append(Figure(name=f"{name}: a step", unit="s", values=tuple(ahead)))
    return Report(
        benchmark="multi_turn_ahead",
        settings={"multi_turn": options.rows, "turns": sum(play.turns), "lookahead": options.lookahead},
        ratios=tuple(ratios),
        figures=tuple(figures),
        notes=("Training sleeps but for its own forward and backward passes.",),
    )


def compare(options: Any) -> None:
    if options.short:
        options.rows, options.repetitions = 8, 1
    with tempfile.TemporaryDirectory(prefix="bench-multi_turn-") as folder:
        finish(measure(options, Path(folder)), options)


def main() -> None:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--rows", type=int, default=32, help="episodes of a batch")
    parser.add_argument("--lookahead", type=int, default=1, help="batches of episodes ahead")
    compare(parser.parse_args())


if __name__ == "__main__":
    main()
