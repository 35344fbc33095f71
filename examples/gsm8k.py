"""GRPO on grade-school maths with a reward of one's own. The two imports from `grpo` are all that differs from TRL.

accelerate launch --config_file configs/1node.yaml examples/gsm8k.py
accelerate launch --config_file configs/cpu.yaml examples/gsm8k.py --model MODEL --data FILE --max_steps 2 --no-bf16
"""

import argparse
import re

from datasets import load_dataset

from grpo import GRPOConfig, GRPOTrainer

SYSTEM_PROMPT = "Reason step by step. End with a line '#### ' and the answer as a number."


def last_number_reward(completions, answer, **_):
    """1.0 for the right number after '####', 0.5 if it is only the last number of the text, else 0.0."""
    rewards = []
    for completion, right in zip(completions, answer, strict=True):
        text = completion[0]["content"]
        numbers = [float(n.replace(",", "")) for n in re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)]
        marked = re.search(r"####\s*(-?\d[\d,]*(?:\.\d+)?)", text)
        if marked and float(marked[1].replace(",", "")) == right:
            rewards.append(1.0)
        else:
            rewards.append(0.5 if numbers and numbers[-1] == right else 0.0)
    return rewards


def to_prompt(row):
    """The columns that the trainer wants: `prompt`, a conversation, and `answer`, which the reward gets."""
    return {
        "prompt": [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": row["question"]}],
        "answer": float(row["answer"].split("####")[1].replace(",", "")),
    }


parser = argparse.ArgumentParser()
parser.add_argument("--model", default="Qwen/Qwen2.5-0.5B-Instruct")
parser.add_argument("--data", help="a local JSON or JSONL file with the columns question and answer")
parser.add_argument("--output_dir", default="runs/gsm8k")
parser.add_argument("--max_steps", type=int, default=-1)
parser.add_argument("--max_completion_length", type=int, default=512)
parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=True)
parser.add_argument("--deepspeed", help="a DeepSpeed configuration, for torchrun; accelerate brings its own")
args = parser.parse_args()

if args.data:
    dataset = load_dataset("json", data_files=args.data, split="train")
else:
    dataset = load_dataset("openai/gsm8k", "main", split="train")

trainer = GRPOTrainer(
    model=args.model,
    reward_funcs=last_number_reward,
    args=GRPOConfig(
        output_dir=args.output_dir,
        per_device_train_batch_size=8,
        num_generations=8,
        max_completion_length=args.max_completion_length,
        max_steps=args.max_steps,
        learning_rate=1e-6,
        bf16=args.bf16,
        deepspeed=args.deepspeed,
        logging_steps=1,
        report_to="tensorboard",
    ),
    train_dataset=dataset.map(to_prompt, remove_columns=["question"]),
)
trainer.train()
trainer.save_model(args.output_dir)
