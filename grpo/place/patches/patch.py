"""`Patch`: a name of another library that gets another value, and why."""

import inspect
import pkgutil
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_given: dict[str, Any] = {}
"""What a symbol holds since it was patched."""


class PatchError(RuntimeError):
    """What is to be patched does not look as expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """One symbol. Looked at before it is changed; a second patch of the same symbol has no effect."""

    symbol: str
    """Module, then class or mapping, then name, with dots."""
    looks: str
    """A signature without annotations, where `...` stands for all further parameters; of a value, names of types;
    `nothing` where there is no such name."""
    contains: tuple[str, ...] = ()
    """Parts of the function's source that the patch builds on."""
    tested: str
    """The library and its version."""
    symptom: str
    """What goes wrong without it."""
    upstream: str = "none found"
    """A link to the report of it."""

    def apply(self, make: Callable[[Any], Any]) -> None:
        """Put `make(original)` in the symbol's place, for good.

        Raises:
            PatchError: names the symbol, and the library's version.
        """
        owner, name, held = self._find()
        if self.symbol in _given and _given[self.symbol] is held:
            return
        self._check(held)
        made = make(held.__func__ if isinstance(held, staticmethod) else held)
        _given[self.symbol] = staticmethod(made) if isinstance(held, staticmethod) else made
        _put(owner, name, _given[self.symbol])

    @contextmanager
    def applied(self, make: Callable[[Any], Any]) -> Iterator[None]:
        """As `apply`, until the end of the block. Raises PatchError."""
        owner, name, before = self._find()
        others = _given.get(self.symbol)
        self.apply(make)
        try:
            yield
        finally:
            _put(owner, name, before)
            _given[self.symbol] = others

    def _find(self) -> tuple[Any, str, Any]:
        """Who holds the symbol, under which name, and what is there."""
        place, _, name = self.symbol.rpartition(".")
        try:
            owner = pkgutil.resolve_name(place)
            if isinstance(owner, dict):
                return owner, name, owner[name]
            if isinstance(owner, type):
                return owner, name, inspect.getattr_static(owner, name)
            return owner, name, getattr(owner, name, *([None] if self.looks == "nothing" else []))
        except (ImportError, AttributeError, KeyError) as error:
            raise self._error(f"is not there ({error})") from error

    def _check(self, held: Any) -> None:
        function = held.__func__ if isinstance(held, staticmethod) else held
        if self.looks == "nothing":
            if held is not None:
                raise self._error("is there")
            return
        if not self.looks.startswith("("):
            if type(held).__name__ not in self.looks.split(" | "):
                raise self._error(f"is a {type(held).__name__}, no {self.looks}")
            return
        try:
            found = signature(function)
        except (TypeError, ValueError) as error:
            raise self._error(f"has no signature ({error})") from error
        if not fits(found, self.looks):
            raise self._error(f"has the signature {found}, not {self.looks}")
        source = inspect.getsource(function) if self.contains else ""
        for part in self.contains:
            if part not in source:
                raise self._error(f"does not contain {part!r} any more")

    def _error(self, what: str) -> PatchError:
        library = self.symbol.partition(".")[0]
        version = getattr(sys.modules.get(library), "__version__", None)
        installed = f"Python {platform.python_version()}" if version is None else f"{library} {version}"
        return PatchError(
            f"{self.symbol} {what}: the patch of it was tested with {self.tested}, and {installed} is here. Install "
            f"the versions of `grpo constraints`, or renew the patch in grpo/place/patches ({self.symptom})"
        )


def signature(function: Any) -> str:
    """Of a function, without annotations."""
    found = inspect.signature(function)
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in found.parameters.values()]
    return str(found.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def fits(found: str, looks: str) -> bool:
    """Whether a signature is the expected one, in which `...` stands for all further parameters."""
    return found.startswith(looks[: -len("...)")].rstrip(", ")) if looks.endswith("...)") else found == looks


def _put(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, dict):
        owner[name] = value
    else:
        setattr(owner, name, value)
