"""Tools: a model that was taught to call a calculator, and seldom does, learns that it pays. On a CPU in five minutes.

accelerate launch --config_file configs/cpu.yaml examples/tools.py
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from examples.calculator_model import ensure_model, problems
from grpo import GRPOConfig, GRPOTrainer


def times(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first number.
        b: The second number.

    Returns:
        Their product.
    """
    return a * b


def right_answer(completions, answer, **_):
    """1 where the last message is the answer. A completion is a conversation: what the model and its tools said."""
    return [float(said[-1]["content"] == str(wanted)) for said, wanted in zip(completions, answer, strict=True)]


parser = argparse.ArgumentParser()
parser.add_argument("--model", help="of your own, whose chat template has tools; left out: one is made and taught")
parser.add_argument("--output_dir", default="runs/tools")
parser.add_argument("--max_steps", type=int, default=40)
parser.add_argument("--seed", type=int, default=42)
args = parser.parse_args()

trainer = GRPOTrainer(
    model=args.model or str(ensure_model(Path("runs") / "calculator-model")),
    reward_funcs=right_answer,
    tools=[times],
    args=GRPOConfig(
        output_dir=args.output_dir,
        per_device_train_batch_size=32,
        num_generations=8,
        max_completion_length=64,
        vllm_max_model_length=128,
        max_tool_calling_iterations=2,
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
    train_dataset=problems(2048, seed=1),
)
trainer.train()
