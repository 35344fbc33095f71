"""Environments outside the main thread: each is made, reset, called and asked for its reward in its own thread."""

import contextvars
import functools
import inspect
import threading
import types
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import Any

from grpo.faults.users_code import Worker, own_streams
from grpo.rollout.turns.declared import may_run_in_threads

POLL_S = 0.2  # interval at which the main thread, waiting for a reset, checks for a failure elsewhere
_homes: "dict[int, Home]" = {}
"""Homes by id of the environment."""


class Home:
    """Thread of an environment."""

    def __init__(self, prepare: Callable[[], None]) -> None:
        self.is_lost = False
        """True if a call in it does not return; further environments are made by the factory."""
        self.coming: Future[Any] | None = None
        """Future of a reset started ahead; the trainer's reset waits for it."""
        self._worker, self._context = Worker("grpo-environment", prepare), contextvars.copy_context()

    @property
    def is_here(self) -> bool:
        return threading.get_ident() == self._worker.thread_id

    def run(self, call: Callable[[], Any]) -> Any:
        """Run a call in the thread, and return its future; calls share their context variables, as in a single
        thread."""
        return self._worker.run(lambda: self._context.run(call))

    def result_of(self, name: str, call: Callable[[], Any]) -> Any:
        def with_own_streams() -> Any:
            with own_streams(name):
                return call()

        return _result_of(self.run(with_own_streams))


def _result_of(future: "Future[Any]") -> Any:
    while not wait([future], POLL_S).done:
        pass
    return future.result()


def in_their_threads(factories: Any, *, of_all: bool, prepare: Callable[[], None]) -> Any:
    """Wrap `environment_factory` for TRL, so that environments live in threads.

    Args:
        of_all: False: only declared ones.
        prepare: called first in each thread.
    """
    if isinstance(factories, Mapping):
        return {name: in_their_threads(each, of_all=of_all, prepare=prepare) for name, each in factories.items()}
    if factories is None or not (of_all or may_run_in_threads(factories)):
        return factories

    def factory() -> Any:
        home = Home(prepare)
        environment = home.result_of("an environment", factories)
        kind: Any = type(environment)
        try:
            weakref.finalize(environment, _homes.pop, id(environment), None).atexit = False
            object.__setattr__(environment, "__class__", _dispatching(kind))  # also of a frozen dataclass
        except TypeError as error:
            raise TypeError(
                f"{kind.__name__} cannot live in a thread of its own ({error}): leave max_tool_threads and in_threads "
                "away, and its calls run in the main thread"
            ) from error
        _homes[id(environment)] = home
        return environment

    return factory


def home_of(tool: Any) -> Home | None:
    """Home of the environment a method belongs to; None for other functions."""
    return _homes.get(id(getattr(tool, "__self__", None)))


@functools.cache
def _dispatching(kind: type) -> type:
    """Subclass of `kind` whose public methods run in the environment's thread."""
    methods = {
        name: _dispatched(function)
        for name, function in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_")
        and not inspect.iscoroutinefunction(function)
        and not isinstance(inspect.getattr_static(kind, name), staticmethod)
    }
    names = {"__slots__": (), "__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return types.new_class(kind.__name__, (kind,), {}, lambda namespace: namespace.update(names | methods))


def _dispatched(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        home = _homes.get(id(self))
        if home is not None and home.coming is not None and function.__name__ == "reset" and not home.is_here:
            coming, home.coming = home.coming, None
            return _result_of(coming)
        if home is None or home.is_here or home.is_lost:
            return function(self, *args, **kwargs)
        return home.result_of(f"{function.__qualname__}", lambda: function(self, *args, **kwargs))

    return method
