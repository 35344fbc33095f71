"""The engine host: `python -m grpo.engine.host FD PARENT_PID PROGRESS_FD`, one vLLM engine behind one socket.

It imports vLLM, and waits for the engine's spec. Then it drives vLLM's asynchronous engine, so that requests have ids,
finish one by one and can be aborted. Started by `grpo.engine.process.HostProcess`; no other process can reach it.
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
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

from grpo.engine.compile_caches import note_slots, take_slots
from grpo.engine.inner_processes import StartWatch, report_failures, share_cores
from grpo.engine.lifetime import end_session_with
from grpo.engine.messages import Died, EngineSpec, Ready, Start
from grpo.engine.plugin import FIRST_OUTPUT, HOST_MARK
from grpo.engine.progress import count_steps
from grpo.engine.requests import Host
from grpo.faults.kinds import kind_of, text_of
from grpo.place.importing import importing
from grpo.place.log import flush_log, open_log, start_log
from grpo.place.patches.torch import compile_nothing, keep_headers, write_libraries_whole
from grpo.place.patches.vllm import set_no_generator_back

_log = logging.getLogger("grpo.engine.host")  # this file runs as `__main__`


async def run(
    connection: Connection, spec: EngineSpec, startup_s: Callable[[], float], fail: Callable[[Died], None]
) -> None:
    """Build the engine, and serve requests.

    Args:
        startup_s: returns the seconds this host has worked on the start, as for `Ready`.
        fail: ends this process, with a cause.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    args = AsyncEngineArgs(**spec.engine_args)
    _log.info("builds vLLM's engine for %s", args.model)
    start_method = os.environ["VLLM_WORKER_MULTIPROC_METHOD"]
    # With vLLM's batch limits for throughput (on an H100 1024 sequences and 16384 tokens); without a usage context an
    # engine runs 128 sequences and 2048 tokens at once (0.31).
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
        if died := watch.cause():  # vLLM's own text is "see root cause above", in its log (0.31)
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
    """Import the engine's code; its processes are forked from this one. No device is touched."""
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
    """Clear vLLM's cached properties of the first GPU, read at import (0.31): the first GPU is another one now."""
    from vllm.platforms import current_platform

    if clear := getattr(current_platform.get_device_capability, "cache_clear", None):
        clear()


def take_up(environment: Mapping[str, str], log_path: Path, inherited: Mapping[str, str]) -> None:
    """Switch to the engine's environment and log.

    Args:
        inherited: this process's environment at its start; vLLM's later changes are kept.
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


_ending = threading.Lock()  # never released: only the first cause is sent


def say_and_end(connection: Connection, parent_pid: int, died: Died) -> NoReturn:
    """Send the local main the reason why this engine cannot continue, and end this process; from any thread."""
    _ending.acquire()
    _log.error("ends: %s", died.cause.partition("\n")[0])
    flush_log()
    while os.getppid() != parent_pid:
        time.sleep(1)  # the local main is gone: the watch ends this session, and needs this process until it is done
    with contextlib.suppress(OSError):
        connection.send(died)
    os._exit(1)  # vLLM's destructors print tracebacks during interpreter shutdown (0.31)


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
        _log.debug("vLLM is imported, after %.1f s; waits to be given what to run", loaded - started)
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
