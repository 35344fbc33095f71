"""What is recorded of an agent's requests, over a model that says what is written down."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from grpo.model.messages import Message, Tools
from grpo.rollout.agents.episode import AgentEpisode
from grpo.rollout.agents.protocol import AgentReply, RequestError
from grpo.rollout.turns.episode import EpisodeLimits
from grpo.rollout.turns.sampler import Turn

USER, MODEL, END = 1, 2, 3
HI: Message = {"role": "user", "content": "hi"}


class Sampler:
    """Says the length of what it is asked, until asked otherwise."""

    def __init__(self, max_model_len: int = 100) -> None:
        self.max_model_len = max_model_len
        self.asked: list[tuple[list[int], int, tuple[str, ...]]] = []
        self.gate: asyncio.Event | None = None

    async def sample(self, token_ids: Sequence[int], *, row: int, max_tokens: int, stop: Sequence[str] = ()) -> Turn:
        self.asked.append(([*token_ids], max_tokens, tuple(stop)))
        if len(token_ids) >= self.max_model_len:
            return Turn(token_ids=[], logprobs=[], finish_reason=None, refusal="the prompt is too long")
        if self.gate is not None:
            await self.gate.wait()
        said = [10 + len(token_ids), END][:max_tokens]
        return Turn(token_ids=said, logprobs=[-0.5] * len(said), finish_reason="stop" if END in said else "length")


class Template:
    """A word of three letters is a token; a conversation ends where the model goes on."""

    def render(self, messages: list[Message], tools: Tools) -> list[int]:
        return [*([9] if tools else []), *self.suffix(messages)]

    def suffix(self, messages: list[Message]) -> list[int]:
        found = []
        for message in messages:
            if message["content"] == "unspeakable":
                raise ValueError("no such word")
            found += [MODEL if message["role"] == "assistant" else USER, *map(len, message["content"].split()), END]
        return [*found, MODEL]

    def parse(self, token_ids: list[int], *, prefix: list[int], tools: Tools) -> Message:
        return {"role": "assistant", "content": " ".join(map(str, token_ids[:1])), "thinking": "hm"}


class Agent:
    """An episode, to be asked in a test."""

    def __init__(self, *, most: int = 40, turn: int = 40, max_model_len: int = 100) -> None:
        self.sampler = Sampler(max_model_len)

        async def render(call: Callable[[], Any]) -> Any:
            await asyncio.sleep(0)
            return call()

        limits = EpisodeLimits(max_completion_tokens=most, max_turn_tokens=turn, max_tool_turns=0)
        self.episode = AgentEpisode(
            0,
            sampler=self.sampler,  # type: ignore[arg-type]
            template=Template(),  # type: ignore[arg-type]
            limits=limits,
            render=render,
        )

    def chat(self, *messages: Message, **more: Any) -> AgentReply:
        return asyncio.run(self.asks(*messages, **more))

    async def asks(self, *messages: Message, **more: Any) -> AgentReply:
        asked: dict[str, Any] = {"tools": None, "max_tokens": None, "stop": (), **more}
        return await self.episode.chat([*messages], asked.pop("tools"), **asked)

    @property
    def trained(self) -> tuple[list[int], list[int], list[int]]:
        chain = self.episode.chosen()
        assert chain is not None
        assert len(chain.episode.logprobs) == len(chain.episode.token_ids) == len(chain.episode.tool_mask)
        return chain.prompt, chain.episode.token_ids, chain.episode.tool_mask


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def test_agent_episode_with_continued_request_extends_token_ids() -> None:
    """Whatever the client does to what the model has said: other ids of calls, no reasoning, spaces around it."""
    agent = Agent()
    first = agent.chat(HI)
    echoed = {"role": "assistant", "content": f" {first.message['content']}\n", "tool_calls": None}
    agent.chat(HI, echoed, user("and now"))
    prompt = [USER, 2, END, MODEL]
    assert agent.sampler.asked[1][0] == [*prompt, 14, END, USER, 3, 3, END, MODEL]
    assert agent.trained == (prompt, [14, END, USER, 3, 3, END, MODEL, 21, END], [1, 1, 0, 0, 0, 0, 0, 1, 1])
    assert agent.episode.num_dropped() == 0
    chain = agent.episode.chosen()
    assert chain is not None
    assert [message["role"] for message in chain.episode.messages] == ["assistant", "user", "assistant"]


@pytest.mark.parametrize(
    "again",
    [
        [user("ho")],
        [HI, {"role": "assistant", "content": "said by nobody"}, user("go")],
        [user("hi there"), {"role": "assistant", "content": "14"}, user("go")],
    ],
    ids=["another prompt", "a forged answer", "a prompt that was changed"],
)
def test_agent_episode_with_other_request_begins_new_chain(again: list[Message]) -> None:
    agent = Agent()
    agent.chat(HI)
    agent.chat(*again)
    rendered = Template().render(again, None)
    assert agent.sampler.asked[1][0] == rendered
    assert agent.trained == (rendered, [10 + len(rendered), END], [1, 1])
    assert agent.episode.num_dropped() == 2


def test_agent_episode_with_other_tools_begins_new_chain() -> None:
    agent = Agent()
    said = agent.chat(HI).message
    agent.chat(HI, said, user("go"), tools=[{"function": {"name": "times"}}])
    assert agent.trained[0][0] == 9
    assert agent.episode.num_dropped() == 2


def test_agent_episode_with_two_continuations_keeps_two_branches() -> None:
    agent = Agent()
    said = agent.chat(HI).message
    agent.chat(HI, said, user("left"))
    agent.chat(HI, said, user("on the right"))
    assert agent.trained[1][:7] == [14, END, USER, 2, 3, 5, END]
    assert agent.episode.num_dropped() == 2  # the answer on the left; what both begin with is trained


def test_agent_episode_with_concurrent_requests_ignores_their_order() -> None:
    async def both(agent: Agent, order: list[int]) -> None:
        said = (await agent.asks(HI)).message
        texts = ["short", "on the right"]
        agent.sampler.gate = asyncio.Event()
        tasks = []
        for index in order:
            tasks.append(asyncio.ensure_future(agent.asks(HI, said, user(texts[index]))))
            for _ in range(4):
                await asyncio.sleep(0)
        agent.sampler.gate.set()
        await asyncio.gather(*tasks)

    found = []
    for order in ([0, 1], [1, 0]):
        agent = Agent()
        asyncio.run(both(agent, order))
        found.append((agent.trained, agent.episode.num_dropped()))
    assert found[0] == found[1]


def test_agent_episode_limits_cap_tokens() -> None:
    agent = Agent(most=9, turn=5)
    said = agent.chat(HI, max_tokens=3).message
    agent.chat(HI, said, user("a"), max_tokens=77)
    assert [most for _, most, _ in agent.sampler.asked] == [3, 3]  # 9 - 2 - 4 left
    last = agent.chat(HI, said, user("a"), {"role": "assistant", "content": "20"}, user("a b c d e"))
    assert (last.token_ids, last.finish_reason, last.message["content"]) == ([], "length", "")
    assert len(agent.sampler.asked) == 2
    assert agent.trained[1] == [14, END, USER, 1, END, MODEL, 20, END]


def test_agent_episode_with_too_long_prompt_raises_request_error() -> None:
    agent = Agent(max_model_len=5)
    with pytest.raises(RequestError, match="too long") as caught:
        agent.chat(user("a b c d e"))
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
    assert agent.episode.refusal == "the prompt is too long"
    agent.chat(HI)
    assert agent.episode.refusal is None


def test_agent_episode_with_unrenderable_message_raises_request_error() -> None:
    with pytest.raises(RequestError, match="ValueError: no such word") as caught:
        Agent().chat(user("unspeakable"))
    assert caught.value.status == 400


def test_agent_episode_with_stop_text_strips_it() -> None:
    agent = Agent()
    reply = agent.chat(HI, stop=["4"])
    assert agent.sampler.asked[0][2] == ("4",)
    assert reply.message["content"] == "1"
    agent.chat(HI, reply.message, user("go"))
    assert agent.episode.num_dropped() == 0


def test_agent_episode_generate_continues_token_ids() -> None:
    agent = Agent()

    async def ask() -> None:
        first = await agent.episode.generate([5, 6], max_tokens=None, stop=())
        await agent.episode.generate([5, 6, *first.token_ids, 7], max_tokens=None, stop=())
        await agent.episode.generate([5, 8], max_tokens=1, stop=())

    asyncio.run(ask())
    assert agent.trained == ([5, 8], [12], [1])
    assert agent.episode.num_dropped() == 4
    assert agent.sampler.asked[1][0] == [5, 6, 12, END, 7]


def test_agent_episode_without_requests_has_no_chain() -> None:
    assert Agent().episode.chosen() is None
    assert Agent().episode.num_dropped() == 0
