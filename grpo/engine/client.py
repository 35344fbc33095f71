"""The local main's side of an engine: starts the host, talks to it, notices its death."""

import contextlib
import getpass
import itertools
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from grpo.engine.lifetime import end_session
from grpo.engine.messages import Abort, Answers, Call, Died, EngineSpec, Ready, Reply, Sample, Sampled
from grpo.engine.plugin import HOST_MARK

POLL_S = 0.5
SEND_TIMEOUT_S = 60  # a host that is stopped, or swapped out, does not read
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
    # vLLM's processes come out of the host by fork, with everything imported: 2 s instead of 13 s on two cores. vLLM
    # itself turns to spawn where CUDA is already initialised.
    env.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    env.setdefault("VLLM_NO_USAGE_STATS", "1")
    # Compiled kernels outlive an engine; its folder for temporary files, where they would go, does not.
    env.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}")
    if "VLLM_PLUGINS" in env and "grpo" not in env["VLLM_PLUGINS"].split(","):
        env["VLLM_PLUGINS"] = ",".join(filter(None, [env["VLLM_PLUGINS"], "grpo"]))
    env["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    if devices:
        # vLLM keeps what it compiles, inductor's kernels too, under this folder, in the home by default: one that all
        # nodes share, and it writes parts of it in place (0.31, `compilation/backends.py`).
        env.setdefault("VLLM_CACHE_ROOT", f"{tempfile.gettempdir()}/vllm_{getpass.getuser()}/{devices[0]}")
        if tensor_parallel_size > 1:
            _drop_expandable_segments(env)
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


def _drop_expandable_segments(env: dict[str, str]) -> None:
    """Take a setting of the trainer's allocator out of an engine's environment.

    With it workers cannot give each other their CUDA graphs' buffers (`cudaIpcGetMemHandle` refuses such memory), and
    end after graph capture without a word (vLLM 0.31, `custom_all_reduce.py`).
    """
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if name in env:
            kept = [part for part in env[name].split(",") if not part.strip().startswith("expandable_segments")]
            env[name] = ",".join(kept)


class EngineClient:
    """One engine of this node.

    Not collective: only the local main has one. Methods that wait take a deadline and raise `EngineError`, at once when
    the engine dies.

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
        self._hear: Callable[[Sampled | EngineError], None] = lambda answer: None
        self._death: EngineError | None = None
        self._said: str | None = None  # the host's own last words
        self._closing = False
        self._started = time.monotonic()

        # vLLM's processes meet at sockets and files in the folder for temporary files, and a killed one leaves them
        # there. Not under output_dir: the path of a socket has 107 bytes at most.
        self._private_folder = Path(tempfile.mkdtemp(prefix="grpo-engine-"))
        private = {HOST_MARK: str(self._private_folder), "TMPDIR": str(self._private_folder)}
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_TIMEOUT_S, 0))
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
        self._exit = threading.Thread(target=self._await_exit, name=f"grpo-{name}-exit", daemon=True)
        self._exit.start()
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

    def wait_ready(self, timeout_s: float, check: Callable[[], None] = lambda: None) -> Ready:
        """Wait until the engine takes work.

        Args:
            timeout_s: from its start on.
            check: called again and again meanwhile; what it raises ends the wait.

        Raises:
            EngineError: it ended first, or the deadline passed.
        """
        deadline = self._started + timeout_s
        while True:
            check()
            try:
                return self._ready.result(min(POLL_S, max(0.0, deadline - time.monotonic())))
            except FutureTimeout:
                if time.monotonic() > deadline:
                    raise self.error(f"is not ready after {timeout_s:.0f} s (vllm_start_timeout)") from None

    def listen(self, hear: Callable[[Sampled | EngineError], None]) -> None:
        """Say who gets what `submit` leads to, from now on.

        Args:
            hear: called from another thread: with every completion, and with an error when the engine refuses one or
                dies; at once if it is dead.
        """
        with self._lock:
            self._hear, death = hear, self._death
        if death is not None:
            hear(death)

    def submit(self, sample: Sample) -> None:
        """Send completions to be sampled; `listen` says where they go."""
        self._send(sample)

    def abort(self, ids: Sequence[int]) -> None:
        """Drop completions; those that have not been answered yet never will be."""
        self._send(Abort(ids=tuple(ids)))

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
        with _deaf_to_sigchld():
            end_session(self.pid, self._private_folder)
            self._exit.join()
        self._connection.close()

    # -- threads --------------------------------------------------------------------------------------------------

    def _send(self, message: object) -> None:
        # When it is dead or dying the exit thread says so to everyone who waits, with the reason.
        with self._send_lock, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            try:
                self._connection.send(message)
            except BlockingIOError:
                raise self.error(f"has not read from its socket for {SEND_TIMEOUT_S} s") from None

    def _receive(self) -> None:
        while True:
            try:
                message = self._connection.recv()
            except (EOFError, OSError, TypeError):  # TypeError: closed under our feet by `close`
                return
            except Exception as error:  # noqa: BLE001  whatever unpickling raises: without this thread nobody is answered
                self._said = f"what it sent cannot be read: {type(error).__name__}: {error}"
                end_session(self.pid, self._private_folder)
                return
            match message:
                case Ready():
                    self._ready.set_result(message)
                case Answers():
                    for sampled in message.sampled:
                        refused = sampled.error is not None
                        self._hear(self.error(f"refused a request: {sampled.error}") if refused else sampled)
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
        closing = self._closing
        end_session(self.pid, self._private_folder)
        self._receiver.join(2.0)  # its last words may still be in the socket
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        how = "was closed" if closing else how
        death = self.error(f"{how}" + (f": {self._said}" if self._said else ""))
        with self._lock:
            self._death, hear = death, self._hear
            waiting = [*self._calls.values()]
            self._calls.clear()
        if not self._ready.done():
            waiting.append(self._ready)
        for future in waiting:
            future.set_exception(death)
        hear(death)
        if self._on_death is not None and not closing:
            self._on_death(death)


@contextlib.contextmanager
def _deaf_to_sigchld() -> Iterator[None]:
    """Keep what handles SIGCHLD from interrupting us.

    torch's handler raises in the main thread at the end of any child, ours too, once one of its data-loader workers was
    killed (torch 2.13, `_set_SIGCHLD_handler`): an engine would be left half ended.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, handler)
