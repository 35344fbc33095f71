"""Sampler of turns, called by rollouts."""

import asyncio
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextvars import ContextVar
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import numpy as np

from grpo.rollout.packing import REFUSED, digest_of, turn_seed
from grpo.rollout.turns.channel import TurnChannel
from grpo.rollout.turns.messages import Answer

SAMPLING = frozenset(
    {
        *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
        *("min_tokens", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos"),
        *("bad_words", "logit_bias", "allowed_token_ids", "structured_outputs"),
    }
)
"""Arguments of vLLM's `SamplingParams` for a turn to set."""
POLL_S = 0.2
CURRENT: "ContextVar[Sampler | None]" = ContextVar("grpo_sampler", default=None)
"""Sampler of the current batch, set inside a rollout function."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turn:
    """Result of one turn."""

    token_ids: list[int]
    logprobs: list[float]
    """Natural log, for each token, by the engine."""
    finish_reason: str | None
    """`stop`, or `length` if a limit of tokens or of the context ended it; None with a `refusal`."""
    refusal: str | None = None
    """Reason why no engine accepted it, for example a history longer than the context."""


class BatchOver(RuntimeError):
    """A turn was requested of an ended batch."""


@dataclass(eq=False)
class Sampler:
    """Turns of one batch on a rank. From any thread or event loop; not collective."""

    channel: TurnChannel
    _: KW_ONLY
    base_seed: int
    """Base of the batch's seeds, see `grpo.rollout.packing.seed_base`."""
    rank: int
    num_rows: int
    """Number of the rank's rows in this batch."""
    max_model_len: int
    """Longest sequence of an engine, in tokens."""
    first_place: int = 0
    """Place of its first row, see `Ask`."""
    order: int = 0
    """See `Ask`."""
    look: Callable[[], None] = lambda: None
    """Called every `POLL_S` while the main thread waits for answers."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """vLLM arguments of all turns, overriding the trainer's; a call may override them again."""

    def __post_init__(self) -> None:
        self.asked: set[Future[Answer]] = set()
        """Unanswered turns."""
        self._taken: dict[tuple[int, int | str], object] = {}
        """(row, turn) of finished and pending calls of `sample`."""
        self.is_over = False
        self._calls = itertools.count(1)  # counted from several threads
        self.refused: dict[int, str] = {}
        """Reason, by row, why its prompt was refused, unless `sample` was called again; or why a turn of `sample_all`
        was."""
        self.engines: dict[int, int] = {}
        """Engine of the last turn, by row, as `grpo.rollout.packing.engine_id`."""
        self.policy_versions: dict[int, int] = {}
        """Optimizer steps of the weights that sampled the last turn, by row."""
        self.tokens_by_version: Counter[int] = Counter()
        """Sampled tokens by optimizer steps of the weights."""
        self.counts: Counter[str] = Counter()
        """Turns, refused ones, sampled tokens, prompt tokens, and cached ones of these."""
        self.first_ask = self.last_answer = time.monotonic()

    async def sample(
        self,
        token_ids: Sequence[int],
        *,
        row: int,
        turn: int | None = None,
        max_tokens: int | None = None,
        **sampling: Any,
    ) -> Turn:
        """Sample the next turn of a rollout.

        Args:
            token_ids: [L], the whole history, template included.
            row: index of the rollout's prompt among this rank's, from 0.
            turn: from 0; row and turn determine the seed, so no two calls for a row may use the same turn, except after
                a refusal. None: the seed follows from the row, the tokens, and the number of earlier calls with these.
                So concurrent turns of a row, in any order, are the same in every run.
            max_tokens: to sample at most; None: `max_completion_length`.
            sampling: arguments in `SAMPLING`, overriding the trainer's; the trainer's end tokens apply in addition to
                `stop_token_ids`, unless `ignore_eos` is set.

        Raises:
            ConnectionError: the job is ending.
            BatchOver: the batch has ended.
            TypeError: an argument is not in `SAMPLING`.
            ValueError: another call samples or has sampled this turn: both would use the same random numbers.
        """
        if row < 0 or (turn is not None and turn < 0):
            raise ValueError(f"row {row}, turn {turn}: both count from 0")
        if unknown := sampling.keys() - SAMPLING:
            raise TypeError(
                f"sample() takes no {', '.join(sorted(unknown))}; of vLLM's SamplingParams it takes "
                f"{', '.join(sorted(SAMPLING))}"
            )
        if max_tokens is not None:
            sampling["max_tokens"] = max_tokens
        mine = object()
        if turn is None:
            digest = digest_of(token_ids)
            names = (f"{digest} {times}" for times in itertools.count())
            key: int | str = next(name for name in names if self._taken.setdefault((row, name), mine) is mine)
        elif self._taken.setdefault((row, key := turn), mine) is not mine:
            raise ValueError(
                f"sample() was called twice in this batch for row {row}, turn {turn} [GRPO-615]: both calls would get "
                "the same random numbers; give each call of a row a turn of its own"
            )
        answer: Answer | None = None
        try:
            answer = await self._awaited(asyncio.wrap_future(self._ask(token_ids, row, key, sampling)))
        finally:
            if answer is None or answer.refusal is not None:
                del self._taken[row, key]
        self._attribute(row, key, answer)
        return self._note(answer)

    def sample_all(self, prompts: Sequence[Sequence[int]]) -> list[Turn]:
        """Sample one turn of each prompt, and wait for all; the seed follows from the number of the call.

        Raises:
            ValueError: a prompt was refused, and prompts do not correspond to rows, so that the refusal has no row.
        """
        turn = -next(self._calls)  # a number no call of `sample` has
        futures = [self._ask(prompt, row, turn, {}) for row, prompt in enumerate(prompts)]
        while _is_main_thread() and wait(futures, POLL_S).not_done:
            self.look()
        answers = [future.result() for future in futures]
        if len(prompts) == self.num_rows:
            for row, answer in enumerate(answers):
                self._attribute(row, turn, answer)
        elif (why := next((answer.refusal for answer in answers if answer.refusal is not None), None)) is not None:
            raise ValueError(
                f"{why}; generate was given {len(prompts)} prompts, and the batch has {self.num_rows} rows: give it "
                "one for each row, or await sample(..., row=..., turn=...), which tells each row's refusal"
            )
        return [self._note(answer) for answer in answers]

    @property
    def is_stalled(self) -> bool:
        """True if the node has no engine now; requests wait until it has one."""
        return self.channel.is_stalled

    def close(self) -> None:
        """End the batch: later `sample` calls raise `BatchOver`, and unanswered turns are cancelled."""
        self.is_over = True
        for future in [*self.asked]:
            future.cancel()

    async def _awaited(self, asked: "asyncio.Future[Answer]") -> Answer:
        try:
            while _is_main_thread() and not (await asyncio.wait([asked], timeout=POLL_S))[0]:
                self.look()
            return await asked
        finally:
            if not asked.get_loop().is_closed():  # it is closed if a failed batch is collected as garbage
                asked.cancel()  # because this call is cancelled

    def _ask(self, token_ids: Sequence[int], row: int, turn: int | str, sampling: dict[str, Any]) -> "Future[Answer]":
        if self.is_over:
            raise BatchOver("the batch that this rollout belongs to is over")
        if not self.counts["turns"]:
            self.first_ask = time.monotonic()
        self.counts["turns"] += 1
        self.counts["prompt_tokens"] += len(token_ids)
        asked = self.channel.ask(
            np.asarray(token_ids, np.int32),
            place=self.first_place + row,
            order=self.order,
            seed=turn_seed(self.base_seed, rank=self.rank, row=row, num_rows=self.num_rows, turn=turn),
            name=f"{'a turn' if isinstance(turn, str) else f'turn {turn}'} of row {row} of rank {self.rank}",
            overrides={**self.sampling, **sampling},
        )
        self.asked.add(asked)
        asked.add_done_callback(self.asked.discard)
        return asked

    def _attribute(self, row: int, turn: int | str, answer: Answer) -> None:
        """Record an answer for this row."""
        if answer.refusal is None:
            self.engines[row] = answer.engine
            self.policy_versions[row] = answer.policy_version
            if isinstance(turn, str) or turn >= 0:  # of `sample`: its caller saw an earlier refusal, and asked again
                self.refused.pop(row, None)
            return
        self.engines.setdefault(row, REFUSED)
        if not isinstance(turn, str) and turn <= 0:  # the function sees the refusal of a later `sample`
            self.refused[row] = answer.refusal

    def _note(self, answer: Answer) -> Turn:
        self.last_answer = time.monotonic()
        if answer.refusal is not None:
            self.counts["refused"] += 1
        else:
            self.counts["tokens"] += len(answer.token_ids)
            self.tokens_by_version[answer.policy_version] += len(answer.token_ids)
            self.counts["cached_tokens"] += answer.num_cached_tokens
        return Turn(
            token_ids=answer.token_ids.tolist(),
            logprobs=answer.logprobs.tolist(),
            finish_reason=answer.finish_reason,
            refusal=answer.refusal,
        )


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
