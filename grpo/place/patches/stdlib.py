"""Patches of Python's standard library."""

import contextlib
import functools
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

from grpo.place.patches.patch import Patch

PYTHON = "Python 3.11 to 3.13"

DISTRIBUTIONS = Patch(
    symbol="importlib.metadata.packages_distributions",
    looks="()",
    tested=f"{PYTHON}, transformers 5.17, TRL 1.16",
    symptom="transformers and TRL read the metadata of every installed package, one after the other, several times",
)
MESSAGES = Patch(
    symbol="argparse.ArgumentParser._print_message",
    looks="(self, message, file=None)",
    tested=PYTHON,
    symptom="every rank of a node prints the same complaint about the command line",
)
TEMPORARY_FILES = Patch(
    symbol="tempfile.tempdir",
    looks="str | NoneType",
    tested=f"{PYTHON}, torch 2.13",
    symptom="torchrun makes folders for its logs where temporary files go, and leaves them behind",
)
_DIES = (
    "what multiprocessing has made in /dev/shm stays behind an engine that was killed: the resource tracker, which "
    "would remove it, dies with the session, and a name says nothing of whose it is"
)
SEGMENTS = Patch(symbol="multiprocessing.shared_memory._SHM_NAME_PREFIX", looks="str", tested=PYTHON, symptom=_DIES)
SEGMENTS_LENGTH = Patch(
    symbol="multiprocessing.shared_memory._SHM_SAFE_NAME_LENGTH", looks="int", tested=PYTHON, symptom=_DIES
)
SEMAPHORES = Patch(
    symbol="multiprocessing.process._current_process._config.semprefix", looks="str", tested=PYTHON, symptom=_DIES
)

_SHARED = (
    "a call that redirects sys.stdout, beside others in other threads, collects what those print, loses what it prints "
    "itself, and may leave another stream in place for good"
)
SYS = Patch(symbol="sys.__class__", looks="type", tested=PYTHON, symptom=_SHARED)
START = Patch(symbol="threading.Thread.start", looks="(self, ...)", tested=PYTHON, symptom=_SHARED)

SIGNALS: dict[str, Any] = {name: getattr(vars(signal)["_signal"], name) for name in ("signal", "alarm", "setitimer")}
"""C functions by name: `signal.signal` calls the first; `from signal import alarm` yields the second itself. Only the
main thread may call them, and code often hides that it tried."""


def reading_packages_once() -> contextlib.AbstractContextManager[None]:
    return DISTRIBUTIONS.applied(functools.cache)


def mute_argparse() -> None:
    MESSAGES.apply(lambda _: lambda *_: None)


def temporary_files_in(folder: str) -> contextlib.AbstractContextManager[None]:
    return TEMPORARY_FILES.applied(lambda _: folder)


def name_shared_memory(folder_name: str) -> None:
    """Prefix everything `multiprocessing` creates in /dev/shm, here and in forked processes, with this name."""
    SEGMENTS.apply(lambda _: f"/{folder_name}-")
    SEGMENTS_LENGTH.apply(lambda _: len(f"/{folder_name}-") + 8)
    SEMAPHORES.apply(lambda _: f"/{folder_name}")


def class_of_sys(given: type[ModuleType]) -> contextlib.AbstractContextManager[None]:
    """Replace the class of `sys` in a `with` block: properties of the class take precedence over the module's
    attributes."""
    return SYS.applied(lambda _: given)


def threads_of_calls(
    following: Callable[[Callable[..., None]], Callable[..., None]],
) -> contextlib.AbstractContextManager[None]:
    """Start threads by `following(start)` in a `with` block."""
    return START.applied(following)


def put_stream(name: str, stream: Any) -> None:
    """Set `sys.stdout` or `sys.stderr` in the module's dict: C code such as `print` finds it there, past the class of
    `sys`."""
    vars(sys)[name] = stream


@contextlib.contextmanager
def signals_given(stand_ins: Mapping[str, Any]) -> Iterator[None]:
    """Replace `SIGNALS` by `stand_ins` in a `with` block, in all modules with one of them, under any name."""
    held = [place for place in _places_of_signals(len(sys.modules)) if place[0].get(place[1]) is SIGNALS[place[2]]]
    for namespace, name, signal_name in held:
        namespace[name] = stand_ins[signal_name]
    try:
        yield
    finally:
        for namespace, name, signal_name in held:
            if namespace.get(name) is stand_ins[signal_name]:
                namespace[name] = SIGNALS[signal_name]


@functools.lru_cache(maxsize=1)
def _places_of_signals(num_modules: int) -> list[tuple[dict[str, Any], str, str]]:
    """List (namespace, name there, name in `SIGNALS`). Takes 30 ms, so it is cached by the number of modules."""
    names = {id(function): name for name, function in SIGNALS.items()}
    namespaces = [vars(module) for module in [*sys.modules.values()] if isinstance(module, ModuleType)]
    return [
        (namespace, name, names[id(value)])
        for namespace in namespaces
        for name, value in [*namespace.items()]
        if id(value) in names
    ]
