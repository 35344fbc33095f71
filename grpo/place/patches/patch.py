"""`Patch`: replaces a name of another library, and documents why."""

import inspect
import pkgutil
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_given: dict[str, Any] = {}
"""Current value of each patched symbol."""


class PatchError(RuntimeError):
    """The symbol to patch does not look as expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """Replacement of one symbol. The symbol is checked before it is changed; patching it twice has no effect."""

    symbol: str
    """Dotted path: module, then class or mapping, then name."""
    looks: str
    """Expected signature without annotations, where `...` stands for all further parameters; for a value, names of
    types; `nothing` if the name must not exist."""
    contains: tuple[str, ...] = ()
    """Parts of the function's source the patch relies on."""
    tested: str
    """Library and version it was tested with."""
    symptom: str
    """Problem without the patch."""
    upstream: str = "none found"
    """Link to the upstream report."""

    def apply(self, make: Callable[[Any], Any]) -> None:
        """Replace the symbol by `make(original)`, permanently.

        Raises:
            PatchError: the symbol does not look as expected. Names the symbol and the library's version.
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
        """Apply the patch within a `with` block. Raises PatchError."""
        owner, name, before = self._find()
        others = _given.get(self.symbol)
        self.apply(make)
        try:
            yield
        finally:
            _put(owner, name, before)
            _given[self.symbol] = others

    def _find(self) -> tuple[Any, str, Any]:
        """Return the symbol's owner, its name there and its value."""
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
    """Return a function's signature without annotations."""
    found = inspect.signature(function)
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in found.parameters.values()]
    return str(found.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def fits(found: str, looks: str) -> bool:
    """True if a signature matches the expected one, in which `...` stands for all further parameters."""
    return found.startswith(looks[: -len("...)")].rstrip(", ")) if looks.endswith("...)") else found == looks


def _put(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, dict):
        owner[name] = value
    else:
        setattr(owner, name, value)
