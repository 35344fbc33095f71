"""Request handling of an engine host: sampling and control calls, by vLLM's asynchronous engine."""

import asyncio
import contextlib
import logging
import threading
import time
import traceback
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from grpo.engine.adapters import EngineAdapters
from grpo.engine.answers import begun_of, check_expansion, engine_prompt, refusal, sampling_params, under_way
from grpo.engine.messages import Abort, Answers, Begun, Call, Reply, Sample, Sampled
from grpo.faults.failure import FailureKind, GrpoError
from grpo.faults.kinds import kind_of, text_of
from grpo.place.timeouts import USUAL, Timeouts

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

_log = logging.getLogger(__name__)

HEALTH_POLL_S = 0.5
SETTLE_S = 10.0  # for a request that starts or ends right now
SETTLE_POLL_S = 0.01
ENDED_WELL = ("stop", "length", "repetition")


class Host:
    """Serves the messages of one connection until the engine dies, or this process is ended."""

    def __init__(
        self, connection: Connection, engine: "AsyncLLM", sampling: dict[str, Any], timeouts: Timeouts = USUAL
    ) -> None:
        self._connection = connection
        self._engine = engine
        self._sampling = sampling
        self._tasks: dict[int, asyncio.Task[None]] = {}  # sampling task by completion id
        self._begun: dict[int, Begun] = {}  # `Sample.begun` by completion id
        self._answers: list[Sampled] = []  # since the event loop was last idle
        self._background: set[asyncio.Task[None]] = set()
        self._abort_s = timeouts.engine_abort_s
        self._adapters = EngineAdapters(engine, timeouts)

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()

        def read() -> None:
            while True:
                try:
                    message = self._connection.recv()
                except (EOFError, OSError):
                    return  # the local main is ending, and ends this process too
                loop.call_soon_threadsafe(self._dispatch, message)

        threading.Thread(target=read, name="grpo-host-reader", daemon=True).start()
        while not self._engine.errored:  # vLLM's engine process may die while it is idle
            await asyncio.sleep(HEALTH_POLL_S)
        text = f"vLLM's engine process died [GRPO-405]: {self._engine.dead_error!r}"
        raise GrpoError(text, kind=FailureKind.ENGINE)

    def _dispatch(self, message: object) -> None:
        match message:
            case Sample():
                step = len(message.ids) if message.together else 1
                for first in range(0, len(message.ids), step):
                    ids = message.ids[first : first + step]
                    task = asyncio.create_task(self._sample(message, ids))
                    self._tasks |= dict.fromkeys(ids, task)
                    task.add_done_callback(partial(self._forget, ids))
            case Abort():
                for completion_id in message.ids:
                    if task_to_cancel := self._tasks.get(completion_id):
                        task_to_cancel.cancel()
            case Call():
                call = asyncio.create_task(self._call(message))
                self._background.add(call)
                call.add_done_callback(self._background.discard)
            case _:
                raise TypeError(f"engine host got {type(message).__name__}, which is no message of the protocol")

    def _forget(self, ids: range, task: "asyncio.Task[None]") -> None:
        for completion_id in ids:
            self._tasks.pop(completion_id, None)
            self._begun.pop(completion_id, None)

    async def _sample(self, sample: Sample, ids: range) -> None:
        try:
            answers = await self._completions(sample, ids)
        except Exception as error:  # noqa: BLE001  process boundary: the local main raises it
            if self._engine.errored:
                return  # `serve` reports the death once, for all requests and calls
            answers = [refusal(completion_id, error) for completion_id in ids]
            if not answers[0].is_refusal:
                with contextlib.suppress(OSError):  # a full disk
                    traceback.print_exception(error)
        if not self._answers:  # collect all answers of this engine step
            asyncio.get_running_loop().call_soon(self._send_answers)
        self._answers += answers

    async def _completions(self, sample: Sample, ids: range) -> list[Sampled]:
        """Sample completions of a prompt by one vLLM request, which gives the i-th of them the seed + i."""
        settings = {**self._sampling, **sample.overrides}
        if "max_tokens" in sample.overrides and "min_tokens" not in sample.overrides:
            # A turn may have fewer tokens left than a completion, and vLLM requires min_tokens <= max_tokens.
            settings["min_tokens"] = min(settings.get("min_tokens", 0), settings["max_tokens"])
        if not settings.get("ignore_eos"):
            settings["stop_token_ids"] = sorted({*(settings.get("stop_token_ids") or ()), *sample.end_tokens})
        token_ids, num_begun = sample.token_ids.tolist(), 0
        if sample.begun is not None:  # for vLLM a part of the prompt
            self._begun[ids.start] = sample.begun
            token_ids += sample.begun.token_ids.tolist()
            num_begun = len(sample.begun.token_ids)
            settings["max_tokens"] -= num_begun
            settings["min_tokens"] = max(0, settings.get("min_tokens", 0) - num_begun)
        params = sampling_params(settings, seed=sample.seed + ids.start - sample.ids.start, n=len(ids))
        prompt = engine_prompt(token_ids, sample.pictures, cache_salt=sample.cache_salt)
        final = await self._last_output(prompt, params, str(ids.start), sample.adapter)
        if sample.expanded is not None:
            check_expansion(final.prompt_token_ids, sample.expanded.tolist())
        for completion in final.outputs:
            if completion.finish_reason == "error":  # a grammar that does not compile, or that refused a token
                raise ValueError("vLLM ended the request with an error: see the engine's log")
            if completion.finish_reason not in ENDED_WELL:
                await self._wait_for_death()
                raise RuntimeError(f"vLLM ended the request with the reason {completion.finish_reason!r}")
        return [
            Sampled(
                completion_id=completion_id,
                token_ids=whole.token_ids,
                engine_logprobs=whole.engine_logprobs,
                finish_reason=completion.finish_reason,
                num_cached_tokens=final.num_cached_tokens or 0,
                num_begun=num_begun,
            )
            for completion_id, completion in zip(ids, final.outputs, strict=True)
            for whole in [begun_of(completion.token_ids, completion.logprobs, is_whole=True, behind=sample.begun)]
        ]

    async def _wait_for_death(self) -> None:
        """Wait for an engine process ended by SIGTERM: it aborts its requests first, and its death is noticed a moment
        later."""
        until = time.monotonic() + self._abort_s
        while time.monotonic() < until and not self._engine.errored:
            await asyncio.sleep(HEALTH_POLL_S / 5)

    def _send_answers(self) -> None:
        answers, self._answers = self._answers, []
        if answers:
            self._connection.send(Answers(sampled=tuple(answers)))

    async def _last_output(self, prompt: Any, params: Any, request_id: str, adapter: int | None = None) -> Any:
        """Return vLLM's final output of a request."""
        with self._adapters.used(adapter) as lora_request:
            stream = self._engine.generate(prompt, params, request_id, lora_request=lora_request)
            outputs = [output async for output in stream]
        return outputs[-1]

    async def _call(self, call: Call) -> None:
        _log.debug("call %d begins: %s", call.call_id, call.method)
        begun = time.monotonic()
        try:
            value = await self._run_call(call.method, call.kwargs)
            _log.debug("call %d ends, after %.3f s: %s", call.call_id, time.monotonic() - begun, call.method)
            self._connection.send(Reply(call_id=call.call_id, value=value, error=None))
        except Exception as error:  # noqa: BLE001  process boundary: the local main raises it
            if self._engine.errored:
                return
            _log.warning("call %d failed: %s: %s", call.call_id, call.method, type(error).__name__)
            reply = Reply(call_id=call.call_id, value=None, error=text_of(error), kind=kind_of(error))
            self._connection.send(reply)
            with contextlib.suppress(OSError):  # a full disk
                traceback.print_exc()

    async def _run_call(self, method: str, kwargs: dict[str, Any]) -> Any:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest

        engine = self._engine
        match method:
            case "init_weight_transfer_engine":
                return await engine.init_weight_transfer_engine(WeightTransferInitRequest(**kwargs))
            case "update_weights":
                return await engine.update_weights(WeightTransferUpdateRequest(**kwargs))
            case "start_weight_update" | "finish_weight_update" | "reset_prefix_cache" | "reset_encoder_cache":
                return await getattr(engine, method)(**kwargs)
            case "pause":
                return await self._pause()
            case "resume":
                return await engine.resume_generation()
            case "so_far":
                return await self._so_far()
            case "weight_version":  # for users who ask the engine itself for its version
                return await engine.get_weight_version()
            case "wire_format":
                return await engine.collective_rpc("grpo_wire_format", kwargs=kwargs)  # one answer per worker
            case "check_bits":
                return await engine.collective_rpc("grpo_check_bits", kwargs=kwargs)
            case "take_adapter":
                return await self._adapters.take(**kwargs)
            case "end_weight_update":
                return await self._adapters.end_update(**kwargs)
            case "prompt_logprobs":
                return await self._prompt_logprobs(**kwargs)
        raise ValueError(f"engine host has no call {method!r}")

    async def _pause(self) -> dict[int, int]:
        """Finish the current step, and start no other until `resume`; completions keep their KV.

        Returns:
            Number of tokens so far of each completion in progress, by id.
        """
        await self._engine.pause_generation(mode="keep", clear_cache=False)
        # No token is sampled from here on. The last ones may still be on their way through vLLM's output processor: the
        # counts, used for metrics only, may be low then.
        states = self._engine.output_processor.request_states.values()
        begun = {completion: len(each.token_ids) for completion, each in self._begun.items()}
        return {completion: len(tokens) + begun.get(completion, 0) for completion, tokens, *_ in under_way(states)}

    async def _so_far(self) -> dict[int, Begun]:
        """Return the tokens of each unanswered completion, by id; sends finished answers first."""
        async with asyncio.timeout(SETTLE_S):
            while True:
                found = {
                    completion: begun_of(tokens, logprobs, is_whole=is_whole, behind=self._begun.get(completion))
                    for completion, tokens, logprobs, is_whole in under_way(
                        self._engine.output_processor.request_states.values()
                    )
                }
                if {each for each in self._tasks if each >= 0} <= found.keys():  # negative: a trial's, of no batch
                    break
                await asyncio.sleep(SETTLE_POLL_S)  # one starts or ends at this moment
        self._send_answers()
        return found

    async def _prompt_logprobs(self, prompts: list[list[int]], pictures: Sequence[bytes] = ()) -> list[list[float]]:
        """Return the raw log-probability of each prompt token except the first, by one forward of the engine.

        Args:
            pictures: image of each prompt, which then has one placeholder; the log-probabilities are of the expanded
                tokens.
        """

        async def score(index: int, token_ids: list[int]) -> list[float]:
            params = sampling_params({"temperature": 1.0, "max_tokens": 1}, seed=0, prompt_logprobs=0)
            prompt = engine_prompt(token_ids, pictures[index : index + 1] if pictures else ())
            final = await self._last_output(prompt, params, f"probe-{index}")
            scored, held = final.prompt_logprobs, final.prompt_token_ids
            return [scored[position][token].logprob for position, token in enumerate(held) if position > 0]

        return list(await asyncio.gather(*(score(index, ids) for index, ids in enumerate(prompts))))
