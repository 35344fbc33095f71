"""A training job of the calculator at learning rate 0, whose episodes are the trainer's own, or an agent's.

`python agent_job.py WAY MODEL OUTPUT_DIR`. WAY: "tools"; "agents", a coroutine that speaks OpenAI's protocol; "struck",
which waits in the second step, with the answers of its first turns, until the test writes `<output_dir>/go-on`. Writes
what each rank trains on to `<output_dir>/ranks/trained-<rank>.jsonl`, and the pids of its engines' hosts beside it.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import grpo

# isort: split
from openai import AsyncOpenAI
from transformers.utils import get_json_schema

sys.path.append(str(Path(__file__).resolve().parents[2]))
from examples.calculator_model import problems
from tests.support.made_up_tools import times

way, model, out = sys.argv[1], sys.argv[2], Path(sys.argv[3])
CLIENT = AsyncOpenAI(api_key="given with each door")
TOOLS: list[Any] = [get_json_schema(times)]


async def agent(door: Any, row: Any) -> dict[str, Any]:
    client = CLIENT.with_options(base_url=door.url, api_key=door.key)
    messages = [*row["prompt"]]
    while True:
        answer = await client.chat.completions.create(model=door.model, messages=messages, tools=TOOLS)
        said = answer.choices[0].message
        messages.append(said)
        if not said.tool_calls:
            return {"said": said.content}
        if way == "struck" and trainer.state.global_step == 1:
            (out / "at-agents").touch()
            while not (out / "go-on").exists():
                await asyncio.sleep(0.05)
        for call in said.tool_calls:
            try:
                result: Any = times(**json.loads(call.function.arguments))
            except TypeError as error:
                result = {"error": str(error)}
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})


def right(completions: list[Any], answer: list[int], **_: Any) -> list[float]:
    return [float(said[-1]["content"] == str(wanted)) for said, wanted in zip(completions, answer, strict=True)]


class Noting(grpo.GRPOTrainer):
    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs)
        names = ("prompt_ids", "completion_ids", "completion_mask", "tool_mask", "sampling_per_token_logps")
        (out / "ranks").mkdir(exist_ok=True)
        rank = self.accelerator.process_index
        with (out / "ranks" / f"trained-{rank}.jsonl").open("a") as lines:
            lines.write(json.dumps({name: output[name].tolist() for name in names}) + "\n")
        clients = self._local.engines.clients if self._local is not None else ()
        (out / "ranks" / f"{rank}.json").write_text(json.dumps({"hosts": [client.pid for client in clients]}))
        return output


trainer = Noting(
    model=model,
    reward_funcs=right,
    args=grpo.GRPOConfig(
        output_dir=str(out),
        per_device_train_batch_size=32,
        num_generations=8,
        max_completion_length=64,
        vllm_max_model_length=128,
        learning_rate=0.0,
        max_steps=2,
        logging_steps=1,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        vllm_engine_kwargs={"enforce_eager": True},
    ),
    train_dataset=problems(64, seed=1),
    **({"tools": [times]} if way == "tools" else {"rollout_func": grpo.agents(agent)}),  # type: ignore[arg-type]
)
trainer.train()
trainer.accelerator.end_training()
