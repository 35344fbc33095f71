"""What the installed libraries define, read from their sources: nothing is imported."""

import ast
import copy
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@cache
def source_of(module: str) -> str | None:
    """A module's source; None where there is no such file."""
    library, *parts = module.split(".")
    spec = importlib.util.find_spec(library)
    if spec is None or spec.origin is None:
        return None
    if not spec.submodule_search_locations:
        return Path(spec.origin).read_text() if not parts else None
    place = Path(spec.origin).parent.joinpath(*parts)
    for file in (place.with_suffix(".py"), place / "__init__.py"):
        if file.is_file() and (parts or file.name == "__init__.py"):
            return file.read_text()
    return None


class NotThereError(Exception):
    """A library does not define what is looked for."""


@dataclass(frozen=True, slots=True)
class Scope:
    """What a module or a class defines."""

    signatures: dict[str, str]
    """Of functions, without annotations."""
    values: set[str]
    """What gets a value in here: assigned, imported, or named to `setattr`."""
    own: set[str]
    """Of a class: its functions, its variables, and what its functions give to `self`."""


class Libraries:
    """The libraries as they are installed, or with other sources in the place of some.

    Args:
        sources: by module's name.
    """

    def __init__(self, sources: Mapping[str, str] | None = None) -> None:
        self._sources = sources or {}

    def module_of(self, owner: str) -> tuple[str, str]:
        """The module in which something is defined, and its place in there, '' for the module itself."""
        parts = owner.split(".")
        for length in range(len(parts), 0, -1):
            module = ".".join(parts[:length])
            if module in self._sources or source_of(module) is not None:
                return module, ".".join(parts[length:])
        raise NotThereError(f"{owner}: there is no module of this name")

    def scope(self, owner: str) -> Scope:
        """Raises NotThereError: names the class that is missing."""
        module, inside = self.module_of(owner)
        source = self._sources.get(module) or source_of(module)
        assert source is not None, module
        scopes = _scopes(source)
        if inside not in scopes:
            raise NotThereError(f"{module} has no class {inside}")
        return scopes[inside]

    def find(self, owner: str, name: str) -> str:
        """The signature of a function without annotations, '' of anything else.

        Raises:
            NotThereError: names what is missing.
        """
        scope = self.scope(owner)
        if name not in scope.signatures and name not in scope.values:
            raise NotThereError(f"{owner} has no {name}")
        return scope.signatures.get(name, "")


@cache
def _scopes(source: str) -> dict[str, Scope]:
    """By class; the module's own by ''."""
    tree = ast.parse(source)
    found = {node.name: _scope(node) for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    return {**found, "": _scope(tree)}


def _scope(scope: ast.Module | ast.ClassDef) -> Scope:
    functions = [each for each in _statements(scope) if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
    signatures = {each.name: f"({ast.unparse(_bare(each.args))})" for each in reversed(functions)}
    values, own = set(), set(signatures)
    for node in ast.walk(scope):
        match node:
            case ast.Attribute(value=value, attr=name, ctx=ast.Store()):
                values.add(name)
                if isinstance(value, ast.Name) and value.id == "self":
                    own.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                values.add(name)
            case ast.ClassDef(name=name) if node is not scope:
                values.add(name)
            case ast.alias():
                values.add(node.asname or node.name.partition(".")[0])
            case ast.Call(func=ast.Name(id="setattr") | ast.Attribute(attr="__setattr__")):
                values |= {
                    arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
                }
    for statement in scope.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        own |= {target.id for target in targets if isinstance(target, ast.Name)}
    return Scope(signatures, values, own)


def _statements(scope: ast.AST) -> Iterator[ast.stmt]:
    """Of a module or a class, those under an `if` or a `try` included."""
    for name in ("body", "orelse", "handlers"):
        for node in getattr(scope, name, []):
            yield node
            if isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler):
                yield from _statements(node)


def _bare(arguments: ast.arguments) -> ast.arguments:
    arguments = copy.deepcopy(arguments)
    for node in ast.walk(arguments):
        if isinstance(node, ast.arg):
            node.annotation = None
    return arguments
