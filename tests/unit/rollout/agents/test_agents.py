"""Agents at the door of the real trainer, over an engine that says what is written down."""

import json
from typing import Any

from openai import AsyncOpenAI

from grpo import agents
from tests.support.engines import Script
from tests.support.speaking_engine import Make, calculates, right, steps_of

TIMES = {
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


def times(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


async def calculator(door: Any, row: Any) -> dict[str, Any]:
    """As a user writes it: asks, runs the tools that are called, and goes on."""
    async with AsyncOpenAI(base_url=door.url, api_key=door.key) as client:
        messages = [*row["prompt"]]
        while True:
            answer = await client.chat.completions.create(model=door.model, messages=messages, tools=[TIMES])
            said = answer.choices[0].message
            messages.append(said.model_dump(exclude_none=True))
            if not said.tool_calls:
                return {"said": said.content}
            for call in said.tool_calls:
                result = times(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})


def test_an_agent_is_sampled_as_the_tool_loop_is(make: Make, script: Script) -> None:
    def reward(said: list[str], answer: list[int], **more: Any) -> list[float]:
        return [float(each == str(wanted)) for each, wanted in zip(said, answer, strict=True)]

    steps = steps_of(make(calculates, reward, rollout_func=agents(calculator)))
    print(steps)
    asked = [(tuple(sample.token_ids), sample.seed) for sample in script.samples]
    script.samples.clear()
    plain = steps_of(make(calculates, right, tools=[times]))
    assert sorted(asked) == sorted((tuple(sample.token_ids), sample.seed) for sample in script.samples)
    assert [step["reward"] for step in steps] == [step["reward"] for step in plain]
