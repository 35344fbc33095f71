"""Images: a model that sees which colours are lit, and was not taught which one to name, learns that the lit one pays.
On a CPU in two minutes; vLLM needs a torchvision that fits your torch.

accelerate launch --config_file configs/cpu.yaml examples/quadrants.py

With `--grey` the pictures say nothing, and the reward stays at a quarter.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from examples.quadrants_model import ensure_model, pictures
from grpo import GRPOConfig, GRPOTrainer


def right_colour(completions, answer, **_):
    """1 where the answer is the colour that is lit, and nothing else."""
    return [float(said[0]["content"] == wanted) for said, wanted in zip(completions, answer, strict=True)]


parser = argparse.ArgumentParser()
parser.add_argument("--model", help="of your own, which takes images; left out: one is made and taught")
parser.add_argument("--grey", action="store_true", help="pictures without any colour, from which nothing can be learnt")
parser.add_argument("--output_dir", default="runs/quadrants")
parser.add_argument("--max_steps", type=int, default=60)
parser.add_argument("--seed", type=int, default=42)
args = parser.parse_args()

trainer = GRPOTrainer(
    model=args.model or str(ensure_model(Path("runs") / "quadrants-model")),
    reward_funcs=right_colour,
    args=GRPOConfig(
        output_dir=args.output_dir,
        per_device_train_batch_size=64,
        num_generations=8,
        max_completion_length=4,
        vllm_max_model_length=64,
        learning_rate=5e-4,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=20,  # or what some warm-ups have taught is put together within the first ten steps
        max_steps=args.max_steps,
        logging_steps=1,
        seed=args.seed,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        vllm_engine_kwargs={"enforce_eager": True},
    ),
    train_dataset=pictures(2048, seed=1, grey=args.grey),
)
trainer.train()

rewards = [line["reward"] for line in trainer.state.log_history if "reward" in line]
if trainer.accelerator.is_main_process and rewards:
    first, last = (sum(some) / len(some) for some in (rewards[:10], rewards[-10:]))
    print(f"mean reward of the first ten steps {first:.3f}, of the last ten {last:.3f}")
