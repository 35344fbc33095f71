"""Declarations of users: a tool or an environment may run outside the main thread."""

from collections.abc import Callable
from typing import Any, TypeVar

Declared = TypeVar("Declared", bound=Callable[..., Any])
_MARK = "_grpo_in_threads"


def in_threads(declared: Declared) -> Declared:
    """Declare that a synchronous tool may run in several threads at a time, or that an environment may live in a thread
    of its own, where it is made, reset and called.

        @in_threads
        def search(query: str) -> str: ...

        @in_threads
        class Browser: ...

    Undeclared ones run in the main thread, one at a time, in TRL's order. Declared ones run concurrently, in any order
    of rows: their answers must not depend on state shared with other rows.

    Raises:
        TypeError: it cannot be marked, such as a method of an object: mark the function or the class instead.
    """
    try:
        setattr(declared, _MARK, declared)
    except AttributeError as error:
        raise TypeError(f"in_threads cannot mark {declared!r}: mark the function or class that it is of") from error
    return declared


def may_run_in_threads(tool: Any) -> bool:
    """True if this very function or class was declared; wrappers and subclasses do not count."""
    marked = getattr(tool, "__func__", tool)
    return getattr(marked, _MARK, None) is marked
