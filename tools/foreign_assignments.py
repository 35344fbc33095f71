"""Assignments to modules and classes of other libraries outside `grpo/place/patches`; exit code 1 where there are any.

    python -m tools.foreign_assignments

Found are assignments, deletions and `setattr` of an attribute or an item of what a file has imported from elsewhere,
and of names that stand for that; a class's `__init__` and the like, whoever holds the class; and reloads of modules.
"""

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path

OWN = ("grpo", "bench", "tests", "tools", "examples")
PATCHES = Path("grpo/place/patches")
CLASS_HOOKS = {"__init__", "__new__", "__call__", "__class__", "__getattr__", "__getattribute__"}

PROGRAMS = {
    "sys.excepthook": "the hook for what nobody catches",
    "sys.argv": "the command line, for a script that runs in this process",
    "sys.path": "as above: its folder",
    "sys.modules['__main__']": "as above: the module",
    "sys.stdout": "None where the screen is gone",
    "os.environ": "what child processes inherit",
}
"""What Python has for its program to set."""


def foreign_assignments(source: str) -> Iterator[tuple[int, str]]:
    """Line and target of each assignment in a file's source."""
    tree = ast.parse(source)
    foreign = _foreign_names(tree)
    for node in ast.walk(tree):
        for target in _targets(node):
            place = target.value if isinstance(target, ast.Attribute | ast.Subscript) else target
            is_hook = isinstance(target, ast.Attribute) and target.attr in CLASS_HOOKS and _root(target) != "self"
            if is_hook or (place is not target and _is_foreign(place, foreign)):
                shown = ast.unparse(target)
                if not any(shown == name or shown.startswith(f"{name}[") for name in PROGRAMS):
                    yield target.lineno, shown


def _foreign_names(tree: ast.Module) -> set[str]:
    """Names of a file that stand for what is not this project's: imports, and attributes of those under a new name."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {
                alias.asname or alias.name.partition(".")[0]
                for alias in node.names
                if alias.name.partition(".")[0] not in OWN
            }
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").partition(".")[0] not in OWN:
            names |= {alias.asname or alias.name for alias in node.names}
    size = -1
    while size != len(names):  # a name of a name
        size = len(names)
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and _stands_for(node.value, names):
                names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def _stands_for(value: ast.expr, names: set[str]) -> bool:
    """Whether a value is a module, or an attribute of what is foreign; what a call makes is nobody else's."""
    if isinstance(value, ast.Call):
        return ast.unparse(value.func).rpartition(".")[2] in ("import_module", "resolve_name", "importorskip")
    if isinstance(value, ast.Subscript):
        return ast.unparse(value.value) == "sys.modules"
    return isinstance(value, ast.Attribute) and ast.unparse(value) not in PROGRAMS and _is_foreign(value, names)


def _is_foreign(place: ast.expr, names: set[str]) -> bool:
    while isinstance(place, ast.Attribute | ast.Subscript):
        if isinstance(place, ast.Subscript) and ast.unparse(place.value) == "sys.modules":
            return True
        place = place.value
    if isinstance(place, ast.Call):
        name = ast.unparse(place.func)
        return _stands_for(place, names) or (name == "vars" and any(_is_foreign(each, names) for each in place.args))
    return isinstance(place, ast.Name) and place.id in names


def _root(place: ast.expr) -> str:
    while isinstance(place, ast.Attribute | ast.Subscript):
        place = place.value
    return place.id if isinstance(place, ast.Name) else ""


def _targets(node: ast.AST) -> Iterator[ast.expr]:
    """What a statement or a call gives another value, or takes away."""
    if isinstance(node, ast.Assign | ast.Delete):
        for target in node.targets:
            yield from target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        yield node.target
    elif isinstance(node, ast.Call) and node.args:
        name = ast.unparse(node.func)
        if name in ("setattr", "delattr"):
            yield ast.copy_location(ast.Attribute(node.args[0], ast.unparse(node.args[1]), ast.Store()), node)
        elif name in ("reload", "importlib.reload"):
            yield ast.copy_location(ast.Subscript(ast.Name("importlib"), node.args[0], ast.Store()), node)
        elif isinstance(node.func, ast.Attribute) and name.endswith(("__dict__.update", "__dict__.pop")):
            yield ast.copy_location(ast.Subscript(node.func.value, node.args[0], ast.Store()), node)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.foreign_assignments", description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="*", type=Path, default=[Path("grpo")])
    found = [
        f"{file}:{line}: {target} is not ours: patch it in {PATCHES}, with a `Patch` that says why"
        for folder in parser.parse_args().folders
        for file in sorted(folder.rglob("*.py"))
        if PATCHES not in file.parents
        for line, target in foreign_assignments(file.read_text())
    ]
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
