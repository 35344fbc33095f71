"""An agent with a loop of its own, over OpenAI's protocol."""

import json
from typing import Any

from openai import AsyncOpenAI
from transformers.utils import get_json_schema

from tests.support.made_up_tools import times

TIMES: Any = get_json_schema(times)


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
