"""Random batches of episodes through TRL's own `_tool_call_loop` and through ours: everything is the same.

The model, the tools and the template are made up, and follow from what they are given. Two of the tools share a
counter: their answers say in which order rows have called them.
"""

import asyncio
import copy
import itertools
import random
import threading
import types
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
from trl.trainer import grpo_trainer

from grpo.rollout.turns.episode import EpisodeLimits
from grpo.rollout.turns.main_calls import MainThread
from grpo.rollout.turns.rollouts import EpisodeRow, Rollouts, as_trl_takes_them
from grpo.rollout.turns.sampler import Turn
from grpo.rollout.turns.tools import Message, Toolbox, ToolRunner

BATCHES = 400
FIRST_CALL, OTHER = 100, 104  # tokens: calls of the tools by number, and of something that is no function
NAMES = ("counts", "fails", "waits", "unknown")


def rng(*seed: Any) -> random.Random:
    return random.Random(zlib.crc32(repr(seed).encode()))


def sampled(token_ids: Sequence[int], most: int) -> tuple[list[int], list[float]]:
    """What the model says behind these tokens."""
    source = rng("model", tuple(token_ids))
    ids = [source.choice([*range(1, 10), *range(FIRST_CALL, OTHER + 1)]) for _ in range(source.randint(1, 14))][:most]
    return ids, [-(token % 7) / 8 - 0.25 for token in ids]


def parsed(ids: Sequence[int]) -> Message:
    if not ids:
        return {}
    calls: list[Message] = []
    for number, token in enumerate(token for token in ids if token >= FIRST_CALL):
        if token == OTHER:
            calls.append({"type": "other", "name": "weird"})
        else:
            arguments = {"x": 1, "wrong": 2} if token == FIRST_CALL + 1 else {"x": len(ids) + number}
            function = {"name": NAMES[token - FIRST_CALL], "arguments": arguments}
            calls.append({"type": "function", "function": function})
    message = {"role": "assistant", "content": " ".join(map(str, ids))}
    return {**message, "tool_calls": calls[:3]} if calls else message


def suffix(messages: Sequence[Message]) -> list[int]:
    source = rng("template", [(message["name"], str(message["content"])) for message in messages])
    return [source.randint(50, 60) for _ in range(source.randint(1, 6))]


def make_toolbox() -> Toolbox:
    count = itertools.count()

    def counts(x: int) -> str:
        return f"{x}, call {next(count)}"

    def fails(x: int) -> str:
        raise RuntimeError(f"call {next(count)} fails")

    async def waits(x: int) -> Any:
        await asyncio.sleep(0)
        if x % 3 == 0:
            raise ValueError(f"no {x}")
        return {"x": x}

    return Toolbox(sync={"counts": counts, "fails": fails}, asynchronous={"waits": waits})


class Batch:
    """Prompts and limits, drawn at random."""

    def __init__(self, seed: int) -> None:
        source = random.Random(seed)
        self.prompts = [
            [source.randint(1, 9) for _ in range(source.randint(1, 8))] for _ in range(source.randint(1, 4))
        ]
        self.most = source.randint(3, 60)
        self.turns = source.choice([1, 2, 3, 10**9])
        self.model_len = max(map(len, self.prompts)) + source.choice([2, 10, 40, 200])
        self.sampling: dict[str, Any] = {}

    def answer(self, token_ids: Sequence[int]) -> tuple[list[int], list[float]]:
        return sampled(token_ids, min(self.most, self.model_len - len(token_ids)))

    # Of `Sampler` and `Template`, as `Rollouts` takes them.

    @property
    def max_model_len(self) -> int:
        return self.model_len

    async def sample(self, token_ids: Sequence[int], *, row: int, max_tokens: int | None = None, **_: None) -> Turn:
        for _ in range(rng("time", row, len(token_ids)).randint(0, 9)):
            await asyncio.sleep(0)
        ids, logprobs = sampled(token_ids, min(max_tokens or self.most, self.model_len - len(token_ids)))
        return Turn(token_ids=ids, logprobs=logprobs, finish_reason="stop")

    def parse(self, token_ids: list[int], *, prefix: list[int], schema: Any) -> Message:
        return parsed(token_ids)

    def tool_suffix(self, messages: list[Message]) -> list[int]:
        return suffix(messages)


def trls(batch: Batch, loop: asyncio.AbstractEventLoop) -> tuple[Any, ...]:
    toolbox, rows = make_toolbox(), len(batch.prompts)

    def single_turn(prompts: Any, *_: Any, **__: Any) -> Any:
        said = [batch.answer(prompt) for prompt in prompts]
        return [list(ids) for ids, _ in said], [list(logprobs) for _, logprobs in said]

    engine = types.SimpleNamespace(model_config=types.SimpleNamespace(max_model_len=batch.model_len))
    trainer = types.SimpleNamespace(
        max_tool_calling_iterations=batch.turns,
        _sync_tool_dicts=[toolbox.sync] * rows,
        _async_tool_dicts=[toolbox.asynchronous] * rows,
        async_loop=loop,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_generation=types.SimpleNamespace(llm=types.SimpleNamespace(llm_engine=engine)),
        max_completion_length=batch.most,
        _get_tool_suffix_ids=suffix,
        _is_vlm=False,
        tools=[print],
        environment_factories=None,
        _generate_single_turn=single_turn,
        _tokenizer=None,
    )
    ids, logprobs = single_turn(batch.prompts)
    messages = [[{"role": "user", "content": "?"}] for _ in range(rows)]
    completions = [[parsed(said)] for said in ids]
    call = grpo_trainer.GRPOTrainer._tool_call_loop
    return call(trainer, messages, copy.deepcopy(batch.prompts), ids, completions, logprobs, None, {})


def ours(batch: Batch, loop: asyncio.AbstractEventLoop) -> tuple[Any, ...]:
    toolbox, main = make_toolbox(), MainThread()
    rollouts = Rollouts(
        limits=EpisodeLimits(max_completion_tokens=batch.most, max_turn_tokens=batch.most, max_tool_turns=batch.turns),
        tools=ToolRunner(timeout_s=60, main=main, max_threads=None, max_abandoned=0),
        is_function=False,
        prepare=lambda: None,
        template=batch,
        rows_of=lambda prompts: [],
        on_end=lambda: None,
        loop=loop,
    )

    async def prompt(ids: list[int]) -> list[int]:
        return ids

    rows = [EpisodeRow(prompt=partial(prompt, ids), toolbox=toolbox, schema=None) for ids in batch.prompts]
    tools = rollouts.tools.begin(len(rows))
    future = rollouts.start(rows, None, batch, tools)  # type: ignore[arg-type]
    future.add_done_callback(lambda _: main.wake())
    while not future.done():
        main.serve(60, left_s=60, check=lambda: None)
    return as_trl_takes_them(future.result(), [None] * len(batch.prompts), tools.counts)


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_rollouts_on_random_batches_match_trl_tool_call_loop(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parse(tokenizer: Any, ids: list[int], prefix: Any = None, tools: Any = None) -> Message:
        return parsed(ids)

    monkeypatch.setattr(grpo_trainer, "parse_response", parse)
    ways: dict[str, Callable[..., tuple[Any, ...]]] = {"TRL": trls, "ours": ours}
    num_with_tools = num_shared = 0
    for seed in range(BATCHES):
        expected, found = (way(Batch(seed), loop) for way in ways.values())
        assert found == expected, seed
        num_with_tools += any(0 in mask for mask in expected[0])
        num_shared += sum("call" in str(said) for said in expected[1]) > 1
    assert num_with_tools > BATCHES / 3
    assert num_shared > BATCHES / 10
