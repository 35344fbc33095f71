"""Weights that arrive amid completions, on one real engine: what they change, and what they leave alone."""

import copy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from grpo.engine.messages import Begun, Sampled
from grpo.rollout.batch import Batch
from grpo.rollout.packing import Request
from grpo.rollout.pool import EnginePool
from tests.support.flights import (
    ANSWER_S,
    ATTEMPTS,
    CALL_S,
    COPIES,
    NUM_TOKENS,
    PLACES,
    Flight,
    prompts_of,
    same_weights_change_no_bit,
    undisturbed,
)

PROBE = [[5 + row, 6, 7, 8, 9, 10] for row in range(4)]


@pytest.fixture(scope="module")
def engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Flight]:
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    flight = Flight(model, tiny_model, tmp_path_factory.mktemp("engine"))
    try:
        flight.meet()
        yield flight
        flight.syncer.close()
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
    engine.sync()


def change(model: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)


def test_sync_of_same_weights_changes_no_bit_in_flight(flight: Flight) -> None:
    same_weights_change_no_bit(flight)


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


def test_sync_during_sampling_keeps_tokens_and_applies_to_later_ones(flight: Flight) -> None:
    prompts = prompts_of(12, first=1)
    expected = undisturbed(flight, prompts)
    ids, counts = flight.under_way(prompts, COPIES)
    old = copy.deepcopy(flight.model)
    change(flight.model)
    flight.sync()
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


def test_cache_salt_keeps_kv_of_old_weights_from_new_completions(flight: Flight) -> None:
    prompt, other = prompts_of(300, first=2)[:2]  # a block has 128 tokens on CPUs
    assert [cached(flight, prompt, salt) for salt in ("1", "1", "2", "2")] == [0, 256, 0, 256]
    assert [cached(flight, other, None) for _ in range(2)] == [0, 256]
    change(flight.model)
    flight.sync()
    assert cached(flight, other, None) == 256, "nothing else drops it"
    assert [cached(flight, prompt, salt) for salt in ("3", "3")] == [0, 256]


def test_sample_with_begun_tokens_continues_identically(flight: Flight) -> None:
    """Greedily it ends as it would have; with some of a prompt's completions whole, and some not begun."""
    prompts = prompts_of(12, first=5)
    settings = {"max_tokens": 60, "temperature": 0.0, "repetition_penalty": 1.3}  # of prompt and completion
    whole = flight.answered([flight.ask(prompt, **settings) for prompt in prompts])
    assert len({answer.token_ids.tobytes() for answer in whole}) == len(prompts)
    for num_first in (1, 30, 59):
        for prompt, expected in zip(prompts, whole, strict=True):
            begun = Begun(
                token_ids=expected.token_ids[:num_first], engine_logprobs=expected.engine_logprobs[:num_first]
            )
            (now,) = flight.answered([flight.ask(prompt, begun=begun, **settings)])
            assert now.token_ids.tolist() == expected.token_ids.tolist()
            assert np.abs(now.engine_logprobs - expected.engine_logprobs).max() < 1e-4
            assert (now.num_begun, now.finish_reason) == (num_first, expected.finish_reason)


def test_so_far_returns_tokens_of_each_open_completion(flight: Flight) -> None:
    """Also of one that goes on behind its first tokens, and of those that wait for the last of their prompt."""
    prompts = prompts_of(12, first=1)
    expected = undisturbed(flight, prompts)
    ids, counts = flight.under_way(prompts, COPIES)
    first = Begun(token_ids=expected[0].token_ids[:3], engine_logprobs=expected[0].engine_logprobs[:3])
    behind = flight.ask(prompts[0], begun=first, max_tokens=NUM_TOKENS)
    held = flight.client.call("so_far", CALL_S)
    assert held.keys() == {*ids, behind}
    for completion, whole in zip(ids, expected, strict=True):
        tokens = held[completion].token_ids
        assert counts[completion] <= len(tokens) <= counts[completion] + 1
        assert tokens.tolist() == whole.token_ids[: len(tokens)].tolist()
        assert np.abs(held[completion].engine_logprobs - whole.engine_logprobs[: len(tokens)]).max() < 1e-5
    assert held[behind].token_ids.tolist() == first.token_ids.tolist()
    flight.resume()
    flight.answered([*ids, behind])
    assert flight.client.call("so_far", CALL_S) == {}


def test_look_for_stall_on_paused_engine_returns_none(flight: Flight) -> None:
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
def test_verification_with_spare_slot_waits_for_no_completion(flight: Flight, num_spare: int) -> None:
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
