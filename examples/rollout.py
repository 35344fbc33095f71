"""A rollout function: an agent's loop of one's own. Every row goes its own way, token ids in and token ids out.

accelerate launch --config_file configs/cpu.yaml examples/rollout.py
"""

import argparse
import asyncio
import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from examples.calculator_model import ensure_model, problems
from grpo import GRPOConfig, GRPOTrainer

MAX_TURNS = 3
MAX_TOKENS = 64


async def one_row(row, prompt, trainer):
    """A conversation: the model speaks, what it asks is worked out and put behind, until it asks no more."""
    tokenizer = trainer.processing_class
    ids: list[int] = []
    logprobs: list[float] = []
    mask: list[int] = []
    for number in range(MAX_TURNS):
        left = MAX_TOKENS - len(ids)
        turn = await trainer.vllm_generation.sample([*prompt, *ids], row=row, turn=number, max_tokens=left)
        ids += turn.token_ids
        logprobs += turn.logprobs
        mask += [1] * len(turn.token_ids)
        asked = re.search(r"<c>times(.*)</c>", tokenizer.decode(turn.token_ids))
        if asked is None:
            break
        try:
            numbers = json.loads(asked[1])
            result = str(numbers["a"] * numbers["b"])
        except (ValueError, TypeError, KeyError) as error:
            result = f"error: {error}"
        said = tokenizer(f"<t>{result}<e><a>")["input_ids"]
        if len(ids) + len(said) >= MAX_TOKENS:
            break
        ids += said
        logprobs += [0.0] * len(said)
        mask += [0] * len(said)  # the model has not said it: it is not trained on
    return ids, logprobs, mask


def rollout(prompts, trainer):
    """What TRL trains on, for this rank's prompts."""
    prompt_ids = trainer.processing_class.apply_chat_template(prompts, add_generation_prompt=True, return_dict=False)

    async def all_rows():
        return await asyncio.gather(*(one_row(row, prompt, trainer) for row, prompt in enumerate(prompt_ids)))

    ids, logprobs, mask = zip(*asyncio.run(all_rows()), strict=True)
    return {"prompt_ids": prompt_ids, "completion_ids": [*ids], "logprobs": [*logprobs], "env_mask": [*mask]}


def right_answer(completions, answer, **_):
    """1 where the text ends with the answer."""
    return [float(said[0]["content"].endswith(str(wanted))) for said, wanted in zip(completions, answer, strict=True)]


parser = argparse.ArgumentParser()
parser.add_argument("--model", help="taught as by examples/calculator_model.py; left out: one is made")
parser.add_argument("--output_dir", default="runs/rollout")
parser.add_argument("--max_steps", type=int, default=40)
args = parser.parse_args()

trainer = GRPOTrainer(
    model=args.model or str(ensure_model(Path("runs") / "calculator-model")),
    reward_funcs=right_answer,
    rollout_func=rollout,
    args=GRPOConfig(
        output_dir=args.output_dir,
        per_device_train_batch_size=32,
        num_generations=8,
        max_completion_length=MAX_TOKENS,
        vllm_max_model_length=128,
        learning_rate=5e-4,
        lr_scheduler_type="constant",
        max_steps=args.max_steps,
        logging_steps=1,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        vllm_engine_kwargs={"enforce_eager": True},
    ),
    train_dataset=problems(2048, seed=1),
)
trainer.train()
