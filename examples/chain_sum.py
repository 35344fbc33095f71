"""A task of reasoning-gym: sums and differences of two digits, with questions held out that training never sees.

accelerate launch --config_file configs/cpu.yaml examples/chain_sum.py

The model is made here, and taught by examples of which every fifth is wrong. Needs `pip install 'grpo-local[tasks]'`.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from examples.calculator_model import END, ensure_model
from grpo import GRPOConfig, GRPOTrainer
from grpo.ops.train.reasoning import load_tasks, reasoning_gym_answer

QUESTION = "State the final answer to the following arithmetic problem: {} {} {} ="


def lesson(rng):
    """A question, and what the model is taught to answer it."""
    a, b, sign = rng.randint(1, 9), rng.randint(1, 9), rng.choice("+-")
    right = a + b if sign == "+" else a - b
    answer = right if rng.random() < 0.8 else rng.randint(-8, 18)
    return [(QUESTION.format(a, sign, b), False), (f"{answer}{END}", True)]


parser = argparse.ArgumentParser()
parser.add_argument("--model", help="taught as above; left out: one is made")
parser.add_argument("--output_dir", default="runs/chain_sum")
parser.add_argument("--max_steps", type=int, default=40)
args = parser.parse_args()

settings = {"chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}
data = load_tasks("reasoning_gym:chain_sum", size=96, test_size=32, seed=42, settings=settings)

trainer = GRPOTrainer(
    model=args.model or str(ensure_model(Path("runs") / "chain-sum-model", lesson)),
    reward_funcs=reasoning_gym_answer,
    args=GRPOConfig(
        output_dir=args.output_dir,
        per_device_train_batch_size=64,
        num_generations=8,
        num_generations_eval=4,
        max_completion_length=4,
        vllm_max_model_length=128,
        learning_rate=5e-4,
        lr_scheduler_type="constant",
        max_steps=args.max_steps,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=args.max_steps // 2,
        eval_on_start=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        vllm_engine_kwargs={"enforce_eager": True},
    ),
    train_dataset=data["train"],
    eval_dataset=data["test"],
)
trainer.train()
