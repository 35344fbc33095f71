"""Weights that arrive amid completions, on one real engine: what they change, and what they leave alone."""

import copy
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from grpo.engine.client import EngineClient, EngineError
from grpo.engine.environment import engine_environment
from grpo.engine.messages import Sample, Sampled
from grpo.rollout.batch import Batch
from grpo.rollout.packing import Request
from grpo.rollout.pool import EnginePool
from grpo.weights.push import Pusher
from grpo.weights.report import PushReport
from grpo.weights.source import GatheredSource
from grpo.weights.wire_format import ask_engines
from tests.support.bare_engine import START_S, engine_spec

CALL_S = 120.0
ANSWER_S = 240.0
PLACES = 34
NUM_TOKENS = 600  # of a completion: a push comes after a few
ATTEMPTS = 10  # to find all completions under way; a process may be starved while the engine goes on
NUM_PROMPTS, COPIES = 8, 4
PROBE = [[5 + row, 6, 7, 8, 9, 10] for row in range(4)]


class Flight:
    """An engine, the model whose weights are pushed to it, and what it has answered."""

    def __init__(self, model_path: Path, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        self.client = EngineClient(
            engine_spec(model_path, max_num_seqs=PLACES),
            name="the engine",
            environment=engine_environment(os.environ, devices=(), tensor_parallel_size=1, engines_per_node=1),
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
        source = GatheredSource(self.model, wire_dtype=torch.float32, bucket_bytes=2**20)
        source.adopt(ask_engines([self.client], source.question, CALL_S))
        self.pusher = Pusher(
            source,
            [self.client],
            backend="shm",
            tensor_parallel_size=1,
            timeout_s=CALL_S,
            in_flight=True,
            on_paused=lambda version, of_engines: self.paused.append((version, of_engines[0])),
        )
        self.pusher.connect()
        self.push()

    def listen(self) -> None:
        self.client.listen(self._hear)

    def _hear(self, answer: Sampled | EngineError) -> None:
        with self._changed:
            if isinstance(answer, Sampled):
                self.answers[answer.completion_id] = answer
            else:
                self.error = answer
            self._changed.notify_all()

    def push(self, *, checks_bits: bool = True) -> PushReport:
        self.version += 1
        self.pusher.source.forget_sent()
        report, error = self.pusher.push(self.version, checks_bits=checks_bits)
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


@pytest.fixture(scope="module")
def engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Flight]:
    flight = Flight(tiny_model, tmp_path_factory.mktemp("engine"))
    try:
        flight.meet()
        yield flight
        flight.pusher.close()
    finally:
        flight.client.close()


@pytest.fixture
def flight(engine: Flight) -> Iterator[Flight]:
    weights = copy.deepcopy(engine.model.state_dict())
    engine.listen()
    engine.paused.clear()
    yield engine
    engine.resume()
    engine.model.load_state_dict(weights)
    engine.push()


def prompts_of(length: int, *, first: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(first)
    return [rng.integers(5, 90, length).astype(np.int32) for _ in range(NUM_PROMPTS)]


def undisturbed(flight: Flight, prompts: Sequence[np.ndarray]) -> list[Sampled]:
    """All begin in the same step, as those do that a push comes upon: sums of floats depend on who is beside."""
    flight.pause()
    ids = flight.submit(prompts, COPIES, tokens=NUM_TOKENS)
    flight.resume()
    return flight.answered(ids)


def change(model: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)


def bits_of(answers: Sequence[Sampled]) -> list[tuple[list[int], bytes]]:
    return [(answer.token_ids.tolist(), answer.engine_logprobs.tobytes()) for answer in answers]


def test_the_same_weights_change_no_bit_of_what_is_under_way(flight: Flight) -> None:
    """A busy machine may bring requests to the engine in another order, and the last bit of a sum depends on who stands
    where: then once more."""
    prompts = prompts_of(12)
    for _ in range(ATTEMPTS):
        expected = undisturbed(flight, prompts)
        ids, counts = flight.under_way(prompts, COPIES)
        flight.paused.clear()
        report = flight.push()
        assert flight.paused == [(flight.version, counts)]
        assert len(counts) == NUM_PROMPTS * COPIES
        assert report.paused_s is not None
        assert 0 < report.paused_s <= report.total_s
        if bits_of(flight.answered(ids)) == bits_of(expected):
            return
    pytest.fail(f"in {ATTEMPTS} pushes of the same weights some bit was always another one")


def continued(old: PreTrainedModel, new: PreTrainedModel, prompt: np.ndarray, now: Sampled, count: int) -> np.ndarray:
    """Log-probabilities of the tokens behind the first `count`, by the new weights behind the old ones' KV.

    The last token that the old ones have sampled is the first input of the new ones.
    """
    tokens = torch.tensor([[*prompt, *now.token_ids.tolist()]])
    seen = len(prompt) + count - 1
    with torch.no_grad():
        past = old(input_ids=tokens[:, :seen]).past_key_values
        logits = new(input_ids=tokens[:, seen:-1], past_key_values=past).logits[0]
    return logits.log_softmax(-1).gather(-1, tokens[0, seen + 1 :, None]).squeeze(-1).numpy()


def test_other_weights_leave_what_was_sampled_and_sample_what_follows(flight: Flight) -> None:
    prompts = prompts_of(12, first=1)
    expected = undisturbed(flight, prompts)
    ids, counts = flight.under_way(prompts, COPIES)
    old = copy.deepcopy(flight.model)
    change(flight.model)
    flight.push()
    assert flight.client.call("weight_version", CALL_S) == str(flight.version)
    followed = 0
    for row, (before, now) in enumerate(zip(expected, flight.answered(ids), strict=True)):
        count = counts[ids[row]]
        assert now.token_ids[:count].tolist() == before.token_ids[:count].tolist()
        assert np.abs(now.engine_logprobs[:count] - before.engine_logprobs[:count]).max() < 1e-5
        followed += now.token_ids[count:].tolist() == before.token_ids[count:].tolist()
        by_new = continued(old, flight.model, prompts[row // COPIES], now, count)
        assert np.abs(now.engine_logprobs[count:] - by_new).max() < 1e-3
    assert followed == 0


def cached(flight: Flight, prompt: np.ndarray, salt: str | None) -> int:
    (answer,) = flight.answered(flight.submit([prompt], 1, tokens=1, salt=salt))
    return answer.num_cached_tokens


def test_a_salt_keeps_the_kv_of_old_weights_from_new_completions(flight: Flight) -> None:
    prompt, other = prompts_of(300, first=2)[:2]  # a block has 128 tokens on CPUs
    assert [cached(flight, prompt, salt) for salt in ("1", "1", "2", "2")] == [0, 256, 0, 256]
    assert [cached(flight, other, None) for _ in range(2)] == [0, 256]
    change(flight.model)
    flight.push()
    assert cached(flight, other, None) == 256, "nothing else drops it"
    assert [cached(flight, prompt, salt) for salt in ("3", "3")] == [0, 256]


def test_a_paused_engine_that_owes_completions_is_not_stuck(flight: Flight) -> None:
    ids, _ = flight.under_way(prompts_of(12), COPIES)
    for _ in range(3):
        assert flight.client._look_for_stall(10_000.0) is None
    flight.client.abort(ids)


def answers_before_the_probe(flight: Flight, batch: Batch) -> int:
    """Of a batch that fills the paused engine: how many completions are answered before the verification is."""
    counts: list[int] = []
    with ThreadPoolExecutor(1) as thread:
        scores = thread.submit(flight.client.call, "prompt_logprobs", ANSWER_S, prompts=PROBE)
        while not flight.client._calls:
            assert not scores.done()
        ((_, reply),) = flight.client._calls.values()
        reply.add_done_callback(lambda _: counts.append(len(batch.answers)))  # in the thread that hears of answers
        assert not counts, "the engine is paused"
        flight.client.call("resume", CALL_S)
        assert len(scores.result()) == len(PROBE)
    return counts[0]


def filled(flight: Flight, batch: Batch, running: int) -> dict[int, int] | None:
    """Leave the engine paused when this many of the batch are under way in it; None where one has ended before."""
    while True:
        counts = flight.pause()
        if batch.answers or any(count > NUM_TOKENS // 2 for count in counts.values()):
            return None
        if sum(count > 0 for count in counts.values()) == running:
            return counts
        flight.resume()


@pytest.mark.parametrize("num_spare", [1, 0])
def test_the_verification_waits_for_no_completion_where_a_place_is_spared(flight: Flight, num_spare: int) -> None:
    settings = {"max_tokens": NUM_TOKENS}
    prompts = prompts_of(12, first=3)
    requests = [Request(token_ids=each, n=5, seed=10 * row, overrides=settings) for row, each in enumerate(prompts)]
    for _ in range(ATTEMPTS):
        flight.pause()
        pool = EnginePool([flight.client], max_num_seqs=[PLACES], max_tokens=NUM_TOKENS, num_spare=num_spare)
        batch = pool.submit(requests)
        try:
            if (counts := filled(flight, batch, PLACES - num_spare)) is None:
                continue
            assert (len(counts) > PLACES - num_spare) == (not num_spare), "the others wait in the engine, or outside"
            num_answered = answers_before_the_probe(flight, batch)
            assert (num_answered > 0) == (not num_spare)
            return
        finally:
            pool.drop(batch)
            pool.close()
            flight.empty()
    pytest.fail("the engine was never seen full")
