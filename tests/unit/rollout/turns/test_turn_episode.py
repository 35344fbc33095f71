"""One episode: budgets, masks, log-probabilities, and where it ends; a model and a template made of letters."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from grpo.rollout.turns.episode import Episode, EpisodeLimits, run_episode
from grpo.rollout.turns.main_calls import MainThread
from grpo.rollout.turns.sampler import Turn
from grpo.rollout.turns.tools import Toolbox, ToolRunner

PROMPT = [9, 9, 9]
CALL, END = 1, 2


class Model:
    """Says what is written down, turn by turn."""

    def __init__(self, *turns: list[int], refused_from: int = 99) -> None:
        self.turns, self.refused_from, self.max_model_len = turns, refused_from, 100
        self.asked: list[tuple[list[int], int | None]] = []

    async def sample(self, token_ids: Sequence[int], *, row: int, max_tokens: int | None = None, **_: None) -> Turn:
        turn = len(self.asked)
        self.asked.append((list(token_ids), max_tokens))
        if turn >= self.refused_from:
            return Turn(token_ids=[], logprobs=[], finish_reason=None, refusal="too long")
        said = self.turns[turn][:max_tokens]
        return Turn(token_ids=said, logprobs=[-float(token) for token in said], finish_reason="stop")


class Letters:
    """A message calls a tool if its tokens do; a tool's message is as many 7s as it is long."""

    def parse(self, token_ids: list[int], *, prefix: list[int], schema: Any) -> dict[str, Any]:
        calls = [{"type": "function", "function": {"name": "tool", "arguments": {}}}] * token_ids.count(CALL)
        message: dict[str, Any] = {"role": "assistant", "content": str(token_ids)}
        return {**message, "tool_calls": calls} if calls else message

    def tool_suffix(self, messages: list[dict[str, Any]]) -> list[int]:
        return [7] * sum(len(message["content"]) for message in messages)


def episode(
    model: Model,
    *,
    result: str = "xx",
    max_completion_tokens: int = 20,
    max_turn_tokens: int = 20,
    max_model_len: int = 100,
    turns: int = 9,
) -> Episode:
    limits = EpisodeLimits(
        max_completion_tokens=max_completion_tokens,
        max_turn_tokens=max_turn_tokens,
        max_tool_turns=turns,
    )
    model.max_model_len = max_model_len
    return asyncio.run(
        run_episode(
            0,
            PROMPT,
            model,  # type: ignore[arg-type]
            limits=limits,
            template=Letters(),
            tools=ToolRunner(timeout_s=9, main=MainThread(), max_threads=1, max_abandoned=0),
            toolbox=Toolbox(sync={"tool": lambda: result}),
        )
    )


def roles(found: Episode) -> str:
    return "".join(message["role"][0] for message in found.messages)


def test_episode_without_tool_call_takes_one_turn() -> None:
    found = episode(Model([5, END]))
    assert (found.token_ids, found.logprobs, found.tool_mask) == ([5, END], [-5.0, -2.0], [1, 1])
    assert roles(found) == "a"


def test_episode_of_three_turns_has_exact_tokens_masks_and_logprobs() -> None:
    model = Model([5, CALL], [CALL, 6, CALL], [8, END])
    found = episode(model)
    assert found.token_ids == [5, CALL, 7, 7, CALL, 6, CALL, 7, 7, 7, 7, 8, END]
    assert found.tool_mask == [1, 1, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1]
    assert found.logprobs == [-5, -1, 0, 0, -1, -6, -1, 0, 0, 0, 0, -8, -2]
    assert roles(found) == "atatta"
    assert found.first_turn == 2
    assert model.asked == [  # exactly the tokens that were sampled, never text that is tokenised again
        (PROMPT, None),
        ([*PROMPT, 5, CALL, 7, 7], 16),
        ([*PROMPT, 5, CALL, 7, 7, CALL, 6, CALL, 7, 7, 7, 7], 9),
    ]


@pytest.mark.parametrize(
    ("limits", "result"),
    [({"max_completion_tokens": 5}, "xxxx"), ({"max_model_len": 7}, "xx"), ({}, "x" * 1_000_000)],
    ids=["the completion", "the context", "a megabyte"],
)
def test_episode_with_too_long_result_drops_tool_call(limits: dict[str, int], result: str) -> None:
    model = Model([5, CALL], [6, END])
    found = episode(model, result=result, **limits)
    assert (found.token_ids, found.tool_mask, roles(found)) == ([5, CALL], [1, 1], "a")
    assert len(model.asked) == 1


def test_episode_with_result_filling_completion_ends() -> None:
    """TRL samples once more there and throws everything away."""
    model = Model([5, CALL], [6, END])
    found = episode(model, max_completion_tokens=4)
    assert (found.token_ids, found.tool_mask, roles(found)) == ([5, CALL, 7, 7], [1, 1, 0, 0], "at")
    assert len(model.asked) == 1


def test_episode_last_turn_is_cut_at_completion_limit() -> None:
    found = episode(Model([5, CALL], [6, 6, 6, 6, END]), max_completion_tokens=6)
    assert found.token_ids == [5, CALL, 7, 7, 6, 6]


def test_episode_with_max_turn_tokens_cuts_later_turn() -> None:
    """As with `max_tokens` in generation_kwargs; of the first turn the engine knows it."""
    model = Model([5, CALL], [6, 6, 6, 6, END])
    assert episode(model, max_turn_tokens=3).token_ids == [5, CALL, 7, 7, 6, 6, 6]
    assert [asked for _, asked in model.asked] == [None, 3]


def test_episode_with_max_tool_turns_stops_calling_tools() -> None:
    found = episode(Model([CALL], [CALL], [CALL], [CALL]), turns=2)
    assert found.token_ids == [CALL, 7, 7, CALL, 7, 7, CALL]
    assert roles(found) == "atata"


def test_episode_with_refused_prompt_or_turn_ends() -> None:
    found = episode(Model(refused_from=0))
    assert (found.refusal, found.token_ids, found.messages) == ("too long", [], [])
    found = episode(Model([5, CALL], refused_from=1))
    assert (found.refusal, found.token_ids, roles(found)) == (None, [5, CALL], "a")
