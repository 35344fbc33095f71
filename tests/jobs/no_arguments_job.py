"""A script of a user's own that reads no arguments, in the manner of `examples/gsm8k.py`: all settings stand in it.

Its output folder and where it resumes from are what the launcher says. MODEL is a folder. The first attempt waits in
its fourth step until it is asked to stop.
"""

import os
import time
from pathlib import Path

from datasets import Dataset

from grpo import GRPOConfig, GRPOTrainer


def right_start(completions, answer, **_):
    """1.0 for the right sum, 0.5 if its first digit is right."""
    out = Path(os.environ["GRPO_OUTPUT_DIR"])
    logged = out / "metrics.jsonl"
    if os.environ["GRPO_ATTEMPT"] == "0" and logged.exists() and '"step": 3' in logged.read_text():
        while not list(out.glob("stop.*")):
            time.sleep(0.05)
    pairs = zip(completions, answer, strict=True)
    return [0.5 * text.startswith(right[0]) + 0.5 * text.startswith(right) for text, right in pairs]


sums = [(left, right) for left in range(10, 30) for right in range(10, 20)]
trainer = GRPOTrainer(
    model=os.environ["MODEL"],
    reward_funcs=right_start,
    args=GRPOConfig(
        output_dir="runs/hard-coded",
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=6,
        max_steps=6,
        logging_steps=1,
        save_steps=100,
        learning_rate=1e-4,
        gradient_checkpointing=False,
        report_to="none",
        vllm_max_model_length=64,
        vllm_engine_kwargs={"enforce_eager": True},  # an engine that is ready soon
    ),
    train_dataset=Dataset.from_dict(
        {
            "prompt": [f"{left}+{right}=" for left, right in sums],
            "answer": [str(left + right) for left, right in sums],
        }
    ),
)
trainer.train()
trainer.save_model()
