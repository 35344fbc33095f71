"""The engine host: `python -m grpo.engine.host FD PARENT_PID PROGRESS_FD`, one vLLM engine behind one socket.

It imports vLLM, and waits to be told what to run. Then it drives vLLM's asynchronous engine, so that requests carry
ids, finish one by one and can be aborted. Started by `grpo.engine.process.HostProcess`; nobody else on the node can
reach it.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from grpo.engine.adapters import EngineAdapters
from grpo.engine.answers import (
    check_expansion,
    engine_prompt,
    refusal,
    sampled_logprobs,
    sampling_params,
    tokens_so_far,
)
from grpo.engine.compile_caches import note_slots, take_slots
from grpo.engine.inner_processes import StartWatch, report_failures, share_cores
from grpo.engine.lifetime import end_session_with
from grpo.engine.messages import Abort, Answers, Call, Died, EngineSpec, Ready, Reply, Sample, Sampled, Start
from grpo.engine.plugin import FIRST_OUTPUT, HOST_MARK
from grpo.engine.progress import count_steps
from grpo.faults.failure import FailureKind, GrpoError
from grpo.faults.mistakes import kind_of, text_of
from grpo.place.importing import importing
from grpo.place.log import flush_log, open_log, start_log
from grpo.place.patches.torch import compile_nothing, keep_headers, write_libraries_whole
from grpo.place.patches.vllm import set_no_generator_back

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

_log = logging.getLogger("grpo.engine.host")  # this file runs as `__main__`

HEALTH_POLL_S = 0.5
ABORT_S = 10.0  # from vLLM's abort of a request to its own end
ENDED_WELL = ("stop", "length", "repetition")


class Host:
    """Serves the messages of one connection until the engine dies, or this process is ended."""

    def __init__(self, connection: Connection, engine: "AsyncLLM", sampling: dict[str, Any]) -> None:
        self._connection = connection
        self._engine = engine
        self._sampling = sampling
        self._tasks: dict[int, asyncio.Task[None]] = {}  # by completion id: what samples it
        self._answers: list[Sampled] = []  # since the event loop was last idle
        self._background: set[asyncio.Task[None]] = set()
        self._adapters = EngineAdapters(engine)

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()

        def read() -> None:
            while True:
                try:
                    message = self._connection.recv()
                except (EOFError, OSError):
                    return  # the local main is going, and takes us with it
                loop.call_soon_threadsafe(self._dispatch, message)

        threading.Thread(target=read, name="grpo-host-reader", daemon=True).start()
        while not self._engine.errored:  # vLLM's engine process may die while nobody asks anything of it
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
        if not self._answers:  # what else ends in this step of the engine goes along
            asyncio.get_running_loop().call_soon(self._send_answers)
        self._answers += answers

    async def _completions(self, sample: Sample, ids: range) -> list[Sampled]:
        """Some completions of a prompt, by one request of vLLM's, which gives the i-th of them the seed + i."""
        import numpy as np

        settings = {**self._sampling, **sample.overrides}
        if "max_tokens" in sample.overrides and "min_tokens" not in sample.overrides:
            # A turn may have less room than a completion, and vLLM takes no more at least than at most.
            settings["min_tokens"] = min(settings.get("min_tokens", 0), settings["max_tokens"])
        if not settings.get("ignore_eos"):
            settings["stop_token_ids"] = sorted({*(settings.get("stop_token_ids") or ()), *sample.end_tokens})
        params = sampling_params(settings, seed=sample.seed + ids.start - sample.ids.start, n=len(ids))
        prompt = engine_prompt(sample.token_ids.tolist(), sample.pictures, cache_salt=sample.cache_salt)
        final = await self._last_output(prompt, params, str(ids.start), sample.adapter)
        if sample.expanded is not None:
            check_expansion(final.prompt_token_ids, sample.expanded.tolist())
        for completion in final.outputs:
            if completion.finish_reason == "error":  # a grammar that does not compile, or that refused a token
                raise ValueError("vLLM ended the request with an error, which its log tells")
            if completion.finish_reason not in ENDED_WELL:
                await self._wait_for_death()
                raise RuntimeError(f"vLLM ended the request with the reason {completion.finish_reason!r}")
        return [
            Sampled(
                completion_id=completion_id,
                token_ids=np.asarray(completion.token_ids, dtype=np.int32),
                engine_logprobs=sampled_logprobs(completion),
                finish_reason=completion.finish_reason,
                num_cached_tokens=final.num_cached_tokens or 0,
            )
            for completion_id, completion in zip(ids, final.outputs, strict=True)
        ]

    async def _wait_for_death(self) -> None:
        """An engine process that was told to end (SIGTERM) aborts its requests first, and is missed a moment later."""
        until = time.monotonic() + ABORT_S
        while time.monotonic() < until and not self._engine.errored:
            await asyncio.sleep(HEALTH_POLL_S / 5)

    def _send_answers(self) -> None:
        answers, self._answers = self._answers, []
        self._connection.send(Answers(sampled=tuple(answers)))

    async def _last_output(self, prompt: Any, params: Any, request_id: str, adapter: int | None = None) -> Any:
        """What vLLM answers when a request is finished."""
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
            case "weight_version":  # of whoever asks the engine itself what it holds
                return await engine.get_weight_version()
            case "wire_format":
                return await engine.collective_rpc("grpo_wire_format", kwargs=kwargs)  # an answer of each worker
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
        """End the step that is under way and begin no other one until `resume`; completions keep their KV.

        Returns:
            Tokens so far of each completion that is under way here, by id.
        """
        await self._engine.pause_generation(mode="keep", clear_cache=False)
        # No token is sampled from here on. The last ones may not have come through vLLM's output processor yet: the
        # counts may be low then. Nothing but metrics is made of them.
        return tokens_so_far(self._engine.output_processor.request_states.values())

    async def _prompt_logprobs(self, prompts: list[list[int]], pictures: Sequence[bytes] = ()) -> list[list[float]]:
        """Raw log-probability of each prompt token but the first, by one forward of the engine.

        Args:
            pictures: the image of each prompt, which has one placeholder for it then; its tokens are those that the
                engine makes of the prompt.
        """

        async def score(index: int, token_ids: list[int]) -> list[float]:
            params = sampling_params({"temperature": 1.0, "max_tokens": 1}, seed=0, prompt_logprobs=0)
            prompt = engine_prompt(token_ids, pictures[index : index + 1] if pictures else ())
            final = await self._last_output(prompt, params, f"probe-{index}")
            scored, held = final.prompt_logprobs, final.prompt_token_ids
            return [scored[position][token].logprob for position, token in enumerate(held) if position > 0]

        return list(await asyncio.gather(*(score(index, ids) for index, ids in enumerate(prompts))))


async def run(
    connection: Connection, spec: EngineSpec, startup_s: Callable[[], float], fail: Callable[[Died], None]
) -> None:
    """Build the engine, and serve.

    Args:
        startup_s: seconds that this host has worked on it, as for `Ready`.
        fail: ends this process, with a cause.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    args = AsyncEngineArgs(**spec.engine_args)
    _log.info("builds vLLM's engine for %s", args.model)
    start_method = os.environ["VLLM_WORKER_MULTIPROC_METHOD"]
    # With the limits of batch sizes that vLLM takes for throughput (on an H100 1024 sequences and 16384 tokens); an
    # engine that does not say what it is for runs 128 sequences and 2048 tokens at once (0.31).
    config = args.create_engine_config(UsageContext.LLM_CLASS)
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = start_method  # vLLM's CPU platform sets spawn (0.31)
    if current_platform.is_cpu():
        share_cores()
        set_no_generator_back()
        if args.enforce_eager:
            compile_nothing()  # on GPUs the compiled helper of vLLM's sampler saves memory
    folder = Path(os.environ[HOST_MARK])
    variables, slots = take_slots(os.environ, otherwise=folder)
    note_slots(slots, folder)
    os.environ.update(variables)
    keep_headers(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / "precompiled_headers")
    watch = StartWatch(folder, fail)
    try:
        engine = AsyncLLM.from_vllm_config(
            config, disable_log_stats=args.disable_log_stats, enable_log_requests=args.enable_log_requests
        )
    except Exception:
        if died := watch.cause():  # vLLM says "see root cause above", which is its log (0.31)
            traceback.print_exc()
            sys.stderr.flush()
            fail(died)
        raise
    watch.end()
    _log.info("takes work, after %.1f s: vLLM's engine is built", startup_s())
    for slot in slots:
        slot.is_ready()
    connection.send(
        Ready(
            max_model_len=engine.model_config.max_model_len,
            max_num_seqs=config.scheduler_config.max_num_seqs,
            startup_s=startup_s(),
        )
    )
    await Host(connection, engine, spec.sampling).serve()


def load() -> None:
    """Import what an engine is made of; its processes come out of this one by fork. No device is touched."""
    import vllm.engine.arg_utils
    import vllm.usage.usage_lib
    import vllm.v1.engine.async_llm
    import vllm.v1.engine.core
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        import vllm.v1.worker.gpu_worker
    else:
        import vllm.v1.worker.cpu_worker  # noqa: F401
    report_failures()
    write_libraries_whole()


def forget_device() -> None:
    """vLLM remembers from its import on what the first GPU can do (0.31), and that is another one now."""
    from vllm.platforms import current_platform

    if clear := getattr(current_platform.get_device_capability, "cache_clear", None):
        clear()


def take_up(environment: Mapping[str, str], log_path: Path, inherited: Mapping[str, str]) -> None:
    """Go on under this engine's environment and in its log.

    Args:
        inherited: this process's environment at its start; what vLLM has set since stays.
    """
    for name in inherited.keys() - environment.keys():
        os.environ.pop(name, None)
    os.environ.update({name: value for name, value in environment.items() if inherited.get(name) != value})
    if environment.get("CUDA_VISIBLE_DEVICES") != inherited.get("CUDA_VISIBLE_DEVICES"):
        forget_device()
    first_output = Path(os.environ[HOST_MARK]) / FIRST_OUTPUT
    sys.stdout.flush()
    with log_path.open("ab") as log:
        log.write(first_output.read_bytes())
        log.flush()
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    first_output.unlink()
    open_log(log_path)


_ending = threading.Lock()  # never released: the first cause is told


def say_and_end(connection: Connection, parent_pid: int, died: Died) -> NoReturn:
    """Tell the local main why this engine cannot go on, and end this process; from any thread."""
    _ending.acquire()
    _log.error("ends: %s", died.cause.partition("\n")[0])
    flush_log()
    while os.getppid() != parent_pid:
        time.sleep(1)  # the local main is gone: the watch ends this session, and needs this process until it is done
    with contextlib.suppress(OSError):
        connection.send(died)
    os._exit(1)  # vLLM's destructors print tracebacks when the interpreter takes itself apart under them (0.31)


def main() -> None:
    started = time.monotonic()
    inherited = dict(os.environ)
    start_log()
    descriptor, parent_pid, progress = map(int, sys.argv[1:4])
    end_session_with(parent_pid, private_folder=Path(os.environ[HOST_MARK]))
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a request to the trainer, sent to all of its processes
    for inherited_fd in (descriptor, progress):
        os.set_inheritable(inherited_fd, False)
    connection = Connection(descriptor)
    try:
        with importing():
            load()
        count_steps(progress)
        loaded = time.monotonic()
        _log.debug("vLLM is imported, after %.1f s; waits to be told what to run", loaded - started)
        start: Start = connection.recv()
        waited_s = time.monotonic() - loaded
        take_up(start.environment, start.log_path, inherited)

        from vllm.config.weight_transfer import WeightTransferConfig

        arguments = start.spec.engine_args
        arguments["weight_transfer_config"] = WeightTransferConfig(backend=arguments["weight_transfer_config"])
        fail = partial(say_and_end, connection, parent_pid)
        asyncio.run(run(connection, start.spec, lambda: time.monotonic() - started - waited_s, fail))
    except BaseException as error:  # noqa: BLE001  process boundary: passed on to the local main
        traceback.print_exc()
        sys.stderr.flush()
        say_and_end(connection, parent_pid, Died(cause=text_of(error), kind=kind_of(error)))


if __name__ == "__main__":
    main()
