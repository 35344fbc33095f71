"""What a rollout calls to have its turns sampled."""

import asyncio
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextvars import ContextVar
from dataclasses import dataclass
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
"""Arguments of vLLM's `SamplingParams` that a turn may have of its own."""
POLL_S = 0.2
CURRENT: "ContextVar[Sampler | None]" = ContextVar("grpo_sampler", default=None)
"""Of the batch that a rollout function makes, inside of that function."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turn:
    """What the model has said in one turn."""

    token_ids: list[int]
    logprobs: list[float]
    """Natural log, of each token, under the engine."""
    finish_reason: str | None
    """`stop`, or `length` where the limit of tokens or of the context ended it; None where `refusal` says why."""
    refusal: str | None = None
    """Why no engine took it: it is longer than the context, say."""


class BatchOver(RuntimeError):
    """A turn was asked for of a batch that has ended."""


class Sampler:
    """One rank's turns of one batch. From any thread or event loop; not collective.

    Args:
        base_seed: of the batch, see `grpo.rollout.packing.seed_base`.
        num_rows: of the rank in this batch.
        max_model_len: tokens that an engine holds.
        first_place: of its rows, see `Ask`.
        order: see `Ask`.
        look: called every `POLL_S` where the main thread waits for answers.
    """

    def __init__(
        self,
        channel: TurnChannel,
        *,
        base_seed: int,
        rank: int,
        num_rows: int,
        max_model_len: int,
        first_place: int = 0,
        order: int = 0,
        look: Callable[[], None] = lambda: None,
        sampling: Mapping[str, Any] | None = None,
    ) -> None:
        self.sampling = {**(sampling or {})}
        """vLLM's arguments of all turns in place of the trainer's, but for those that a call names."""
        self._channel, self.base_seed, self._rank, self._look = channel, base_seed, rank, look
        self.max_model_len, self._first_place, self._order = max_model_len, first_place, order
        self.asked: set[Future[Answer]] = set()
        """Turns that are not answered."""
        self._taken: dict[tuple[int, int | str], object] = {}
        """Rows and turns that `sample` has brought tokens for, or is to bring."""
        self._num_rows, self.is_over = num_rows, False
        self._calls = itertools.count(1)  # also from several threads
        self.refused: dict[int, str] = {}
        """By row: why no engine took its prompt, unless `sample` has asked for it anew; or a turn of `sample_all`."""
        self.engines: dict[int, int] = {}
        """By row: who has sampled its last turn, as `grpo.rollout.packing.engine_id`."""
        self.policy_versions: dict[int, int] = {}
        """By row: optimizer steps of the weights that have sampled its last turn."""
        self.tokens_by_version: Counter[int] = Counter()
        """Tokens that were sampled, by optimizer steps of the weights."""
        self.counts: Counter[str] = Counter()
        """Turns, refused ones, tokens that were sampled, tokens before them, and of these those found in a cache."""
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
            row: the number of the rollout's prompt among this rank's, from 0.
            turn: from 0; the seed follows from both, so no two calls for a row take the same, but after a refusal.
                None: the seed follows from the row, the tokens, and how often the row had these sampled before. So
                several turns of a row, asked for at once in any order, are the same ones in every run.
            max_tokens: to sample at most; None: `max_completion_length`.
            sampling: of `SAMPLING`, in place of the trainer's; tokens that end a completion do so beside
                `stop_token_ids`, unless `ignore_eos` is set.

        Raises:
            ConnectionError: the job is ending.
            BatchOver: the batch has ended.
            TypeError: an argument that is none of `SAMPLING`.
            ValueError: the turn was sampled, or is being sampled, by another call: both would be the same random
                numbers.
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
        """One turn of each prompt, in a call that waits; its seed follows from the number of the call.

        Raises:
            ValueError: no engine takes one of them, and they are not one for each row, so that nobody can say whose
                episode it is.
        """
        turn = -next(self._calls)  # which no call of `sample` has
        futures = [self._ask(prompt, row, turn, {}) for row, prompt in enumerate(prompts)]
        while _is_main_thread() and wait(futures, POLL_S).not_done:
            self._look()
        answers = [future.result() for future in futures]
        if len(prompts) == self._num_rows:
            for row, answer in enumerate(answers):
                self._attribute(row, turn, answer)
        elif (why := next((answer.refusal for answer in answers if answer.refusal is not None), None)) is not None:
            raise ValueError(
                f"{why}; generate was given {len(prompts)} prompts, and the batch has {self._num_rows} rows: give it "
                "one for each row, or await sample(..., row=..., turn=...), which tells each row's refusal"
            )
        return [self._note(answer) for answer in answers]

    @property
    def is_stalled(self) -> bool:
        """Whether the node has no engine now, and what is asked waits until it has one."""
        return self._channel.is_stalled

    def close(self) -> None:
        """End the batch: `sample` raises `BatchOver` from now on, and turns that are not answered are cancelled."""
        self.is_over = True
        for future in [*self.asked]:
            future.cancel()

    async def _awaited(self, asked: "asyncio.Future[Answer]") -> Answer:
        try:
            while _is_main_thread() and not (await asyncio.wait([asked], timeout=POLL_S))[0]:
                self._look()
            return await asked
        finally:
            if not asked.get_loop().is_closed():  # it is, where a batch that has failed is collected as garbage
                asked.cancel()  # where this call is

    def _ask(self, token_ids: Sequence[int], row: int, turn: int | str, sampling: dict[str, Any]) -> "Future[Answer]":
        if self.is_over:
            raise BatchOver("the batch that this rollout belongs to is over")
        if not self.counts["turns"]:
            self.first_ask = time.monotonic()
        self.counts["turns"] += 1
        self.counts["prompt_tokens"] += len(token_ids)
        asked = self._channel.ask(
            np.asarray(token_ids, np.int32),
            place=self._first_place + row,
            order=self._order,
            seed=turn_seed(self.base_seed, rank=self._rank, row=row, num_rows=self._num_rows, turn=turn),
            name=f"{'a turn' if isinstance(turn, str) else f'turn {turn}'} of row {row} of rank {self._rank}",
            overrides={**self.sampling, **sampling},
        )
        self.asked.add(asked)
        asked.add_done_callback(self.asked.discard)
        return asked

    def _attribute(self, row: int, turn: int | str, answer: Answer) -> None:
        """An answer to an episode of this row."""
        if answer.refusal is None:
            self.engines[row] = answer.engine
            self.policy_versions[row] = answer.policy_version
            if isinstance(turn, str) or turn >= 0:  # of `sample`, whose caller knew of a refusal before: asked anew
                self.refused.pop(row, None)
            return
        self.engines.setdefault(row, REFUSED)
        if not isinstance(turn, str) and turn <= 0:  # of a later `sample` the function is reported
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
