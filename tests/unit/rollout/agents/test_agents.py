"""Agents at the door of the real trainer, over an engine that says what is written down."""

import asyncio
import copy
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from openai import AsyncOpenAI, BadRequestError

from examples.calculator_model import TEMPLATE
from grpo import GRPOTrainer, agents
from tests.support.engines import Script
from tests.support.made_up_agents import calculator
from tests.support.made_up_tools import times
from tests.support.speaking_engine import TOKENIZER, Make, calculates, right, steps_of

CHANGING = TEMPLATE.replace("<u>", "<u>{{ '!' if messages | length > 2 }}", 1)
"""In a conversation that goes on, a user's messages are written in another way."""


def says_the_answer(said: list[str], answer: list[int], **more: Any) -> list[float]:
    return [float(each == str(wanted)) for each, wanted in zip(said, answer, strict=True)]


async def ask(door: Any, *texts: str) -> Any:
    """One answer to a conversation of a user alone."""
    async with AsyncOpenAI(base_url=door.url, api_key=door.key, max_retries=0) as client:
        messages: Any = [{"role": "user", "content": text} for text in texts]
        return (await client.chat.completions.create(model="x", messages=messages)).choices[0].message.content


def trained(trainer: GRPOTrainer) -> list[Any]:
    """Of each batch, what goes into the loss; filled while it trains."""
    batches: list[Any] = []
    make_batch = trainer._generate_and_score_completions

    def noted(inputs: Any) -> Any:
        output = make_batch(inputs)
        names = ("prompt_ids", "completion_ids", "completion_mask", "tool_mask", "sampling_per_token_logps")
        batches.append({name: output[name].tolist() for name in names})
        return output

    trainer._generate_and_score_completions = noted  # type: ignore[method-assign]
    return batches


def test_agent_rollout_matches_tool_loop(make: Make, script: Script) -> None:
    trainer = make(calculates, says_the_answer, rollout_func=agents(calculator), config={"learning_rate": 0.0})
    through_the_door = trained(trainer)
    steps = steps_of(trainer)
    asked = sorted((tuple(sample.token_ids), sample.seed) for sample in script.samples)
    script.samples.clear()
    trainer = make(calculates, right, tools=[times], config={"learning_rate": 0.0})
    by_tools = trained(trainer)
    plain = steps_of(trainer)
    assert asked == sorted((tuple(sample.token_ids), sample.seed) for sample in script.samples)
    assert [step["reward"] for step in steps] == [step["reward"] for step in plain]
    assert through_the_door == by_tools
    assert {0, 1} == {mask for row in by_tools[0]["tool_mask"] for mask in row}
    assert [step["agents/requests"] for step in steps] == [step["rollout/turns"] for step in plain] == [1.5, 1.5]
    assert [step["agents/dropped_tokens"] for step in steps] == [0.0, 0.0]


def test_agent_rollout_after_engine_death_is_unchanged(make: Make, script: Script) -> None:
    plain = trained(trainer := make(calculates, says_the_answer, rollout_func=agents(calculator)))
    trainer.train()
    again = trained(trainer := make(calculates, says_the_answer, rollout_func=agents(calculator)))
    before = len(script.started)
    script.deaths.append(("submit", script.asked["submit"] + 3))
    trainer.train()
    assert len(script.started) > before
    assert again == plain


def test_agent_rollout_gives_conversation_to_rewards_and_samples(make: Make, tmp_path: Path) -> None:
    shown: list[Any] = []

    def reward(completions: list[Any], said: list[str], **more: Any) -> list[float]:
        shown.extend(zip(completions, said, strict=True))
        return [float(len(each)) for each in completions]

    steps_of(make(calculates, reward, rollout_func=agents(calculator)))
    for messages, said in shown:
        assert messages[-1]["content"] == said
        assert [message["role"] for message in messages] == ["assistant", "tool", "assistant"][-len(messages) :]
    assert {len(messages) for messages, _ in shown} == {1, 3}
    (first, *_) = sorted((tmp_path / "run" / "completions").glob("step-*.parquet"))
    texts = pq.read_table(first)["completion"].to_pylist()
    assert any(text.startswith("assistant: [{") and "\n\ntool: " in text for text in texts)


def test_failed_agents_leave_rows_out(
    make: Make, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[int] = []
    begun: list[int] = []
    ended: list[int] = []
    passed_s = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed_s[0])
    monkeypatch.setattr("grpo.rollout.agents.rollout.time", clock)

    async def agent(door: Any, row: Any) -> Any:
        number = len(begun) % 8
        begun.append(number)
        if number == 2:
            while len(ended) % 8 != 7:
                await asyncio.sleep(0.01)
            ended.append(number)
            passed_s[0] += 1e4
            await asyncio.sleep(600)
        try:
            said = None if number == 4 else await ask(door, "1*2")
            if number == 0:
                raise ZeroDivisionError("of the agent")
            if number == 1:
                sys.exit(3)
            if number == 3:
                return [said]
            if number == 5:
                return {"completion_ids": [1]}
            return {"said": said}
        finally:
            ended.append(number)

    def reward(said: list[str], **more: Any) -> list[float]:
        shown.append(len(said))
        assert None not in said
        return [float(number) for number in range(len(said))]

    config = {"agent_timeout": 2000.0, "max_agents_at_once": 3}
    steps = steps_of(make(lambda text, seed: "5<e>", reward, rollout_func=agents(agent), config=config))
    assert shown == [2, 2]
    assert [step["agents/failed"] for step in steps] == [6.0, 6.0]
    assert [step["rollout/refused"] for step in steps] == [0.0, 0.0]
    screen = capsys.readouterr().out
    for why in (
        "ZeroDivisionError: of the agent",
        "RuntimeError: SystemExit: 3",
        "TimeoutError: it has not ended after 2000 s (agent_timeout)",
        "TypeError: it returned list: an agent returns a dict of columns, or None",
        "it ended without having asked for anything",
        "ValueError: it returned a column 'completion_ids', which is the trainer's own",
    ):
        assert screen.count(f"failed: {why}") == 1, why


def test_agent_cancelling_itself_fails_alone(make: Make) -> None:
    begun: list[int] = []

    async def agent(door: Any, row: Any) -> Any:
        begun.append(len(begun))
        if begun[-1] == 0:
            raise asyncio.CancelledError
        return {"said": await ask(door, "1*2")}

    config = {"max_steps": 1}
    rewards: Any = lambda said, **_: [0.0] * len(said)  # noqa: E731
    (step,) = steps_of(make(lambda text, seed: "5<e>", rewards, rollout_func=agents(agent), config=config))
    assert step["agents/failed"] == 1.0


def test_agents_over_max_failed_agents_end_job(make: Make) -> None:
    async def agent(door: Any, row: Any) -> Any:
        raise ZeroDivisionError("of the agent")

    trainer = make(calculates, says_the_answer, rollout_func=agents(agent), config={"max_failed_agents": 9})
    message = r"more than 9 agents have failed .*GRPO-619\]; the first one: the agent of row 0 failed: ZeroDivision"
    with pytest.raises(RuntimeError, match=message):
        trainer.train()


def test_agent_rollout_over_timeout_names_waiting_rows(make: Make) -> None:
    cancelled = threading.Event()

    async def agent(door: Any, row: Any) -> Any:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    config = {"rollout_timeout": 10.0, "agent_timeout": 9.0, "tool_timeout": 0.5, "max_agents_at_once": 1}
    trainer = make(calculates, says_the_answer, rollout_func=agents(agent), config=config)
    with pytest.raises(TimeoutError, match=r"GRPO-608\]; it waits for the agents of rows \d"):
        trainer.train()
    assert cancelled.wait(60.0)


def test_agent_with_too_long_prompt_counts_as_refused(make: Make) -> None:
    rows: list[int] = []

    async def agent(door: Any, row: Any) -> Any:
        number = len(rows) % 8
        rows.append(number)
        if number == 1:
            with pytest.raises(BadRequestError, match="context"):
                await ask(door, "7" * 200)
            return None
        return {"said": await ask(door, "7" * (200 if number == 0 else 5))}

    steps = steps_of(make(lambda text, seed: "5<e>", lambda said, **_: [0.0] * len(said), rollout_func=agents(agent)))
    assert [step["rollout/refused"] for step in steps] == [2.0, 2.0]
    assert [step["agents/failed"] for step in steps] == [0.0, 0.0]


def test_agent_command_returns_columns_to_rewards(make: Make, tmp_path: Path) -> None:
    program = tmp_path / "agent.py"
    program.write_text(
        "import json, os, sys, urllib.request\n"
        "row = json.load(sys.stdin)\n"
        "body = json.dumps({'messages': row['prompt']}).encode()\n"
        "headers = {'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']}\n"
        "request = urllib.request.Request(os.environ['OPENAI_BASE_URL'] + '/chat/completions', body, headers)\n"
        "said = json.load(urllib.request.urlopen(request))['choices'][0]['message']['content']\n"
        "print(json.dumps({'said': said, 'length': len(said)}))\n"
    )

    def reward(said: list[str], length: list[int], **more: Any) -> list[float]:
        assert said == ["17"] * 8
        return [float(each) for each in length]

    config = {"max_steps": 1}
    rollout = agents(f"{sys.executable} {program}")
    (step,) = steps_of(make(lambda text, seed: "17<e>", reward, rollout_func=rollout, config=config))
    assert step["reward"] == 2.0


def test_agents_with_invalid_agent_raises() -> None:
    def blocks(door: Any, row: Any) -> None: ...

    with pytest.raises(TypeError, match="agent is 'blocks', which is no coroutine function"):
        agents(blocks)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="agent is 'no-such-program --x': there is no such command"):
        agents("no-such-program --x")
    with pytest.raises(TypeError, match=r"grpo.agents is for grpo.GRPOTrainer, and this is SimpleNamespace"):
        agents(calculator)([], SimpleNamespace())


def test_agent_rollout_with_changing_template_raises(make: Make) -> None:
    changing = copy.deepcopy(TOKENIZER)
    changing.chat_template = CHANGING
    with pytest.raises(ValueError, match="GRPO-219"):
        make(calculates, says_the_answer, rollout_func=agents(calculator), processing_class=changing)


def test_agent_rollout_without_chat_template_raises(make: Make) -> None:
    plain = copy.deepcopy(TOKENIZER)
    plain.chat_template = None
    data = Dataset.from_list([{"prompt": "1*2", "answer": 2}] * 8)
    with pytest.raises(ValueError, match="no chat template"):
        make(
            calculates,
            says_the_answer,
            rollout_func=agents(calculator),
            processing_class=plain,
            train_dataset=data,
        )
