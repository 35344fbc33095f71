"""The local main's side of an engine: starts the host, talks to it, notices its death."""

import contextlib
import itertools
import os
import queue
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from grpo.engine.lifetime import end_session
from grpo.engine.messages import Abort, Call, Died, EngineSpec, Ready, Reply, Sample, Sampled
from grpo.engine.plugin import HOST_MARK

LOG_TAIL_LINES = 20
LOG_BYTES = 256 * 1024  # how far back to look for them
_ERROR_LINE = re.compile(r"\b[A-Z]\w*(Error|Exception): ")

# What a launcher sets for its ranks. An engine that saw it would join the trainer's rendezvous:
# TORCHELASTIC_USE_AGENT_STORE, for one, makes every rank a client of the agent's store, and vLLM's own group hangs.
_LAUNCHER_VARIABLES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"}
_LAUNCHER_VARIABLES |= {"MASTER_ADDR", "MASTER_PORT", "TORCH_FR_DUMP_TEMP_FILE", "OMP_NUM_THREADS"}
_LAUNCHER_PREFIXES = ("ROLE_", "TORCHELASTIC_", "ACCELERATE_", "FSDP_")


class EngineError(RuntimeError):
    """An engine failed: it did not start, died, refused, or let a deadline pass. The text ends with its log."""


def engine_environment(
    inherited: Mapping[str, str], *, devices: Sequence[str], tensor_parallel_size: int, engines_per_node: int
) -> dict[str, str]:
    """The environment of an engine host: the inherited one without the launcher's variables, with its own devices.

    Args:
        devices: values for CUDA_VISIBLE_DEVICES; empty on a machine without GPUs.
    """
    env = {
        name: value
        for name, value in inherited.items()
        if name not in _LAUNCHER_VARIABLES and not name.startswith(_LAUNCHER_PREFIXES)
    }
    env["PYTHONUNBUFFERED"] = "1"
    # A forked process would inherit the flag by which vLLM remembers that its plugins have run, and skip ours.
    env["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    env.setdefault("VLLM_NO_USAGE_STATS", "1")
    if "VLLM_PLUGINS" in env and "grpo" not in env["VLLM_PLUGINS"].split(","):
        env["VLLM_PLUGINS"] = ",".join(filter(None, [env["VLLM_PLUGINS"], "grpo"]))
    if devices:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        return env
    cores = sorted(os.sched_getaffinity(0))
    if tensor_parallel_size > 1:
        # Without a core list per worker vLLM stops with "Not enough allowed NUMA nodes" (0.31).
        lists = [cores[rank::tensor_parallel_size] or cores[:1] for rank in range(tensor_parallel_size)]
        env.setdefault("VLLM_CPU_OMP_THREADS_BIND", "|".join(",".join(map(str, part)) for part in lists))
    else:
        # The ranks wait while the engine generates: let it use their cores, bound to none.
        env.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        env["OMP_NUM_THREADS"] = str(max(1, len(cores) // engines_per_node))
    env.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # idle threads that spin take the cores from the ranks that train
    return env


class EngineClient:
    """One engine of this node.

    Not collective: only the local main has one. Start it from the main thread. Methods that wait take a deadline and
    raise `EngineError`, at once when the engine dies.

    Args:
        name: e.g. `engine 0 of node 1`, for messages.
        log_path: the engine's own log; appended to.
        on_death: called once from another thread, with the error, when the engine ends unasked.
    """

    def __init__(
        self,
        spec: EngineSpec,
        *,
        name: str,
        environment: Mapping[str, str],
        log_path: Path,
        on_death: Callable[[EngineError], None] | None = None,
    ) -> None:
        self.name = name
        self.log_path = log_path
        self._on_death = on_death
        self._call_ids = itertools.count()
        self._lock = threading.Lock()
        self._calls: dict[int, Future[Any]] = {}
        self._ready: Future[Ready] = Future()
        self._sampled: queue.SimpleQueue[Sampled | EngineError] = queue.SimpleQueue()
        self._death: EngineError | None = None
        self._said: str | None = None  # the host's own last words
        self._closing = False

        # vLLM's processes meet at sockets in a folder that is /tmp unless told otherwise, where a killed one leaves
        # them behind. Under /tmp, too: the path of a socket has 107 bytes at most, and output_dir may be long.
        self._private_folder = Path(tempfile.mkdtemp(prefix="grpo-engine-"))
        private = {HOST_MARK: str(self._private_folder), "VLLM_RPC_BASE_PATH": str(self._private_folder)}
        ours, theirs = socket.socketpair()
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log, theirs:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "grpo.engine.host", str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**environment, **private},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._connection = Connection(ours.detach())
        self._send_lock = threading.Lock()
        self._receiver = threading.Thread(target=self._receive, name=f"grpo-{name}-receiver", daemon=True)
        self._receiver.start()
        threading.Thread(target=self._await_exit, name=f"grpo-{name}-exit", daemon=True).start()
        self._send(spec)

    @property
    def pid(self) -> int:
        """The host's pid; also the id of the session that holds all processes of this engine."""
        return self._process.pid

    def log_tail(self) -> str:
        """The first error in what this engine wrote, if there is one, and the last lines.

        An error in one of vLLM's inner processes comes first in the log; what the outer ones make of it ("See root
        cause above") fills the end.
        """
        with self.log_path.open("rb") as log:
            log.seek(max(self._log_start, os.fstat(log.fileno()).st_size - LOG_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
        first = next((index for index, line in enumerate(lines) if _ERROR_LINE.search(line)), len(lines))
        tail = lines[-LOG_TAIL_LINES:]
        return "\n".join(tail if first >= len(lines) - LOG_TAIL_LINES else [lines[first], "...", *tail])

    # -- waiting --------------------------------------------------------------------------------------------------

    def wait_ready(self, timeout_s: float) -> Ready:
        """Wait until the engine takes work.

        Raises:
            EngineError: it ended first, or the deadline passed.
        """
        try:
            return self._ready.result(timeout_s)
        except FutureTimeout:
            raise self.error(f"is not ready after {timeout_s:.0f} s (vllm_start_timeout)") from None

    def submit(self, requests: Sequence[Sample]) -> None:
        """Send requests; each is answered through `next_sampled`."""
        for request in requests:
            self._send(request)

    def abort(self, request_ids: Sequence[int]) -> None:
        """Drop requests; those that have not been answered yet never will be."""
        self._send(Abort(request_ids=tuple(request_ids)))

    def next_sampled(self, timeout_s: float) -> Sampled | None:
        """The next finished request, None when there is none within `timeout_s`.

        Raises:
            EngineError: the engine died, or refused this request.
        """
        try:
            item = self._sampled.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            return None
        if isinstance(item, EngineError):
            self._sampled.put(item)  # for whoever asks next
            raise item
        if item.error is not None:
            raise self.error(f"refused a request: {item.error}")
        return item

    def call(self, method: str, timeout_s: float, **kwargs: Any) -> Any:
        """Run a control call in the engine and wait for its value."""
        call = Call(call_id=next(self._call_ids), method=method, kwargs=kwargs)
        future: Future[Any] = Future()
        with self._lock:
            if self._death is not None:
                raise self._death
            self._calls[call.call_id] = future
        self._send(call)
        try:
            return future.result(timeout_s)
        except FutureTimeout:
            raise self.error(f"did not answer {method} within {timeout_s:.0f} s") from None

    def error(self, what: str) -> EngineError:
        """An error about this engine, with the last lines of its log."""
        return EngineError(f"{self.name} {what}; the last lines of {self.log_path}:\n{self.log_tail()}")

    def close(self) -> None:
        """End the engine and everything that it started. Safe to call twice."""
        self._closing = True
        end_session(self.pid)
        self._process.wait()
        self._connection.close()
        shutil.rmtree(self._private_folder, ignore_errors=True)

    # -- threads --------------------------------------------------------------------------------------------------

    def _send(self, message: object) -> None:
        # When it is dead or dying the exit thread says so to everyone who waits, with the reason.
        with self._send_lock, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._connection.send(message)

    def _receive(self) -> None:
        while True:
            try:
                message = self._connection.recv()
            except (EOFError, OSError, TypeError):  # TypeError: closed under our feet by `close`
                return
            match message:
                case Ready():
                    self._ready.set_result(message)
                case Sampled():
                    self._sampled.put(message)
                case Reply():
                    with self._lock:
                        future = self._calls.pop(message.call_id, None)
                    if future is None:
                        continue  # its caller gave up
                    if message.error is None:
                        future.set_result(message.value)
                    else:
                        future.set_exception(self.error(f"failed: {message.error}"))
                case Died():
                    self._said = message.cause

    def _await_exit(self) -> None:
        code = self._process.wait()
        if self._closing:
            return
        end_session(self.pid)
        shutil.rmtree(self._private_folder, ignore_errors=True)
        self._receiver.join(2.0)  # its last words may still be in the socket
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        death = self.error(f"{how}" + (f": {self._said}" if self._said else ""))
        with self._lock:
            self._death = death
            waiting = [*self._calls.values()]
            self._calls.clear()
        if not self._ready.done():
            waiting.append(self._ready)
        for future in waiting:
            future.set_exception(death)
        self._sampled.put(death)
        if self._on_death is not None:
            self._on_death(death)
