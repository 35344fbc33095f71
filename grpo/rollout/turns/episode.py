"""One episode of model and tools, as in TRL's `_tool_call_loop` (1.16), but independent of other episodes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from grpo.rollout.turns.sampler import Sampler
from grpo.rollout.turns.tools import Message, Toolbox, ToolRunner


class Template(Protocol):
    """Conversion between messages and tokens."""

    def parse(self, token_ids: list[int], *, prefix: list[int], schema: Any) -> Message:
        """Parse the model's message, with its tool calls.

        Args:
            schema: the tools, as chat templates expect them.
        """

    def tool_suffix(self, messages: list[Message]) -> list[int]:
        """Return the tokens of tool messages after an assistant's, up to the start of the model's next message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    max_completion_tokens: int
    """Limit on everything after the prompt, tool results included."""
    max_turn_tokens: int
    """Limit of one turn."""
    max_tool_turns: int

    def under(self, sampling: Mapping[str, Any]) -> "EpisodeLimits":
        """Limits of a batch with its own sampling arguments, such as an evaluation."""
        if (longest := sampling.get("max_tokens")) is None:
            return self
        return replace(self, max_completion_tokens=longest, max_turn_tokens=longest)


@dataclass(slots=True, kw_only=True, eq=False)
class Episode:
    """An episode, after its prompt."""

    token_ids: list[int] = field(default_factory=list)
    """[T]"""
    logprobs: list[float] = field(default_factory=list)
    """[T], natural log, by the engine; 0 for tool results."""
    tool_mask: list[int] = field(default_factory=list)
    """[T], 1 for the model's tokens."""
    messages: list[Message] = field(default_factory=list)
    first_turn: int = 0
    """Number of its tokens."""
    refusal: str | None = None
    """Reason why the prompt was refused."""

    def add(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Append tokens of the model."""
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.tool_mask += [1] * len(token_ids)

    def add_foreign(self, token_ids: Sequence[int]) -> None:
        """Append tokens not sampled by the model."""
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
    """Run an episode: sample, run the called tools, and repeat, until no tool is called or a limit is reached.

    Args:
        prompt: [L].
        toolbox: None: there are no tools, and the first turn is the last.
        schema: see `Template.parse`.
    """
    episode = Episode()
    # With tools, as for agents: the seed of a turn follows from its tokens.
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
            break  # as if the tools had not been called: no tokens are left for the model
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
