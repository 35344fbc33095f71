"""The engine host's answers to the local main: what it refuses, and what it passes on. Its engine is made up."""

import asyncio
import functools
import io
import json
import os
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from grpo.engine import requests as engine_requests
from grpo.engine.answers import begun_of, sampling_params, under_way
from grpo.engine.host import forget_device
from grpo.engine.messages import Abort, Answers, Begun, Call, Reply, Sample
from grpo.engine.requests import Host
from grpo.faults.failure import FailureKind
from grpo.place.timeouts import USUAL, Timeouts


class MadeUpEngine:
    """Never ends a request, or refuses it."""

    def __init__(self, refusal: Exception | None = None) -> None:
        self.refusal = refusal
        self.errored = False
        self.cancelled: list[str] = []

    async def generate(self, prompt: Any, params: Any, request_id: str, lora_request: Any) -> AsyncIterator[Any]:
        if self.refusal is not None:
            raise self.refusal
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.append(request_id)
            raise
        yield None

    async def reset_prefix_cache(self) -> bool:
        return True


def host_of(engine: MadeUpEngine, timeouts: Timeouts = USUAL) -> tuple[Host, list[Any]]:
    """With what it sends."""
    sent: list[Any] = []
    connection: Any = SimpleNamespace(send=sent.append)
    return Host(connection, engine, {"temperature": 1.0, "max_tokens": 64}, timeouts), sent  # type: ignore[arg-type]


SAMPLE = Sample(ids=range(3, 5), token_ids=np.array([1, 2], dtype=np.int32), seed=0)


def answers_of(engine: MadeUpEngine, timeouts: Timeouts = USUAL) -> list[Any]:
    """To `SAMPLE`."""
    host, sent = host_of(engine, timeouts)

    async def sample() -> None:
        host._dispatch(SAMPLE)
        await asyncio.gather(*host._tasks.values())

    asyncio.run(sample())
    return sent


@pytest.mark.parametrize(
    ("error", "is_refusal"),
    [
        (ValueError("the prompt is too long"), True),
        (VLLMValidationError("the prompt is too long"), True),
        (RuntimeError("the prompt is too long"), False),
    ],
)
def test_sample_refused_by_engine_is_answered_with_reason(error: Exception, is_refusal: bool) -> None:
    (answers,) = answers_of(MadeUpEngine(error))
    assert isinstance(answers, Answers)
    assert [answer.completion_id for answer in answers.sampled] == [3, 4]
    for answer in answers.sampled:
        assert answer.error == f"{type(error).__name__}: the prompt is too long"
        assert answer.is_refusal == is_refusal
        assert len(answer.token_ids) == len(answer.engine_logprobs) == 0


@pytest.mark.parametrize("cause", [RuntimeError("CUDA error"), ValueError("CUDA error")])
def test_sample_after_engine_generate_error_is_answered_with_cause(
    cause: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    """It raises one without a text from what it was; no prompt is to blame."""
    error = EngineGenerateError()
    error.__cause__ = cause
    (answers,) = answers_of(MadeUpEngine(error))
    assert [answer.error for answer in answers.sampled] == [f"{type(cause).__name__}: CUDA error"] * 2
    assert not any(answer.is_refusal for answer in answers.sampled)
    assert "CUDA error" in capsys.readouterr().err  # which is its log


@pytest.mark.parametrize(
    ("reason", "error", "is_refusal"),
    [("error", "vLLM ended the request with an error", True), ("abort", "with the reason 'abort'", False)],
)
def test_unfinished_request_is_answered_with_error_without_tokens(reason: str, error: str, is_refusal: bool) -> None:
    (answers,) = answers_of(FinishingEngine(reason), Timeouts(engine_abort_s=0.2))
    for answer in answers.sampled:
        assert error in (answer.error or "")
        assert answer.is_refusal == is_refusal
        assert len(answer.token_ids) == 0


def test_aborted_request_of_dying_engine_is_not_answered() -> None:
    """As vLLM's engine process does at SIGTERM: `serve` tells of it, and nobody answers for its requests."""
    engine = FinishingEngine("abort")

    async def end(host: Host) -> None:
        host._dispatch(SAMPLE)
        await asyncio.sleep(0.1)
        engine.errored = True
        await asyncio.gather(*host._tasks.values())

    host, sent = host_of(engine)
    asyncio.run(end(host))
    assert sent == []


class FinishingEngine(MadeUpEngine):
    """Ends every request at once; a completion's only token says which seed it had."""

    def __init__(self, reason: str = "length") -> None:
        super().__init__()
        self.reason = reason
        self.asked: list[tuple[str, int, int]] = []
        self.params: list[Any] = []

    async def generate(self, prompt: Any, params: Any, request_id: str, lora_request: Any) -> AsyncIterator[Any]:
        self.asked.append((request_id, params.seed, params.n))
        self.params.append(params)
        await asyncio.sleep(0)
        yield SimpleNamespace(
            num_cached_tokens=None,
            outputs=[
                SimpleNamespace(
                    token_ids=[params.seed + i], logprobs=SimpleNamespace(logprobs=[-1.0]), finish_reason=self.reason
                )
                for i in range(params.n)
            ],
        )


@pytest.mark.parametrize(
    ("together", "asked"), [(True, [("3", 10, 3)]), (False, [("3", 10, 1), ("4", 11, 1), ("5", 12, 1)])]
)
def test_sample_of_group_as_one_or_many_requests_uses_same_seeds(together: bool, asked: list) -> None:
    engine = FinishingEngine()
    host, sent = host_of(engine)

    async def sample() -> None:
        host._dispatch(Sample(ids=range(3, 6), token_ids=np.array([1], np.int32), seed=10, together=together))
        await asyncio.gather(*host._tasks.values())

    asyncio.run(sample())
    assert engine.asked == asked
    (answers,) = sent  # all ended in the same step
    assert [(answer.completion_id, answer.token_ids.tolist()) for answer in answers.sampled] == [
        (3, [10]), (4, [11]), (5, [12])
    ]  # fmt: skip
    assert host._tasks == {}


def test_min_tokens_above_max_tokens_of_turn_is_lowered() -> None:
    engine = FinishingEngine()
    host, _ = host_of(engine)
    host._sampling = {"min_tokens": 32, "max_tokens": 64}

    async def sample(**overrides: Any) -> Any:
        host._dispatch(Sample(ids=range(1), token_ids=np.array([1], np.int32), seed=1, overrides=overrides))
        await asyncio.gather(*host._tasks.values())
        return engine.params[-1].min_tokens, engine.params[-1].max_tokens

    assert asyncio.run(sample()) == (32, 64)
    assert asyncio.run(sample(max_tokens=20)) == (20, 20)
    assert asyncio.run(sample(max_tokens=20, min_tokens=5)) == (5, 20)


def test_stop_token_ids_combine_those_of_trainer_and_user() -> None:
    engine = FinishingEngine()
    host, _ = host_of(engine)

    def stops(sampling: dict[str, Any], **overrides: Any) -> list[int]:
        host._sampling = sampling
        sample = Sample(ids=range(1), token_ids=np.array([1], np.int32), seed=1, overrides=overrides, end_tokens=(7, 2))

        async def run() -> None:
            host._dispatch(sample)
            await asyncio.gather(*host._tasks.values())

        asyncio.run(run())
        return engine.params[-1].stop_token_ids

    assert stops({}) == [2, 7]
    assert stops({"stop_token_ids": [9, 7]}) == [2, 7, 9]
    assert stops({"stop_token_ids": [9]}, stop_token_ids=[5]) == [2, 5, 7]  # a turn's replace the job's
    assert stops({"stop_token_ids": [9], "ignore_eos": True}) == [9]
    assert stops({}, ignore_eos=True) == []


def test_sampling_params_from_json_have_integer_token_ids() -> None:
    overrides = json.loads(json.dumps({"logit_bias": {5: -100.0}}))
    assert sampling_params(overrides, seed=0).logit_bias == {5: -100.0}


def test_call_is_answered_under_its_id() -> None:
    host, sent = host_of(MadeUpEngine())

    async def ask() -> None:
        await host._call(Call(call_id=1, method="reset_prefix_cache", kwargs={}))
        await host._call(Call(call_id=2, method="fly", kwargs={}))

    asyncio.run(ask())
    assert sent == [
        Reply(call_id=1, value=True, error=None),
        Reply(call_id=2, value=None, error="ValueError: engine host has no call 'fly'", kind=FailureKind.USER),
    ]


def test_failed_call_with_full_stderr_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    host, sent = host_of(MadeUpEngine())
    full = io.TextIOWrapper(io.FileIO("/dev/full", "w"), write_through=True)  # type: ignore[arg-type]
    monkeypatch.setattr("sys.stderr", full)
    asyncio.run(host._call(Call(call_id=4, method="no such method", kwargs={})))
    (reply,) = sent
    assert (reply.call_id, "has no call 'no such method'" in reply.error) == (4, True)


def test_abort_cancels_request_without_answer() -> None:
    engine = MadeUpEngine()
    host, sent = host_of(engine)

    async def abort() -> None:
        host._dispatch(SAMPLE)
        task, other = host._tasks.values()
        await asyncio.sleep(0)
        host._dispatch(Abort(ids=(2, 3)))  # 2 has ended already
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (engine.cancelled, sent, [*host._tasks]) == (["3"], [], [4])
        other.cancel()

    asyncio.run(abort())


def test_dispatch_of_unknown_message_raises() -> None:
    host, _ = host_of(MadeUpEngine())
    with pytest.raises(TypeError, match="engine host got str, which is no message"):
        host._dispatch("sample")


def test_begun_of_requires_logprob_for_each_token() -> None:
    def given(count: int) -> SimpleNamespace:
        return SimpleNamespace(logprobs=[-1.0] * count)

    first = begun_of([5, 6], given(2), is_whole=False)
    assert (first.token_ids.tolist(), first.engine_logprobs.tolist()) == ([5, 6], [-1.0, -1.0])
    both = begun_of([7], given(1), is_whole=True, behind=first)
    assert (both.token_ids.tolist(), both.engine_logprobs.tolist(), both.is_whole) == ([5, 6, 7], [-1.0] * 3, True)
    with pytest.raises(RuntimeError, match="vLLM gave 1 log-probabilities for 2 tokens"):
        begun_of([5, 6], given(1), is_whole=False)


def test_forget_device_clears_cached_gpu_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that waits does not know yet on which one its engine will be."""

    class Platform:
        @classmethod
        @functools.cache
        def get_device_capability(cls, device_id: int = 0) -> str | None:
            return os.environ.get("CUDA_VISIBLE_DEVICES")

    monkeypatch.setattr("vllm.platforms.current_platform", Platform(), raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert Platform.get_device_capability() == "0"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    forget_device()
    assert Platform.get_device_capability() == "1"


def state_of(request_id: str, index: int, num_tokens: int, parent: Any = None) -> SimpleNamespace:
    """As vLLM's output processor has one of each completion that runs."""
    return SimpleNamespace(
        external_req_id=request_id,
        request_index=index,
        detokenizer=SimpleNamespace(output_token_ids=[9] * num_tokens),
        logprobs_processor=SimpleNamespace(logprobs=SimpleNamespace(logprobs=[-2.0] * num_tokens)),
        parent_req=parent,
    )


def test_under_way_includes_ended_group_members_and_skips_probes() -> None:
    ended = SimpleNamespace(
        index=1, token_ids=[5, 6, 7], logprobs=SimpleNamespace(logprobs=[-1.0] * 3), finish_reason="stop"
    )
    cut = SimpleNamespace(index=3, token_ids=[5], logprobs=None, finish_reason="abort")  # by an engine that ends
    several = SimpleNamespace(output_aggregator=[None, ended, None, cut])
    states = [
        state_of("3", 0, 17),
        state_of("probe-0", 0, 1),
        state_of("20", 0, 4, several),
        state_of("20", 2, 9, several),
        state_of("-1", 0, 2),  # a trial's, of no batch
    ]
    found = {completion: (len(tokens), is_whole) for completion, tokens, _, is_whole in under_way(states)}
    assert found == {3: (17, False), 20: (4, False), 21: (3, True), 22: (9, False)}


def test_so_far_call_sends_finished_answers_before_reply() -> None:
    """A completion is in one of both, whatever it is doing at that moment: 3 begins, 4 ends."""

    class Ending(MadeUpEngine):
        def __init__(self) -> None:
            super().__init__()
            self.ends = asyncio.Event()
            self.output_processor = SimpleNamespace(request_states={})

        async def generate(self, prompt: Any, params: Any, request_id: str, **more: Any) -> AsyncIterator[Any]:
            await self.ends.wait()
            if request_id == "4":
                logprobs = SimpleNamespace(logprobs=[-1.0])
                output = SimpleNamespace(token_ids=[8], logprobs=logprobs, finish_reason="stop")
                yield SimpleNamespace(outputs=[output], num_cached_tokens=0)
            else:
                self.output_processor.request_states[request_id] = state_of(request_id, 0, 2)
                await asyncio.Event().wait()
                yield None

    async def ask() -> list[Any]:
        engine = Ending()
        host, sent = host_of(engine)
        for completion in (3, 4):
            first = Begun(token_ids=np.array([6], np.int32), engine_logprobs=np.array([-3.0], np.float32))
            begun = first if completion == 3 else None
            host._dispatch(
                Sample(ids=range(completion, completion + 1), token_ids=SAMPLE.token_ids, seed=0, begun=begun)
            )
        host._dispatch(Call(call_id=1, method="so_far", kwargs={}))
        await asyncio.sleep(5 * engine_requests.SETTLE_POLL_S)
        assert sent == []
        engine.ends.set()
        await asyncio.gather(*host._background)
        host._tasks[3].cancel()
        return sent

    answers, reply = asyncio.run(ask())
    assert [(each.completion_id, each.token_ids.tolist()) for each in answers.sampled] == [(4, [8])]
    assert {completion: each.token_ids.tolist() for completion, each in reply.value.items()} == {3: [6, 9, 9]}
    assert reply.value[3].engine_logprobs.tolist() == [-3.0, -2.0, -2.0]


def test_call_on_dead_engine_is_not_answered() -> None:
    """Its local main brings such an engine back; an answer would be another failure."""

    class DeadEngine(MadeUpEngine):
        async def reset_prefix_cache(self) -> bool:
            self.errored = True
            raise EngineDeadError

    host, sent = host_of(DeadEngine())
    asyncio.run(host._call(Call(call_id=7, method="reset_prefix_cache", kwargs={})))
    assert sent == []
