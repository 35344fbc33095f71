"""Users' code in other threads: a thread for calls that may hang, separate streams, detection of main-thread needs.

No thread pool: the interpreter joins pool threads at exit.
"""

import contextlib
import contextvars
import functools
import importlib
import logging
import os
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from types import ModuleType
from typing import Any, TypeVar

from grpo.faults.failure import with_causes
from grpo.place.patches import stdlib

Result = TypeVar("Result")
_Queue = queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]


@contextlib.contextmanager
def exits_as_errors(prefix: str = "", *, in_main_thread: bool = False) -> Iterator[None]:
    """Turn `exit()` in users' code into an error: otherwise it would silently end an event loop or a rank.

    Args:
        prefix: of the error; on errors other than an exit it is added as a note.
        in_main_thread: an interrupt is Ctrl-C there, and passes through.
    """
    exits = SystemExit if in_main_thread else (SystemExit, KeyboardInterrupt)
    try:
        yield
    except exits as error:
        raise RuntimeError(f"{prefix}{type(error).__name__}: {error}") from error
    except Exception as error:
        if prefix:
            error.add_note(f"{prefix}{type(error).__name__}")
        raise


async def surviving(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Await the user's coroutine; see `exits_as_errors`."""
    with exits_as_errors():
        return await coroutine


class Worker:
    """Runs calls one after the other in its own daemon thread, which ends with this object after the submitted calls.

    Args:
        prepare: called first in the thread.
    """

    def __init__(self, name: str, prepare: Callable[[], None] = lambda: None) -> None:
        self._calls: _Queue = queue.SimpleQueue()
        thread = threading.Thread(target=_work, args=[self._calls, prepare], name=name, daemon=True)
        thread.start()
        self.thread_id = thread.ident
        weakref.finalize(self, self._calls.put, None)

    def run(self, call: Callable[[], Result]) -> "Future[Result]":
        """Submit a call, to run in the caller's context variables; returns its future."""
        future: Future[Result] = Future()
        context = contextvars.copy_context()
        self._calls.put((lambda: context.run(call), future))
        return future


def _work(calls: _Queue, prepare: Callable[[], None]) -> None:
    trouble: BaseException | None = None
    try:
        prepare()
    except BaseException as error:  # noqa: BLE001  thread boundary: every call raises it
        trouble = error
    while (given := calls.get()) is not None:
        call, future = given
        if future.set_running_or_notify_cancel():
            try:
                if trouble is not None:
                    raise trouble
                future.set_result(call())
            except StopIteration as error:  # asyncio futures refuse it
                future.set_exception(RuntimeError(f"StopIteration: {error}"))
            except BaseException as error:  # noqa: BLE001  thread boundary: the waiting thread raises it
                future.set_exception(error)
        del given, call, future  # a waiting thread keeps no objects alive


_log = logging.getLogger(__name__)
_NAMES = ("stdout", "stderr", "stdin")


class _StreamsOfCall:
    """Streams set by one call and by the threads it has started."""

    __slots__ = ("before", "depth", "targets")

    def __init__(self) -> None:
        self.depth = 0
        self.targets: dict[str, Any] = {}
        self.before: dict[str, Any] = {}
        """Stream at the time of the call's first assignment; assigning it again restores the process's."""


class _Stream:
    """Placeholder in the namespace of `sys`, where `print` and `input` look: forwards to the current thread's
    stream."""

    def __init__(self, name: str, target: Any) -> None:
        self._name = name
        self.target = target
        """Stream of all threads outside calls."""

    def current(self) -> Any:
        call = _calls.get(threading.get_ident())
        return self.target if call is None else call.targets.get(self._name, self.target)

    def write(self, text: str) -> Any:
        return len(text) if (stream := self.current()) is None else stream.write(text)

    def flush(self) -> None:
        if (stream := self.current()) is not None:
            stream.flush()

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self.current(), attribute)


class _Sys(ModuleType):
    """Class of `sys` while calls run: Python code reads and assigns the streams of its own thread."""

    stdout = property(lambda _: _stream("stdout"), lambda _, stream: _assign("stdout", stream))
    stderr = property(lambda _: _stream("stderr"), lambda _, stream: _assign("stderr", stream))
    stdin = property(lambda _: _stream("stdin"), lambda _, stream: _assign("stdin", stream))

    def __reduce__(self) -> Any:  # pickled by name: cloudpickle handles modules by their exact class
        return importlib.import_module, ("sys",)


_calls: dict[int, _StreamsOfCall] = {}
"""Streams by thread id."""
_num_open = 0
_patches = contextlib.ExitStack()
_warned: set[str] = set()
_lock = threading.RLock()  # a signal handler may assign a stream while its thread does


@contextlib.contextmanager
def own_streams(name: str) -> Iterator[None]:
    """Give a call of users' code its own `sys.stdout`, `stderr` and `stdin`, in any thread.

    `contextlib.redirect_stdout` or an assignment holds for this thread, and for threads started in the call, until the
    call ends. A stream left in place is dropped, with one warning per `name`. All other threads, including the main
    thread, read, redirect and assign the streams as usual. Nested calls in a thread, and tasks of its event loop, share
    theirs.

    Args:
        name: of the call, in words: `tool python`.
    """
    thread = threading.get_ident()
    with _lock:
        call = _enter(thread)
    try:
        yield
    finally:
        with _lock:
            left = _leave(thread, call)
        if left and name not in _warned:
            _warned.add(name)
            _log.warning(
                "%s has left another %s in place, which is put back: redirect within the call, by "
                "contextlib.redirect_stdout, say",
                name,
                " and ".join(f"sys.{stream}" for stream in left),
            )


def _enter(thread: int) -> _StreamsOfCall:
    global _num_open
    if (call := _calls.get(thread)) is None or not call.depth:
        call = _calls[thread] = _StreamsOfCall()
        if not _num_open:
            _patches.enter_context(stdlib.class_of_sys(_Sys))
            _patches.enter_context(stdlib.threads_of_calls(_following))
            for name in _NAMES:
                if not isinstance(held := vars(sys)[name], _Stream):
                    stdlib.put_stream(name, _Stream(name, held))
        _num_open += 1
    call.depth += 1
    return call


def _leave(thread: int, call: _StreamsOfCall) -> list[str]:
    """End a call; return the names of streams it left replaced."""
    global _num_open
    call.depth -= 1
    if call.depth or _calls.get(thread) is not call:  # the second: a forked child
        return []
    del _calls[thread]
    left = [name for name, target in call.targets.items() if target is not _stream(name)]
    call.targets.clear()  # for its own threads that go on
    _num_open -= 1
    if not _num_open:
        _put_back()
    return left


def _put_back() -> None:
    for name in _NAMES:
        if isinstance(held := vars(sys)[name], _Stream):
            stdlib.put_stream(name, held.target)
    _patches.close()


def _stream(name: str) -> Any:
    held = vars(sys)[name]
    return held.current() if isinstance(held, _Stream) else held


def _assign(name: str, stream: Any) -> None:
    """Assign a stream for the current call. A `_Stream` is one that code saved earlier and restores
    (`unittest.mock`)."""
    call = _calls.get(threading.get_ident())
    if call is not None and call.depth:
        if isinstance(stream, _Stream) or (name in call.targets and stream is call.before[name]):
            call.targets.pop(name, None)
            return
        if name not in call.targets:
            call.before[name] = _stream(name)
        call.targets[name] = stream
        return
    with _lock:
        is_plain = isinstance(stream, _Stream) or not isinstance(vars(sys)[name], _Stream)
        stdlib.put_stream(name, stream if is_plain else _Stream(name, stream))


def _following(start: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
    """Wrap `Thread.start`: a thread started in a call uses the call's streams."""

    def start_in_call(thread: threading.Thread) -> None:
        if (call := _calls.get(threading.get_ident())) is not None and call.depth:
            run, context = thread.run, contextvars.copy_context()  # as from Python 3.14 on

            def run_in_call() -> None:
                _calls[threading.get_ident()] = call
                try:
                    context.run(run)
                finally:
                    _calls.pop(threading.get_ident(), None)

            thread.run = run_in_call  # type: ignore[method-assign]
        start(thread)

    return start_in_call


_WORDS = ("main thread", "same thread", "different thread", "event loop in thread", "threaded environment")
"""Phrases in errors about signals, SQLite, greenlets, asyncio and math verifiers: the code may not run in this
thread."""
_noticed: dict[int, list[str]] = {}
"""Attempted signal calls by thread id."""
_patching = threading.Lock()
_signal_patches = contextlib.ExitStack()


class NeedsMainThreadError(Exception):
    """The call needs the main thread; its result in another thread does not count."""


@contextlib.contextmanager
def noticing_main_thread() -> Iterator[None]:
    """Detect users' code, run outside the main thread, that needs the main one.

    Raises:
        NeedsMainThreadError: it does; its result or exception is discarded.
    """
    with _noticing_signals() as noticed:
        try:
            yield
        except Exception as error:
            if noticed or any(words in str(cause) for cause in with_causes(error) for words in _WORDS):
                raise NeedsMainThreadError(f"{type(error).__name__}: {error}") from error
            raise
        if noticed:
            raise NeedsMainThreadError(f"it calls signal.{noticed[0]}")


@contextlib.contextmanager
def _noticing_signals() -> Iterator[list[str]]:
    """Record the signal calls of this thread, which raise. Code that sets an alarm may swallow the error and judge
    every answer wrong; the alarm itself would hit the main thread."""
    me = threading.get_ident()
    with _patching:
        if not _noticed:
            _signal_patches.enter_context(stdlib.signals_given(_STAND_INS))
        found = _noticed[me] = []
    try:
        yield found
    finally:
        with _patching:
            if _noticed.pop(me, None) is not None and not _noticed:
                _signal_patches.close()


def _note(name: str, *arguments: Any) -> Any:
    if (found := _noticed.get(threading.get_ident())) is not None:
        found.append(name)
        raise ValueError("signal only works in main thread of the main interpreter")
    return stdlib.SIGNALS[name](*arguments)


_STAND_INS = {name: functools.partial(_note, name) for name in stdlib.SIGNALS}
"""Replacements of the signal functions; a module imported in a call may keep one."""


def _forget_in_child() -> None:
    """Reset in a forked child, such as a pool's in a user's function: its one thread's streams become the process's;
    signals are its own, and locks are free."""
    global _lock, _num_open, _patching
    _patching = threading.Lock()
    _noticed.clear()
    _signal_patches.close()
    _lock = threading.RLock()
    if _num_open:
        _num_open = 0
        streams = {name: _stream(name) for name in _NAMES}
        _calls.clear()
        _put_back()
        for name, stream in streams.items():
            stdlib.put_stream(name, stream)


os.register_at_fork(after_in_child=_forget_in_child)
