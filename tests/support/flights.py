"""One real engine that samples while weights are synced to it."""

import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedModel

from grpo.engine.client import EngineClient, EngineError
from grpo.engine.environment import engine_environment
from grpo.engine.messages import Begun, Sample, Sampled
from grpo.weights.report import WeightSyncReport
from grpo.weights.source import GatheredSource
from grpo.weights.sync import WeightSyncer
from grpo.weights.wire_format import ask_engines
from tests.support.bare_engine import START_S, engine_spec

CALL_S = 120.0
ANSWER_S = 240.0
PLACES = 34
NUM_TOKENS = 600  # of a completion: a weight sync comes after a few
ATTEMPTS = 40  # to find all completions under way; a process may be starved while the engine goes on
NUM_PROMPTS, COPIES = 8, 4


class Flight:
    """An engine, the model whose weights are synced to it, and what it has answered.

    Args:
        environment: beside this process's.
        engine_args: beside those of a bare engine.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        path: Path,
        folder: Path,
        *,
        environment: Mapping[str, str] | None = None,
        **engine_args: Any,
    ) -> None:
        self.model = model
        given = {**os.environ, **(environment or {})}
        self.client = EngineClient(
            engine_spec(path, max_num_seqs=PLACES, **engine_args),
            name="the engine",
            environment=engine_environment(given, devices=(), tensor_parallel_size=1, engines_per_node=1),
            log_path=folder / "engine.log",
        )
        self.paused: list[tuple[int, dict[int, int]]] = []
        self.version = 0
        self.answers: dict[int, Sampled] = {}
        self.error: EngineError | None = None
        self._changed = threading.Condition()
        self._next_id = 0

    def meet(self) -> None:
        self.client.wait_ready(START_S)
        source = GatheredSource(self.model, wire_dtype=self.model.dtype, bucket_bytes=2**20)
        source.adopt(ask_engines([self.client], source.question, CALL_S))
        self.syncer = WeightSyncer(
            source,
            [self.client],
            backend="shm",
            tensor_parallel_size=1,
            timeout_s=CALL_S,
            in_flight=True,
            on_paused=lambda version, of_engines: self.paused.append((version, of_engines[0])),
        )
        self.syncer.connect()
        self.sync()

    def listen(self) -> None:
        self.client.listen(self._on_answer)

    def _on_answer(self, answer: Sampled | EngineError) -> None:
        with self._changed:
            if isinstance(answer, Sampled):
                self.answers[answer.completion_id] = answer
            else:
                self.error = answer
            self._changed.notify_all()

    def sync(self, *, checks_bits: bool = True) -> WeightSyncReport:
        self.version += 1
        self.syncer.source.forget_sent()
        report, error = self.syncer.sync(self.version, checks_bits=checks_bits)
        assert error is None, error
        return report

    def pause(self) -> dict[int, int]:
        return self.client.call("pause", CALL_S)

    def resume(self) -> None:
        self.client.call("resume", CALL_S)

    def submit(self, prompts: Sequence[np.ndarray], n: int, *, tokens: int, salt: str | None = None) -> range:
        first = self._next_id
        for row, prompt in enumerate(prompts):
            ids = range(self._next_id, self._next_id + n)
            self._next_id = ids.stop
            self.client.submit(
                Sample(
                    ids=ids,
                    token_ids=prompt,
                    seed=100 * row,
                    together=bool(row % 2),  # one request of vLLM's, or one for each
                    overrides={"max_tokens": tokens},
                    cache_salt=salt,
                )
            )
        return range(first, self._next_id)

    def ask(self, prompt: np.ndarray, *, begun: Begun | None = None, **settings: Any) -> int:
        """For one completion: its id."""
        ids = range(self._next_id, self._next_id + 1)
        self._next_id += 1
        self.client.submit(Sample(ids=ids, token_ids=prompt, seed=0, overrides=settings, begun=begun))
        return ids.start

    def answered(self, ids: Sequence[int]) -> list[Sampled]:
        with self._changed:
            assert self._changed.wait_for(lambda: self.error or self.answers.keys() >= {*ids}, ANSWER_S)
            assert self.error is None, self.error
        answers = [self.answers[each] for each in ids]
        assert not any(answer.error for answer in answers), answers
        return answers

    def begin(self, ids: range, tokens: int) -> dict[int, int] | None:
        """Leave the engine paused with all of these under way; None where one has ended already."""
        while True:
            counts = self.pause()
            if counts.keys() != {*ids} or max(counts.values()) > tokens - 10:
                return None
            if min(counts.values()) > 5:
                return counts
            self.resume()

    def empty(self) -> None:
        """Go on, until nothing is left of what was aborted."""
        self.resume()
        while self.pause():
            self.resume()
        self.resume()

    def under_way(self, prompts: Sequence[np.ndarray], n: int, *, tokens: int = NUM_TOKENS) -> tuple[range, dict]:
        """All of them in the engine, begun and far from their end; the engine is paused."""
        for _ in range(ATTEMPTS):
            self.pause()
            ids = self.submit(prompts, n, tokens=tokens)
            self.resume()
            if (counts := self.begin(ids, tokens)) is not None:
                return ids, counts
            self.client.abort(ids)
            self.empty()
        pytest.fail(f"no pause has found {len(prompts) * n} completions under way")


def prompts_of(length: int, *, first: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(first)
    return [rng.integers(5, 90, length).astype(np.int32) for _ in range(NUM_PROMPTS)]


def undisturbed(flight: Flight, prompts: Sequence[np.ndarray]) -> list[Sampled]:
    """All begin in the same step, as those do that a weight sync comes upon: sums of floats depend on who is beside."""
    flight.pause()
    ids = flight.submit(prompts, COPIES, tokens=NUM_TOKENS)
    flight.resume()
    return flight.answered(ids)


def bits_of(answers: Sequence[Sampled]) -> list[tuple[list[int], bytes]]:
    return [(answer.token_ids.tolist(), answer.engine_logprobs.tobytes()) for answer in answers]


def same_weights_change_no_bit(flight: Flight) -> None:
    """A busy machine may bring requests to the engine in another order, and the last bit of a sum depends on who stands
    where: then once more."""
    prompts = prompts_of(12)
    for _ in range(ATTEMPTS):
        expected = undisturbed(flight, prompts)
        ids, counts = flight.under_way(prompts, COPIES)
        flight.paused.clear()
        report = flight.sync()
        assert flight.paused == [(flight.version, counts)]
        assert len(counts) == NUM_PROMPTS * COPIES
        assert report.paused_s is not None
        assert 0 < report.paused_s <= report.total_s
        if bits_of(flight.answered(ids)) == bits_of(expected):
            return
    pytest.fail(f"in {ATTEMPTS} weight syncs of the same weights some bit was always another one")
