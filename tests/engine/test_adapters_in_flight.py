"""Adapters that arrive amid completions, on one real engine with space for three: each completion ends with its own."""

import copy
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from grpo.config.models import AdapterSlot
from grpo.engine.client import EngineClient, EngineError
from grpo.engine.environment import engine_environment
from grpo.engine.messages import Sample, Sampled
from grpo.weights.adapters import Lora
from grpo.weights.report import WeightSyncReport
from grpo.weights.source import GatheredSource
from grpo.weights.sync import WeightSyncer
from grpo.weights.wire_format import ask_engines
from tests.support.bare_engine import START_S, engine_spec
from tests.support.beside_model import sampled_gap

pytestmark = pytest.mark.long

CALL_S = 120.0
ANSWER_S = 240.0
LAYERS = ("q_proj", "v_proj", "down_proj")
SLOTS = 3  # two batches under way, and the newest adapter
NUM_TOKENS = 1000  # of a completion: several weight syncs take as long as a few dozen
NUM_PROMPTS, COPIES = 4, 2
MAX_GAP = 1e-3  # nats
ATTEMPTS = 40  # to find completions under way still; a process may be starved while the engine goes on
PROMPTS = [np.array([5 + row, 6, 7, 8, 9 + row], np.int32) for row in range(NUM_PROMPTS)]

Bits = list[tuple[list[int], bytes]]


class Flight:
    """An engine, the adapters that are synced to it, and what it has answered."""

    def __init__(self, model_path: Path, folder: Path) -> None:
        torch.manual_seed(0)
        base = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        self.model = get_peft_model(base, LoraConfig(r=4, lora_alpha=16, target_modules=[*LAYERS]))
        self.lora = Lora(self.model, merges=False)
        self._model_path, self._folder = model_path, folder
        self.clients = [self.start()]
        self.answers: dict[int, Sampled | EngineError] = {}
        self._adapter_of: dict[int, int | None] = {}  # by completion id, while unanswered
        self._weights: dict[int, dict[str, torch.Tensor]] = {}  # by adapter
        self._changed = threading.Condition()
        self._next_id = self._version = 0

    @property
    def client(self) -> EngineClient:
        return self.clients[0]

    def start(self) -> EngineClient:
        slot = AdapterSlot(rank=4, layers=LAYERS, number=SLOTS)
        return EngineClient(
            engine_spec(self._model_path, max_num_seqs=64, **slot.engine_args),
            name="the engine",
            environment=engine_environment(os.environ, devices=(), tensor_parallel_size=1, engines_per_node=1),
            log_path=self._folder / "engine.log",
        )

    def meet(self) -> None:
        self.client.wait_ready(START_S)
        self.source = GatheredSource(self.lora.base, wire_dtype=torch.float32, bucket_bytes=2**20, lora=self.lora)
        self.source.adopt(ask_engines(self.clients, self.source.question, CALL_S))
        self.syncer = WeightSyncer(
            self.source,
            self.clients,
            backend="shm",
            tensor_parallel_size=1,
            timeout_s=CALL_S,
            in_flight=True,
            adapters_in_use=self.adapters_in_use,
        )
        self.syncer.connect()
        self.sync()
        self.client.listen(self._on_answer)

    def come_back(self) -> None:
        """Another engine in the place of this one, as after a death."""
        self.client.listen(lambda answer: None)
        self.client.close()
        self.clients[0] = self.start()
        self.client.wait_ready(START_S)
        ask_engines(self.clients, self.source.question, CALL_S)
        self.syncer.connect()
        self.source.forget_sent()
        self.client.listen(self._on_answer)

    def adapters_in_use(self) -> set[int]:
        with self._changed:
            return {number for number in self._adapter_of.values() if number is not None}

    def _on_answer(self, answer: Sampled | EngineError) -> None:
        with self._changed:
            if isinstance(answer, Sampled):
                self.answers[answer.completion_id] = answer
                self._adapter_of.pop(answer.completion_id, None)
            else:
                self.answers[-1] = answer
            self._changed.notify_all()

    def train(self, seed: int) -> None:
        """A large step, which no completion can overlook."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)

    def sync(self) -> WeightSyncReport:
        report, error = self.try_to_sync()
        assert error is None, error
        return report

    def try_to_sync(self) -> tuple[WeightSyncReport, EngineError | None]:
        self._version += 1
        report, error = self.syncer.sync(self._version, checks_bits=True)
        if error is not None:
            self.syncer.connect()  # an error ends the weight sync group
        else:
            assert self.syncer.adapter_number is not None
            self._weights[self.syncer.adapter_number] = {
                name: parameter.detach().clone()
                for name, parameter in self.model.named_parameters()
                if parameter.requires_grad
            }
        return report, error

    def sync_another(self, seed: int) -> int:
        """An adapter that was not there before; its number."""
        self.train(seed)
        self.sync()
        assert self.syncer.adapter_number is not None
        return self.syncer.adapter_number

    def submit(self, adapter: int | None, *, num_prompts: int = NUM_PROMPTS, copies: int = COPIES) -> range:
        first = self._next_id
        for row, prompt in enumerate(PROMPTS[:num_prompts]):
            ids = range(self._next_id, self._next_id + copies)
            self._next_id = ids.stop
            with self._changed:
                self._adapter_of.update(dict.fromkeys(ids, adapter))
            sample = Sample(
                ids=ids,
                token_ids=prompt,
                seed=100 * row,
                together=bool(row % 2),  # one request of vLLM's, or one for each
                overrides={"max_tokens": NUM_TOKENS},
                adapter=adapter,
            )
            self.client.submit(sample)
        return range(first, self._next_id)

    def abort(self, ids: Sequence[int]) -> None:
        with self._changed:
            for each in ids:
                self._adapter_of.pop(each, None)
        self.client.abort(ids)

    def answered(self, ids: Sequence[int]) -> list[Sampled]:
        with self._changed:
            heard = self._changed.wait_for(lambda: -1 in self.answers or self.answers.keys() >= {*ids}, ANSWER_S)
            assert heard, self.client.log_tail()
        assert -1 not in self.answers, self.answers[-1]
        answers = [self.answers[each] for each in ids]
        return [answer for answer in answers if isinstance(answer, Sampled)]

    def bits(self, ids: Sequence[int]) -> Bits:
        """Of the whole completions."""
        answers = self.answered(ids)
        assert [len(answer.token_ids) for answer in answers] == [NUM_TOKENS] * len(ids), answers
        return [(answer.token_ids.tolist(), answer.engine_logprobs.tobytes()) for answer in answers]

    def at_once(self, adapter: int | None) -> range:
        """Completions that all begin in the same step: sums of floats depend on who is beside."""
        self.client.call("pause", CALL_S)
        ids = self.submit(adapter)
        self.client.call("so_far", CALL_S)  # answers once vLLM has all of them
        self.client.call("resume", CALL_S)
        return ids

    def alone(self, adapter: int) -> Bits:
        """What completions of an adapter are when nothing comes amid them."""
        return self.bits(self.at_once(adapter))

    def tokens_so_far(self) -> dict[int, int]:
        """Of all that is under way; the engine takes no step meanwhile."""
        counts = self.client.call("pause", CALL_S)
        self.client.call("resume", CALL_S)
        return counts

    def begun(self, adapter: int) -> range:
        """Completions of which every one has tokens, and none has all."""
        for _ in range(ATTEMPTS):
            ids = self.at_once(adapter)
            while True:
                counts = self.tokens_so_far()
                if self.answers.keys() & {*ids} or any(count >= NUM_TOKENS // 2 for count in counts.values()):
                    break
                if all(counts.get(each, 0) > 0 for each in ids):
                    return ids
            self.abort(ids)
        pytest.fail("completions are over before they are seen to begin")

    def are_under_way(self, ids: range) -> bool:
        counts = self.tokens_so_far()
        return all(each in counts and counts[each] < NUM_TOKENS for each in ids)

    def gap(self, ids: range, adapter: int) -> float:
        """The largest between the log-probabilities of these tokens and those of the model with an adapter."""
        answers, now = self.answered(ids), copy.deepcopy(self.model.state_dict())
        self.model.load_state_dict(self._weights[adapter], strict=False)
        try:
            return sampled_gap(
                self.model,
                [prompt.tolist() for prompt in PROMPTS for _ in range(COPIES)],
                [answer.token_ids.tolist() for answer in answers],
                [answer.engine_logprobs[:, None].tolist() for answer in answers],
            )
        finally:
            self.model.load_state_dict(now)


@pytest.fixture(scope="module")
def engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Flight]:
    flight = Flight(tiny_model, tmp_path_factory.mktemp("engine"))
    try:
        flight.meet()
        yield flight
        flight.syncer.close()
    finally:
        flight.client.close()


@pytest.fixture
def flight(engine: Flight) -> Iterator[Flight]:
    yield engine
    engine.abort(range(engine._next_id))
    assert -1 not in engine.answers, engine.answers[-1]


def test_completion_during_adapter_sync_keeps_its_adapter(flight: Flight) -> None:
    for attempt in range(ATTEMPTS):
        first = flight.sync_another(2 * attempt)  # an adapter goes with the last completion that uses it
        of_first = flight.alone(first)
        old = flight.begun(first)
        flight.train(2 * attempt + 1)
        report = flight.sync()
        if flight.are_under_way(old):
            break
        flight.bits(old)
    else:
        pytest.fail("no weight sync has come amid completions")
    assert report.paused_s is None
    assert flight.bits(old) == of_first
    second = flight.syncer.adapter_number
    assert second is not None
    new, newest = flight.submit(second), flight.submit(None)
    assert max(flight.gap(new, second), flight.gap(newest, second), flight.gap(old, first)) < MAX_GAP
    assert min(flight.gap(new, first), flight.gap(old, second)) > 0.1


def three_under_way(flight: Flight, seed: int) -> tuple[list[int], list[range]]:
    """Adapters in all slots, and completions of each, none of them ended."""
    for attempt in range(ATTEMPTS):
        numbers, ids = [], []
        for slot in range(SLOTS):
            numbers.append(flight.sync_another(seed + SLOTS * attempt + slot))
            ids.append(flight.begun(numbers[-1]))
        if all(flight.are_under_way(each) for each in ids):
            return numbers, ids
        for each in ids:
            flight.abort(each)
    pytest.fail("no three batches were under way at once")


def test_adapter_sync_with_all_slots_in_use_raises_and_frees_none(flight: Flight) -> None:
    numbers, ids = three_under_way(flight, 100)
    held = flight.adapters_in_use()
    _, error = flight.try_to_sync()
    if held == {*numbers} == flight.adapters_in_use():
        assert error is not None
        assert f"requests still use {numbers}, and the engine has space for 3 adapters" in str(error)
    for number, each in zip(numbers, ids, strict=True):  # nothing has become of them
        assert flight.gap(each, number) < MAX_GAP
    again = flight.begun(numbers[1])
    fourth = flight.sync_another(200)  # the others are needed no more
    assert flight.gap(again, numbers[1]) < MAX_GAP
    assert flight.gap(flight.submit(fourth), fourth) < MAX_GAP
    lost = flight.submit(numbers[0], num_prompts=1, copies=1)
    with flight._changed:
        assert flight._changed.wait_for(lambda: -1 in flight.answers, ANSWER_S)
    assert f"adapter {numbers[0]} is not in this engine" in str(flight.answers.pop(-1))
    flight.abort(lost)
    assert flight.gap(flight.submit(fourth), fourth) < MAX_GAP, "the engine lives"


def test_abort_of_completions_frees_their_adapter_slot(flight: Flight) -> None:
    number = flight.sync_another(300)
    for seed in range(301, 304):
        flight.abort(flight.begun(number))
        number = flight.sync_another(seed)  # which drops the adapter of those
    assert flight.gap(flight.submit(number), number) < MAX_GAP


def test_sync_of_base_and_noise_adapter_leaves_completions_unchanged(flight: Flight) -> None:
    """As after another engine's death: a new weight sync group, everything again, an adapter of noise, then the real
    one."""
    for attempt in range(ATTEMPTS):
        number = flight.sync_another(400 + attempt)
        expected = flight.alone(number)
        old = flight.begun(number)
        with flight.syncer.at_rest():
            ask_engines(flight.clients, flight.source.question, CALL_S)
            flight.syncer.connect()
        flight.source.forget_sent()
        with flight.lora.with_noise(0.5):
            report = flight.sync()
        flight.sync()
        if flight.are_under_way(old):
            break
        flight.bits(old)
    else:
        pytest.fail("no weight sync has come amid completions")
    assert report.paused_s is not None, "layers of the base are taken apart meanwhile"
    assert flight.bits(old) == expected
    assert flight.bits(flight.at_once(flight.syncer.adapter_number)) == expected, (
        "the same weights under another number"
    )


def test_restarted_engine_receives_adapters_of_waiting_completions(flight: Flight) -> None:
    numbers = []
    for waiting, seed in ((-2, 500), (-3, 501)):
        numbers.append(flight.sync_another(seed))
        flight._adapter_of[waiting] = numbers[-1]  # as of a pool in which completions wait for an engine
    flight.sync_another(502)
    flight.come_back()
    numbers.append(flight.sync_another(503))
    for number in numbers:
        assert flight.gap(flight.submit(number), number) < MAX_GAP
    assert flight.gap(flight.submit(None), numbers[-1]) < MAX_GAP
    for held in (-2, -3):
        flight._adapter_of.pop(held)
