"""The local main's client of an engine: starts it through a host, sends requests, notices its death."""

import contextlib
import itertools
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any

from grpo.engine.early import take_host
from grpo.engine.messages import Abort, Answers, Call, Died, EngineSpec, Ready, Reply, Sample, Sampled, Start
from grpo.engine.process import END_S, SEND_TIMEOUT_S, deaf_to_sigchld
from grpo.engine.progress import StallWatch
from grpo.faults.failure import FailureKind, GrpoError
from grpo.place.log import is_record

POLL_S = 0.5
STOPPED_TIMEOUT_S = 20.0
STEPPING = ("prompt_logprobs", "pause")  # calls that wait for steps of the engine
LOG_TAIL_LINES = 20
LOG_BYTES = 256 * 1024  # searched from the end
_ERROR_LINE = re.compile(r"\b[A-Z]\w*(?:Error|Exception): .*")


def root_error(log: str) -> str:
    """Return the first error in an engine's log that is not another process's report of a dead one; '' without any."""
    found = (match[0] for match in _ERROR_LINE.finditer(log))
    return next((line for line in found if "EngineDead" not in line and "EngineCore" not in line), "")


class EngineError(GrpoError):
    """An engine failed: it did not start, died, refused, or missed a deadline.

    Args:
        what: description of the failure.
        log: last lines of the engine's log, appended to the message.
        kind: kind reported by the engine itself.
    """

    kind = FailureKind.ENGINE

    def __init__(self, what: str, *, log: str = "", kind: FailureKind | None = None) -> None:
        super().__init__(f"{what}{log}", kind=kind)
        self.what = what


class EngineDied(EngineError):
    """The engine's processes have ended: it will answer nothing more."""

    is_requests_fault = False
    """True if the engine pool has found that a request killed the engine."""


class EngineClient:
    """One engine of this node, for one life.

    Not collective: only the local main has one. Methods that wait take a deadline and raise `EngineError`, at once if
    the engine dies.

    Args:
        name: for messages, e.g. `engine 0 of node 1`.
        log_path: the engine's own log; appended to.
        on_death: called once from another thread, with the error, if the engine ends unexpectedly.
        stopped_timeout_s: time after which an engine with a stopped process (SIGSTOP) is ended.
        stall_timeout_s: time after which an engine with pending completions that finishes no step is ended; see
            `StallWatch`.
    """

    def __init__(
        self,
        spec: EngineSpec,
        *,
        name: str,
        environment: Mapping[str, str],
        log_path: Path,
        on_death: Callable[[EngineDied], None] | None = None,
        stopped_timeout_s: float = STOPPED_TIMEOUT_S,
        stall_timeout_s: float | None = None,
    ) -> None:
        self.name = name
        self.log_path = log_path
        self._on_death = on_death
        self._stopped_timeout_s = stopped_timeout_s
        self._call_ids = itertools.count()
        self._lock = threading.Lock()
        self._calls: dict[int, tuple[str, Future[Any]]] = {}
        self._owed: set[int] = set()  # ids of completions neither answered nor aborted
        self._num_answers = 0
        self._has_generated = False
        self._is_paused = False
        self._stalls = StallWatch(stall_timeout_s, on_cpu=not environment.get("CUDA_VISIBLE_DEVICES"))
        self._stuck = ""  # since when, and its stacks
        self._ready: Future[Ready] = Future()
        self._on_answer: Callable[[Sampled | EngineError], None] = lambda answer: None
        self._death: EngineDied | None = None
        self._said = Died(cause="")  # the host's own last message
        self._closing = self._is_late = False
        self.is_dead = False
        """True once its host has ended; `on_death` follows when its other processes have."""
        self._started = time.monotonic()

        log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log_start = log_path.stat().st_size if log_path.exists() else 0
        self._host = take_host(environment)
        self.private_folder = self._host.private_folder
        self._connection = self._host.connection
        self._send_lock = threading.Lock()
        self._receiver = threading.Thread(target=self._receive, name=f"grpo-{name}-receiver", daemon=True)
        self._receiver.start()
        self._exit = threading.Thread(target=self._await_exit, name=f"grpo-{name}-exit", daemon=True)
        self._exit.start()
        self._send(Start(spec=spec, environment=self._host.private(environment), log_path=log_path.absolute()))

    @property
    def pid(self) -> int:
        """Pid of the host; also the id of the session of all processes of this engine."""
        return self._host.pid

    def log_tail(self) -> str:
        """Return the first error in this engine's log, if any, and its last lines; or the reason why it cannot be read.

        An error in one of vLLM's inner processes comes first in the log; the outer ones' reports of it ("See root cause
        above") fill the end.
        """
        try:
            with self.log_path.open("rb") as log:
                log.seek(max(self._log_start, os.fstat(log.fileno()).st_size - LOG_BYTES))
                written = log.read()
        except FileNotFoundError:  # not written yet, or removed
            written = b""
        except OSError as error:
            written = f"it cannot be read: {error}\n".encode()
        lines = (written + self._host.first_output()).decode(errors="replace").splitlines()
        lines = [line for line in lines if not is_record(line)]  # our own records repeat the error
        first = next((index for index, line in enumerate(lines) if _ERROR_LINE.search(line)), len(lines))
        tail = lines[-LOG_TAIL_LINES:]
        return "\n".join(tail if first >= len(lines) - LOG_TAIL_LINES else [lines[first], "...", *tail])

    # -- waiting --------------------------------------------------------------------------------------------------

    def wait_ready(self, timeout_s: float, check: Callable[[], None] = lambda: None) -> Ready:
        """Wait until the engine takes work.

        Args:
            timeout_s: from its start.
            check: called repeatedly meanwhile; an exception from it ends the wait.

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
                    self._is_late = True
                    raise self.error(f"is not ready after {timeout_s:.0f} s (vllm_start_timeout) [GRPO-401]") from None

    def listen(self, on_answer: Callable[[Sampled | EngineError], None]) -> None:
        """Set the receiver of results from `submit`.

        Args:
            on_answer: called from another thread with every completion or refusal, and with an error if the engine
                fails at one or dies; immediately if it is dead.
        """
        with self._lock:
            self._on_answer, death = on_answer, self._death
        if death is not None:
            on_answer(death)

    def submit(self, sample: Sample) -> None:
        """Send completions to be sampled; results go to the receiver set by `listen`."""
        with self._lock:
            self._owed.update(sample.ids)
        self._send(sample)

    def abort(self, ids: Sequence[int]) -> None:
        """Drop completions; those not answered yet never will be."""
        with self._lock:
            self._owed.difference_update(ids)
        self._send(Abort(ids=tuple(ids)))

    def call(self, method: str, timeout_s: float, **kwargs: Any) -> Any:
        """Run a control call in the engine and return its value."""
        call = Call(call_id=next(self._call_ids), method=method, kwargs=kwargs)
        future: Future[Any] = Future()
        with self._lock:
            if self._death is not None:
                raise self._death
            self._calls[call.call_id] = (method, future)
        self._send(call)
        try:
            return future.result(timeout_s)
        except FutureTimeout:
            with self._lock:
                self._calls.pop(call.call_id, None)
            raise self.error(f"did not answer {method} within {timeout_s:.0f} s") from None

    def error(self, what: str, kind: FailureKind | None = None) -> EngineError:
        """Make an error about this engine, with the last lines of its log."""
        return EngineError(f"{self.name} {what}", log=self._log(), kind=kind)

    def _log(self) -> str:
        return f"; the last lines of {self.log_path}:\n{self.log_tail()}"

    def close(self) -> None:
        """End the engine and all its processes. Safe to call twice.

        Raises:
            EngineError: its host still exists `END_S` after SIGKILL.
        """
        self._closing = True
        with deaf_to_sigchld():
            if self._is_late and not self._ready.done():
                self._host.end_late()
            self._host.end()
            # which may hold the last reference to the object closing this one
            if threading.current_thread() is not self._exit:
                self._exit.join(END_S)
        self._connection.close()
        if self._host.is_running():
            raise self.error(f"(pid {self.pid}) does not end {END_S:.0f} s after SIGKILL: a driver may hold it")

    # -- threads --------------------------------------------------------------------------------------------------

    def _send(self, message: object) -> None:
        # If it is dead or dying, the exit thread informs all waiting callers, with the reason.
        with self._send_lock, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            try:
                self._connection.send(message)
            except BlockingIOError:
                raise self.error(f"has not read from its socket for {SEND_TIMEOUT_S} s") from None

    def _receive(self) -> None:
        while True:
            try:
                message = self._connection.recv()
            except (EOFError, OSError, TypeError):  # TypeError: closed by `close` at the same time
                return
            except Exception as error:  # noqa: BLE001  any unpickling error: without this thread no request is answered
                self._said = Died(cause=f"what it sent cannot be read: {type(error).__name__}: {error}")
                self._host.end()
                return
            match message:
                case Ready():
                    self._ready.set_result(message)
                case Answers():
                    with self._lock:
                        self._owed.difference_update(sampled.completion_id for sampled in message.sampled)
                        self._num_answers += len(message.sampled)
                        self._has_generated |= not self._owed
                    for sampled in message.sampled:
                        is_lost = sampled.error is not None and not sampled.is_refusal
                        self._on_answer(self.error(f"failed at a request: {sampled.error}") if is_lost else sampled)
                case Reply():
                    with self._lock:
                        method, future = self._calls.pop(message.call_id, ("", None))
                        if method in ("pause", "resume") and message.error is None:
                            self._is_paused = method == "pause"
                    if future is None:
                        continue  # its caller gave up
                    if message.error is None:
                        future.set_result(message.value)
                    else:
                        future.set_exception(self.error(f"failed: {message.error}", message.kind))
                case Died():
                    self._said = message

    def _look_for_stall(self, passed_s: float) -> str | None:
        steps, slowest_s = self._host.progress.read()
        with self._lock:
            methods = [method for method, _ in self._calls.values()]
            may_step = not self._is_paused and all(method in STEPPING for method in methods)
            num_owed = len(self._owed) + len(methods) if may_step else 0
            answers, is_first = self._num_answers, not self._has_generated
        stalled_s = self._stalls.look(
            passed_s, owes=num_owed > 0, steps=steps, answers=answers, slowest_s=slowest_s, is_first=is_first
        )
        if stalled_s is None:
            return None
        self._stuck = (
            f"is stuck: it has ended no step for {stalled_s:.0f} s (vllm_stall_timeout), with {num_owed} requests "
            f"under way; its slowest of {steps} steps took {slowest_s:.1f} s [GRPO-415]\n"
            f"where its processes are, the innermost call first:\n{self._host.stacks()}"
        )
        return self._stuck

    def _await_exit(self) -> None:
        if fault := self._host.wait_for_end(self._stopped_timeout_s, self._look_for_stall):
            if not self._stuck:
                self._said = Died(cause=fault)
            self._host.end()
        self.is_dead = True
        code = self._host.wait()
        closing = self._closing
        # A full disk or a missing folder must not keep anyone from being informed.
        with contextlib.suppress(OSError), self.log_path.open("ab") as log:
            log.write(self._host.first_output())  # of one that ended before it opened its log
        self._host.end()
        self._receiver.join(2.0)  # its last messages may still be in the socket
        how = f"was killed by signal {-code} [GRPO-406]" if code < 0 else f"ended with exit code {code} [GRPO-404]"
        how = "was closed" if closing else self._stuck or how
        said = f": {self._said.cause}" if self._said.cause else ""
        if "EngineDeadError" in said and (root := root_error(self.log_tail())):
            said = f": {root}"  # vLLM's text refers to the log above, which is not shown here
        death = EngineDied(f"{self.name} {how}{said}", log=self._log(), kind=self._said.kind)
        if self._stuck:
            with contextlib.suppress(OSError), self.log_path.open("ab") as log:
                log.write(f"{death.what}\n".encode())
        with self._lock:
            self._death, on_answer = death, self._on_answer
            waiting = [future for _, future in self._calls.values()]
            self._calls.clear()
        if not self._ready.done():
            waiting.append(self._ready)
        for future in waiting:
            future.set_exception(death)
        on_answer(death)
        if self._on_death is not None and not closing:
            self._on_death(death)
