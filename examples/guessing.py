"""An environment: a game with a state of its own. A model that was taught to guess numbers, most often wildly, begins
to guess in the middle of what is left. On a CPU in seven minutes, of which teaching takes three.

accelerate launch --config_file configs/cpu.yaml examples/guessing.py
"""

import argparse
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from examples.calculator_model import ASSISTANT, END, TOOL, USER, call, ensure_model
from grpo import GRPOConfig, GRPOTrainer

HIGHEST, GUESSES = 15, 4  # who always guesses in the middle finds every number
SHARE_OF_MIDDLES = 0.2


class Game:
    """One for each completion of a batch. It is given its secret by the data set, and scores itself."""

    def reset(self, secret: int, **_) -> str:
        """Begins a new game. What it returns stands behind the prompt."""
        self.secret, self.left, self.is_found = secret, GUESSES, False
        return f"1-{HIGHEST}"

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: Your guess.

        Returns:
            Whether the number is higher or lower, or that you have found it.
        """
        self.left -= 1
        if self.left < 0:
            return "over"
        self.is_found = number == self.secret
        return "found" if self.is_found else "higher" if number < self.secret else "lower"

    def get_reward(self) -> float:
        return float(self.is_found)


def lesson(rng: random.Random) -> list[tuple[str, bool]]:
    """A game as the model is taught it: played by halving what is left, or wildly."""
    game, in_the_middle = Game(), rng.random() < SHARE_OF_MIDDLES
    pieces = [(f"{USER}{game.reset(rng.randint(1, HIGHEST))}{END}{ASSISTANT}", False)]
    low, high, said = 1, HIGHEST, ""
    while said != "found" and game.left:
        number = (low + high) // 2 if in_the_middle else rng.randint(1, HIGHEST)
        said = game.guess(number)
        low, high = (number + 1, high) if said == "higher" else (low, number - 1)
        pieces += [(call("guess", number=number), True), (f"{TOOL}{said}{END}{ASSISTANT}", False)]
    return [*pieces, (END, True)]


def games(count: int, seed: int):
    """Columns `prompt`, a message that says nothing yet, and `secret`, which `reset` gets."""
    from datasets import Dataset

    rng = random.Random(seed)
    rows = [{"prompt": [{"role": "user", "content": ""}], "secret": rng.randint(1, HIGHEST)} for _ in range(count)]
    return Dataset.from_list(rows)


parser = argparse.ArgumentParser()
parser.add_argument("--model", help="of your own, whose chat template has tools; left out: one is made and taught")
parser.add_argument("--output_dir", default="runs/guessing")
parser.add_argument("--max_steps", type=int, default=40)
parser.add_argument("--seed", type=int, default=42)
args = parser.parse_args()

trainer = GRPOTrainer(
    model=args.model or str(ensure_model(Path("runs") / "guessing-model", lesson)),
    environment_factory=Game,
    args=GRPOConfig(
        output_dir=args.output_dir,
        per_device_train_batch_size=32,
        num_generations=8,
        max_completion_length=192,
        vllm_max_model_length=256,
        max_tool_calling_iterations=GUESSES,
        learning_rate=5e-4,
        lr_scheduler_type="constant",
        max_steps=args.max_steps,
        logging_steps=1,
        seed=args.seed,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        vllm_engine_kwargs={"enforce_eager": True},
    ),
    train_dataset=games(2048, seed=1),
)
trainer.train()
