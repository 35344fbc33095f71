"""A training job with engines whose first attempt comes to a step that does not end: meanwhile it loses a node.

Its output folder is the launcher's. MODEL is the demo's model; in the step HOLD_AT of attempt 0 rank 1 writes `held`
and waits. Writes what every reward saw: `seen-RANK.jsonl`.
"""

import json
import os
import time
from pathlib import Path

from grpo import GRPOConfig, GRPOTrainer  # first: it imports what others import, in less time

# isort: split
from datasets import Dataset

HOLD_AT, STEPS = 3, 6
rank, attempt = int(os.environ["RANK"]), int(os.environ["GRPO_ATTEMPT"])


def right_start(prompts, completions, answer, **_):
    """1.0 for the right sum, 0.5 if its first digit is right."""
    out, step = Path(trainer.args.output_dir), trainer.state.global_step
    with (out / f"seen-{rank}.jsonl").open("a") as lines:
        lines.write(json.dumps({"attempt": attempt, "step": step, "prompts": prompts}) + "\n")
    if (rank, attempt, step) == (1, 0, HOLD_AT):
        (out / "held").touch()
        time.sleep(600)
    pairs = zip(completions, answer, strict=True)
    return [0.5 * text.startswith(right[0]) + 0.5 * text.startswith(right) for text, right in pairs]


sums = [(left, right) for left in range(10, 30) for right in range(10, 20)]
trainer = GRPOTrainer(
    model=os.environ["MODEL"],
    reward_funcs=right_start,
    args=GRPOConfig(
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=6,
        max_steps=STEPS,
        logging_steps=1,
        save_steps=2,
        learning_rate=1e-4,
        gradient_checkpointing=False,
        check_rewards=False,  # the reward asks the trainer for the step
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
