"""An agent that knows nothing of the trainer: it speaks OpenAI's protocol, with a tool, until it has an answer.

accelerate launch --config_file configs/cpu.yaml examples/agent.py
"""

import argparse
import json
import sys
from pathlib import Path

from openai import AsyncOpenAI

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import grpo
from examples.calculator_model import ensure_model, problems

CLIENT = AsyncOpenAI(api_key="given with each door")  # one for all rows: each client loads certificates anew
TOOLS: list = [
    {
        "type": "function",
        "function": {
            "name": "times",
            "description": "Multiply two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    }
]


async def agent(door, row):
    """Asks, does what is asked of it, and goes on; 1 where the last answer is right."""
    client = CLIENT.with_options(base_url=door.url, api_key=door.key)
    messages = [*row["prompt"]]
    for _ in range(3):
        answer = await client.chat.completions.create(model=door.model, messages=messages, tools=TOOLS)
        said = answer.choices[0].message
        messages.append(said)
        for call in said.tool_calls or []:
            try:
                numbers = json.loads(call.function.arguments)
                result = str(numbers["a"] * numbers["b"])
            except (ValueError, TypeError, KeyError) as error:
                result = f"error: {error}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if not said.tool_calls:
            break
    return {"solved": float(said.content == str(row["answer"]))}


def solved(solved, **_):
    """What the agent has found itself."""
    return solved


parser = argparse.ArgumentParser()
parser.add_argument("--model", help="taught as by examples/calculator_model.py; left out: one is made")
parser.add_argument("--output_dir", default="runs/agent")
parser.add_argument("--max_steps", type=int, default=40)
args = parser.parse_args()

trainer = grpo.GRPOTrainer(
    model=args.model or str(ensure_model(Path("runs") / "calculator-model")),
    reward_funcs=solved,
    rollout_func=grpo.agents(agent),
    args=grpo.GRPOConfig(
        output_dir=args.output_dir,
        per_device_train_batch_size=32,
        num_generations=8,
        max_completion_length=64,
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
