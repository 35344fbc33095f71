"""Patches of vLLM, applied in an engine host and inherited by its forked processes."""

import functools
import time
from collections.abc import Callable
from typing import Any

from grpo.place.patches.patch import Patch

_UNHEARD = (
    "an engine's process that fails while it starts is not noticed: EngineCore reads its workers' answers in the order "
    "of their ranks, a process that ends waits for its children without a deadline, and the host sees EngineCore's end "
    "only when all that was forked from it has ended"
)

ENGINE_CORE = Patch(
    symbol="vllm.v1.engine.core.EngineCoreProc.run_engine_core",
    looks="(*args, dp_rank=0, local_dp_rank=0, **kwargs)",
    tested="vLLM 0.31",
    symptom=_UNHEARD,
)
WORKER = Patch(
    symbol="vllm.v1.executor.multiproc_executor.WorkerProc.worker_main",
    looks="(*args, **kwargs)",
    tested="vLLM 0.31",
    symptom=_UNHEARD,
)
WORKERS_ANSWER = Patch(
    symbol="vllm.v1.executor.multiproc_executor.WorkerProc.enqueue_output",
    looks="(self, output)",
    contains=("isinstance(output, Exception)",),
    tested="vLLM 0.31",
    symptom=_UNHEARD,
)
STEP = Patch(
    symbol="vllm.v1.engine.core.EngineCoreProc._process_engine_step",
    looks="(self)",
    contains=("self.step_fn()", "return model_executed"),
    tested="vLLM 0.31",
    symptom="an engine that is alive and ends no step looks as a slow one does: nothing that it says of itself differs",
)
SPIN = Patch(
    symbol="vllm.distributed.device_communicators.shm_broadcast.SpinCondition.__init__",
    looks="(self, is_reader, context, notify_address, busy_loop_s=1)",
    tested="vLLM 0.31",
    symptom="an engine's idle processes look for messages without a pause for a second, on the ranks' cores",
)

SAMPLE = Patch(
    symbol="vllm.v1.worker.gpu_model_runner.GPUModelRunner.sample_tokens",
    looks="(self, grammar_output)",
    tested="vLLM 0.31",
    symptom="an engine on CPUs dies ('CPU Generator does not use offset') of prompts that do not fit into one step",
)


def report_processes(
    reporting: Callable[[Callable[..., None], str], Callable[..., None]], on_failure: Callable[[Exception], None]
) -> None:
    """Let vLLM's processes report their failures.

    Args:
        reporting: wraps the main function of a process, given the process's name.
        on_failure: called in a worker with the exception it answers.
    """

    def make(answer: Any) -> Any:
        @functools.wraps(answer)
        def answer_and_report(worker: Any, output: Any) -> None:
            if isinstance(output, Exception):
                on_failure(output)
            answer(worker, output)

        return answer_and_report

    ENGINE_CORE.apply(lambda run: reporting(run, "vLLM's EngineCore"))
    WORKER.apply(lambda run: reporting(run, "a worker of vLLM"))
    WORKERS_ANSWER.apply(make)


def report_steps(on_end: Callable[[float], None]) -> None:
    """Let EngineCore report the end of each step.

    Args:
        on_end: called in EngineCore's process with the step's seconds; not for steps without scheduled requests.
    """

    def make(process_step: Any) -> Any:
        @functools.wraps(process_step)
        def process_and_report(core: Any) -> bool:
            begun = time.monotonic()
            if is_executed := process_step(core):
                on_end(time.monotonic() - begun)
            return is_executed

        return process_and_report

    STEP.apply(make)


def set_no_generator_back() -> None:
    """Allow chunked prompts to be sampled with a seed on CPUs.

    vLLM samples after each chunk, discards the token, and sets the request's generator back; CPU generators cannot be
    set back. The patch does not use the generator before the prompt is complete.
    """

    def make(sample_tokens: Any) -> Any:
        @functools.wraps(sample_tokens)
        def sample_whole_ones(runner: Any, grammar_output: Any) -> Any:
            generators = runner.input_batch.generators
            thrown_away = runner.discard_request_mask.np[: runner.input_batch.num_reqs].nonzero()[0].tolist()
            unused = {row: generators.pop(row) for row in thrown_away if row in generators}
            try:
                return sample_tokens(runner, grammar_output)
            finally:
                generators.update(unused)

        return sample_whole_ones

    SAMPLE.apply(make)


def spin_for(seconds: float) -> None:
    """Set the seconds an idle process polls for messages without a pause after the last one."""
    SPIN.apply(lambda init: functools.partialmethod(init, busy_loop_s=seconds))
