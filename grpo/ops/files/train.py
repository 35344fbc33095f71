"""GRPO with a data set and a reward of my own.

grpo launch train.py                                            on all GPUs of this machine
grpo launch train.py --bf16 false --max_steps 2                 no GPU: does it run
grpo launch --nodes a,b train.py --config my.yaml --beta 0.01   the same line on every node: a YAML file, then flags
accelerate launch --config_file configs/1node.yaml train.py     without our launcher: 8 GPUs

Every field of `GRPOConfig` is a flag: TRL's (`learning_rate`, `num_generations`, …) and those of `vllm_mode="local"`.
"""

import random
import re
from dataclasses import dataclass, field

from datasets import Dataset, load_dataset

from grpo import GRPOConfig, GRPOTrainer  # before TRL, whose import it makes faster and quieter
from trl import TrlParser

SYSTEM_PROMPT = "Work it out step by step. End with a line '#### ' and the answer as a number."


@dataclass
class ScriptArguments:
    """Flags of this script alone. A new field is a new flag."""

    model: str = field(default="Qwen/Qwen2.5-0.5B-Instruct", metadata={"help": "Hub id, or a folder"})
    data: str | None = field(default=None, metadata={"help": "JSON lines with `question` and `answer`"})


# Defaults, overridden by a YAML file or a flag. A step trains on num_processes x per_device_train_batch_size x
# gradient_accumulation_steps completions, num_generations of each prompt: `grpo plan` shows the arithmetic.
DEFAULTS = {
    "output_dir": "runs/train",
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 4,
    "num_generations": 8,
    "max_completion_length": 256,
    "learning_rate": 1e-6,
    "beta": 0.0,  # no reference model
    "max_steps": 200,
    "save_steps": 50,
    "logging_steps": 1,
    "report_to": "none",  # or tensorboard, trackio, wandb, each to be installed; metrics.jsonl is always written
}


def training_data(file: str | None) -> Dataset:
    """The column `prompt`, a text or messages; the reward gets every other column by its name."""
    if file is not None:
        rows = load_dataset("json", data_files=file, split="train")  # or a data set of the hub: load_dataset(NAME)
    else:
        draw = random.Random(0)
        pairs = [(draw.randrange(10, 100), draw.randrange(10, 100)) for _ in range(2000)]
        rows = Dataset.from_list([{"question": f"what is {a} * {b}?", "answer": a * b} for a, b in pairs])
    # For a model without a chat template, a text: {"prompt": SYSTEM_PROMPT + "\n" + row["question"] + "\n"}
    return rows.map(
        lambda row: {
            "prompt": [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": row["question"]}]
        },
        remove_columns=["question"],
    )


def reward(completions, answer, **_) -> list[float]:
    """One number for each completion: 1 for the right answer, 0.1 for the right form, 0 else."""
    rewards = []
    for completion, right in zip(completions, answer, strict=True):
        text = completion if isinstance(completion, str) else completion[0]["content"]  # as the prompt is
        found = re.search(r"####\s*(-?[\d,]+)\s*$", text)
        said = found[1].replace(",", "") if found else None
        rewards.append(0.0 if said is None else 1.0 if said == str(right) else 0.1)
    return rewards


def main() -> None:
    parser = TrlParser(
        (ScriptArguments, GRPOConfig),
        allow_abbrev=False,  # an abbreviated flag is an error
        usage="train.py [--config FILE.yaml] [--OPTION VALUE ...]",
        epilog="One screen of it: --help | grep -A3 -e --model -e --data -e learning_rate; all of it: --help | less",
    )
    parser.set_defaults_with_config(**DEFAULTS)
    script, training = parser.parse_args_and_config()
    trainer = GRPOTrainer(
        model=script.model,
        reward_funcs=reward,  # or a list of them; rewards are added up
        args=training,
        train_dataset=training_data(script.data),
    )
    # `--resume_from_checkpoint auto`: from the newest complete checkpoint, if there is one.
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    trainer.save_model(training.output_dir)
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
