"""An agent framework, unchanged, at a real door: what it asks of a model becomes one chain."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from examples.calculator_model import END
from grpo.faults.users_code import Worker
from grpo.model.messages import MessageTemplate
from grpo.rollout.agents.door import DoorServer
from grpo.rollout.agents.episode import AgentEpisode, Chain
from grpo.rollout.turns.episode import EpisodeLimits
from grpo.rollout.turns.sampler import Turn
from tests.support.speaking_engine import TOKENIZER, call

SAYS = [call("times", a=12, b=34), f"It is 408.{END}"]
LONG = 1 << 20


class Speaker:
    """Says one text after the other."""

    max_model_len = LONG

    def __init__(self, texts: list[str]) -> None:
        self.texts, self.asked = texts, list[str]()

    async def sample(self, token_ids: Sequence[int], **_: Any) -> Turn:
        ids = TOKENIZER(self.texts[len(self.asked)])["input_ids"]
        self.asked.append(TOKENIZER.decode(token_ids))
        return Turn(token_ids=ids, logprobs=[-1.0] * len(ids), finish_reason="stop")


def times(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


def text_of(chain: Chain, *, own: bool) -> str:
    """What the model has said, or what others have."""
    pairs = zip(chain.episode.token_ids, chain.episode.tool_mask, strict=True)
    return TOKENIZER.decode([token for token, is_own in pairs if is_own == own])


def test_pydantic_ai_agent_makes_one_chain() -> None:
    speaker, renderer = Speaker(SAYS), Worker("templates")

    def render(call: Callable[[], Any]) -> Any:
        return asyncio.wrap_future(renderer.run(call))

    episode = AgentEpisode(
        0,
        sampler=speaker,  # type: ignore[arg-type]
        template=MessageTemplate(TOKENIZER),
        limits=EpisodeLimits(max_completion_tokens=LONG, max_turn_tokens=LONG, max_tool_turns=9),
        render=render,
    )
    server = DoorServer("127.0.0.1", lambda line: None)
    try:
        _, door = server.admit(episode)
        model = OpenAIChatModel(door.model, provider=OpenAIProvider(base_url=door.url, api_key=door.key))
        agent = Agent(model, tools=[times], instructions="Use the calculator.")
        assert agent.run_sync("What is 12 times 34?").output == "It is 408."
    finally:
        server.close()
    chain = episode.chosen()
    assert chain is not None
    assert episode.num_dropped() == 0
    assert text_of(chain, own=True) == "".join(SAYS)
    assert text_of(chain, own=False) == "<t>408<e><a>"
    assert speaker.asked[1] == speaker.asked[0] + SAYS[0] + "<t>408<e><a>"
