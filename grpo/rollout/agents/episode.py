"""Requests and answers of one agent, as token ids; text is never tokenised again."""

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

from grpo.model.messages import Message, MessageTemplate, Tools
from grpo.rollout.agents.protocol import AgentReply, RequestError, canonical
from grpo.rollout.packing import digest_of
from grpo.rollout.turns.episode import Episode, EpisodeLimits
from grpo.rollout.turns.sampler import Sampler


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chain:
    """A message history up to an answer."""

    prompt: list[int]
    """[L], prompt of its first request."""
    episode: Episode
    """Everything after the prompt."""
    asked: tuple[str, ...] | None
    """Messages of its last request, by `canonical`; None for a request by token ids."""
    answers: frozenset[str]
    """Answer to it, by `canonical`: as sent, and with the stop text, which some clients add again."""
    tools: str
    """Tools it was rendered with."""
    order: int
    """Number of the agent's answers at the time of the request."""

    @property
    def token_ids(self) -> list[int]:
        """[L + T]"""
        return self.prompt + self.episode.token_ids

    def is_begun_by(self, asked: tuple[str, ...]) -> bool:
        """True if these messages extend its own."""
        if self.asked is None or len(asked) <= len(self.asked) + 1:
            return False
        return asked[: len(self.asked)] == self.asked and asked[len(self.asked)] in self.answers


@dataclass(eq=False)
class AgentEpisode:
    """Multi-turn rollout of one row through an agent.

    A request whose messages begin with those of an answered one continues its token ids; only the new messages are
    tokenised. Any other request begins a new chain. The chain of the last answer is trained on.
    """

    row: int
    """Index among the rank's rows."""
    _: KW_ONLY
    sampler: Sampler
    template: MessageTemplate
    limits: EpisodeLimits
    render: Callable[[Callable[[], Any]], Awaitable[Any]]
    """Awaits a call of the template, run in a single thread."""

    def __post_init__(self) -> None:
        self.num_requests = 0
        self.refusal: str | None = None
        """Reason why no engine accepted its last request."""
        self._chains: list[Chain] = []
        self._num_sampled = 0

    async def chat(
        self, messages: list[Message], tools: Tools, *, max_tokens: int | None, stop: Sequence[str]
    ) -> AgentReply:
        """Answer a request by messages.

        Raises:
            RequestError: it cannot be rendered, or no engine accepts it.
            ConnectionError, BatchOver: the job is ending, or the batch has ended.
        """
        order, asked = len(self._chains), tuple(map(canonical, messages))
        shown = json.dumps(tools or [], sort_keys=True)
        parent = max(
            (chain for chain in self._chains if chain.tools == shown and chain.is_begun_by(asked)),
            key=lambda chain: len(chain.asked or ()),
            default=None,
        )
        if parent is None:
            prompt, episode = await self._rendered(lambda: self.template.render(messages, tools)), Episode()
        else:
            new = messages[len(parent.asked or ()) + 1 :]
            suffix = await self._rendered(lambda: self.template.suffix(new))
            prompt, episode = parent.prompt, _copy(parent.episode)
            episode.add_foreign(suffix)
            episode.messages += new
        said = prompt + episode.token_ids

        async def read(token_ids: list[int]) -> Message:
            return await self.render(lambda: self.template.parse(token_ids, prefix=said, tools=tools))

        def chain_of(message: Message) -> Chain:
            answers = frozenset({canonical(message), canonical(_cut(message, stop))})
            return Chain(prompt=prompt, episode=episode, asked=asked, answers=answers, tools=shown, order=order)

        return await self._answered(prompt, episode, chain_of, read, max_tokens=max_tokens, stop=stop)

    async def generate(self, token_ids: list[int], *, max_tokens: int | None, stop: Sequence[str]) -> AgentReply:
        """Answer a request by token ids; see `chat`."""
        order = len(self._chains)
        known = [chain for chain in self._chains if token_ids[: len(chain.token_ids)] == chain.token_ids]
        if parent := max(known, key=lambda chain: len(chain.token_ids), default=None):
            prompt, episode = parent.prompt, _copy(parent.episode)
            episode.add_foreign(token_ids[len(parent.token_ids) :])
        else:
            prompt, episode = token_ids, Episode()

        async def read(token_ids: list[int]) -> Message:
            return await self.render(lambda: self.template.parse(token_ids, prefix=prompt, tools=None))

        def chain_of(message: Message) -> Chain:
            return Chain(prompt=prompt, episode=episode, asked=None, answers=frozenset(), tools="", order=order)

        return await self._answered(prompt, episode, chain_of, read, max_tokens=max_tokens, stop=stop)

    def chosen(self) -> Chain | None:
        """Return the chain of the last answer. Among concurrent requests it is the longest one, independent of
        timing."""
        return max(
            self._chains,
            key=lambda chain: (chain.order, sum(chain.episode.tool_mask), chain.token_ids),
            default=None,
        )

    def num_dropped(self) -> int:
        """Number of sampled tokens in no trained chain."""
        chosen = self.chosen()
        kept = 0 if chosen is None else sum(chosen.episode.tool_mask)
        return self._num_sampled - kept

    async def _rendered(self, call: Callable[[], list[int]]) -> list[int]:
        try:
            return await self.render(call)
        except Exception as error:
            raise RequestError(
                400, "invalid_messages", f"the chat template takes no such messages: {type(error).__name__}: {error}"
            ) from error

    async def _answered(
        self,
        prompt: list[int],
        episode: Episode,
        chain_of: Callable[[Message], Chain],
        read: Callable[[list[int]], Awaitable[Message]],
        *,
        max_tokens: int | None,
        stop: Sequence[str],
    ) -> AgentReply:
        """Sample a turn within the limits, as `run_episode` does."""
        self.num_requests += 1
        said = prompt + episode.token_ids

        def reply(message: Message, token_ids: list[int], logprobs: list[float], reason: str) -> AgentReply:
            return AgentReply(
                message=message,
                token_ids=token_ids,
                logprobs=logprobs,
                finish_reason=reason,
                num_prompt_tokens=len(said),
                digest=digest_of(said + token_ids),
            )

        left = self.limits.max_completion_tokens - len(episode.token_ids)
        if episode.token_ids and (left < 0 or len(said) >= self.sampler.max_model_len):
            return reply({"role": "assistant", "content": ""}, [], [], "length")  # no tokens are left
        token_ids: list[int] = []
        logprobs: list[float] = []
        reason = "length"
        if left:
            most = min(left, self.limits.max_turn_tokens, max_tokens or left)
            more: dict[str, Any] = {"stop": [*stop]} if stop else {}
            turn = await self.sampler.sample(said, row=self.row, max_tokens=most, **more)
            if turn.refusal is not None:
                self.refusal = turn.refusal
                raise RequestError(400, "context_length_exceeded", turn.refusal)
            token_ids, logprobs, reason = turn.token_ids, turn.logprobs, turn.finish_reason or "stop"
        self.refusal = None
        message = await read(token_ids) if token_ids else {"role": "assistant", "content": ""}
        episode.add(token_ids, logprobs)
        if token_ids:
            episode.messages.append(message)
        self._num_sampled += len(token_ids)
        self._chains.append(chain_of(message))
        return reply(_cut(message, stop), token_ids, logprobs, reason)


def _copy(episode: Episode) -> Episode:
    return replace(
        episode,
        token_ids=[*episode.token_ids],
        logprobs=[*episode.logprobs],
        tool_mask=[*episode.tool_mask],
        messages=[*episode.messages],
    )


def _cut(message: Message, stop: Sequence[str]) -> Message:
    """Cut a message before a stop text; the model may have added more in the same token."""
    content = message.get("content") or ""
    found = [place for each in stop if (place := content.find(each)) >= 0]
    return {**message, "content": content[: min(found)]} if found else message
