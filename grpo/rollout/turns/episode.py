"""One episode of model and tools, as TRL's `_tool_call_loop` has it (1.16), but waiting for no other one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from grpo.rollout.turns.sampler import Sampler
from grpo.rollout.turns.tools import Message, Toolbox, ToolRunner


class Template(Protocol):
    """How messages become tokens, and tokens messages."""

    def parse(self, token_ids: list[int], *, prefix: list[int], schema: Any) -> Message:
        """The message that the model has said, with its tool calls.

        Args:
            schema: the tools that it knows of, as chat templates take them.
        """

    def tool_suffix(self, messages: list[Message]) -> list[int]:
        """The tokens of tool messages behind an assistant's, up to where the model goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    max_completion_tokens: int
    """Of all that follows the prompt, what tools say included."""
    max_turn_tokens: int
    """Of one turn."""
    max_tool_turns: int

    def under(self, sampling: Mapping[str, Any]) -> "EpisodeLimits":
        """Those of a batch with sampling arguments of its own, as an evaluation has them."""
        if (longest := sampling.get("max_tokens")) is None:
            return self
        return replace(self, max_completion_tokens=longest, max_turn_tokens=longest)


@dataclass(slots=True, kw_only=True, eq=False)
class Episode:
    """An episode behind its prompt."""

    token_ids: list[int] = field(default_factory=list)
    """[T]"""
    logprobs: list[float] = field(default_factory=list)
    """[T], natural log, under the engine; 0 for what tools said."""
    tool_mask: list[int] = field(default_factory=list)
    """[T], 1 for what the model said."""
    messages: list[Message] = field(default_factory=list)
    first_turn: int = 0
    """Tokens of it."""
    refusal: str | None = None
    """Why no engine took the prompt."""

    def add(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """What the model said."""
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.tool_mask += [1] * len(token_ids)

    def add_foreign(self, token_ids: Sequence[int]) -> None:
        """What the model did not say."""
        self.token_ids += token_ids
        self.logprobs += [0.0] * len(token_ids)
        self.tool_mask += [0] * len(token_ids)


async def run_episode(
    row: int,
    prompt: list[int],
    sampler: Sampler,
    *,
    limits: EpisodeLimits,
    template: Template,
    tools: ToolRunner,
    toolbox: Toolbox | None,
    schema: Any = None,
) -> Episode:
    """Sample, run the tools that were called, and go on, until no tool is called or a limit is reached.

    Args:
        prompt: [L].
        toolbox: None: there are no tools, and the first turn is the last.
        schema: see `Template.parse`.
    """
    episode = Episode()
    # With tools as through an agent's door: the seed of a turn follows from its tokens.
    turn = await sampler.sample(prompt, row=row, turn=0 if toolbox is None else None)
    episode.refusal = turn.refusal
    episode.add(turn.token_ids, turn.logprobs)
    episode.first_turn = len(turn.token_ids)
    if episode.refusal is not None:
        return episode
    episode.messages.append(template.parse(turn.token_ids, prefix=prompt, schema=schema))
    for _ in range(limits.max_tool_turns):
        calls = episode.messages[-1].get("tool_calls")
        if toolbox is None or not calls:
            break
        answers = await tools.run(calls, toolbox, row)
        suffix = template.tool_suffix(answers)
        said = [*prompt, *episode.token_ids, *suffix]
        left = limits.max_completion_tokens - (len(said) - len(prompt))
        if left < 0 or len(said) >= sampler.max_model_len:
            break  # as if the tools had not been called: the model has no space to go on
        token_ids: list[int] = []
        logprobs: list[float] = []
        if left:
            turn = await sampler.sample(said, row=row, max_tokens=min(left, limits.max_turn_tokens))
            if turn.refusal is not None:
                break
            token_ids, logprobs = turn.token_ids, turn.logprobs
        episode.messages += answers
        episode.add_foreign(suffix)
        episode.add(token_ids, logprobs)
        if not token_ids:
            break
        if message := template.parse(token_ids, prefix=said, schema=schema):
            episode.messages.append(message)
    return episode
