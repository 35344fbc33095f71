"""Users' code that only the main thread may run is noticed in another one."""

import contextlib
import functools
import os
import threading
from collections.abc import Iterator
from typing import Any

from grpo.faults.foreign import with_causes
from grpo.place.patches import stdlib

_WORDS = ("main thread", "same thread", "different thread", "event loop in thread", "threaded environment")
"""In errors of signals, SQLite, greenlets, asyncio, verifiers of mathematics: another thread may not run the code."""
_noticed: dict[int, list[str]] = {}
"""By thread: what it has tried to do with signals."""
_patching = threading.Lock()
_patches = contextlib.ExitStack()


class NeedsMainThreadError(Exception):
    """The call does what only the main thread may, so what it brought in another one does not count."""


@contextlib.contextmanager
def noticing_main_thread() -> Iterator[None]:
    """Around a call of users' code in another thread than the main one.

    Raises:
        NeedsMainThreadError: it does what only the main thread may; what it brings, or raises, is of no worth.
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
    """What this thread tries to do with signals, which raises. Code that sets an alarm may swallow that, and take every
    answer for a wrong one; the alarm itself would strike the main thread."""
    me = threading.get_ident()
    with _patching:
        if not _noticed:
            _patches.enter_context(stdlib.signals_given(_STAND_INS))
        found = _noticed[me] = []
    try:
        yield found
    finally:
        with _patching:
            if _noticed.pop(me, None) is not None and not _noticed:
                _patches.close()


def _note(name: str, *arguments: Any) -> Any:
    if (found := _noticed.get(threading.get_ident())) is not None:
        found.append(name)
        raise ValueError("signal only works in main thread of the main interpreter")
    return stdlib.SIGNALS[name](*arguments)


_STAND_INS = {name: functools.partial(_note, name) for name in stdlib.SIGNALS}
"""A module that is imported in a call keeps one of these."""


def _forget_in_child() -> None:
    """A forked child, of a pool that a reward function has, say: signals are its own, and the lock is free."""
    global _patching
    _patching = threading.Lock()
    _noticed.clear()
    _patches.close()


os.register_at_fork(after_in_child=_forget_in_child)
