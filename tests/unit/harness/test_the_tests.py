"""Rules for the tests themselves, by their syntax trees: nothing is imported."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.launching import ROOT


def modules(*folders: str) -> Iterator[tuple[str, ast.Module]]:
    """(dotted name, tree) of each module below these folders of the repository."""
    for folder in folders:
        for file in sorted((ROOT / folder).rglob("*.py")):
            yield ".".join(file.relative_to(ROOT).with_suffix("").parts), ast.parse(file.read_text())


def imported_from(tree: ast.AST) -> Iterator[str]:
    """Dotted names of all modules, and of all names in modules, that are imported anywhere."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_collected(dotted: str) -> bool:
    """Whether pytest runs this module, or this is a name in such a module."""
    return any(part.startswith("test_") or part == "conftest" for part in dotted.split("."))


def test_tests_and_benchmarks_import_nothing_from_test_modules() -> None:
    """What several tests need is in tests/support; otherwise a test cannot be deleted or moved by itself."""
    imports = [
        f"{module}: {name}"
        for module, tree in modules("tests", "bench")
        for name in imported_from(tree)
        if name.startswith("tests.") and is_collected(name)
    ]
    assert imports == []


@cache
def parsed(file: Path) -> ast.Module | None:
    return ast.parse(file.read_text()) if file.exists() else None


def functions_of(file: Path) -> dict[str, ast.AST]:
    """By the names under which this module of tests/ calls them: its own, and those that it imports from tests/."""
    found: dict[str, ast.AST] = {}
    tree = parsed(file)
    for node in ast.walk(tree) if tree else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.setdefault(node.name, node)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests."):
            there = functions_of((ROOT / (node.module or "").replace(".", "/")).with_suffix(".py"))
            found |= {alias.asname or alias.name: there[alias.name] for alias in node.names if alias.name in there}
    return found


def can_fail(node: ast.AST, functions: dict[str, ast.AST], seen: frozenset[str] = frozenset()) -> bool:
    """Whether something in a test, or in a function of tests/ that it calls, is there to fail."""
    for each in ast.walk(node):
        if isinstance(each, ast.Assert):
            return True
        if isinstance(each, ast.Raise) and "AssertionError" in ast.dump(each):
            return True
        if isinstance(each, ast.Call):
            name = each.func.attr if isinstance(each.func, ast.Attribute) else getattr(each.func, "id", "")
            if name in ("raises", "warns", "fail") or name.startswith("assert_"):
                return True
            is_plain = isinstance(each.func, ast.Name) and name not in seen and name in functions
            if is_plain and can_fail(functions[name], functions, seen | {name}):
                return True
    return False


def test_every_test_function_can_fail() -> None:
    """That nothing is raised is said too: `assert f(x) is None`, or by a helper that asserts."""
    silent = []
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        functions = functions_of(file)
        silent += [
            f"{file.relative_to(ROOT)}::{node.name}"
            for node in (parsed(file) or ast.Module([], [])).body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
            if not can_fail(node, functions)
        ]
    parsed.cache_clear()  # of millions of nodes, which every garbage collection of later tests would walk over
    assert silent == []


def test_names_of_tests_are_short_and_no_sentences() -> None:
    """`test_<unit>_<condition>_<result>`: the unit comes first, and there is no article."""
    unfit = re.compile(r"_(a|an|the|what|who|whoever|that|which|nobody|told|tells|said|says)(_|$)")
    names = [
        f"{module}: {node.name}"
        for module, tree in modules("tests")
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
        if unfit.search(node.name) or len(node.name) > 70
    ]
    assert names == []


@pytest.mark.parametrize(
    ("body", "fails"),
    [
        ("assert f()", True),
        ("with pytest.raises(ValueError): f()", True),
        ("helper()", True),
        ("f(); other()", False),
        ("monkeypatch.setattr(a, 'b', pytest.fail)", False),
    ],
)
def test_can_fail_of_test_body_matches_table(body: str, fails: bool) -> None:
    tree = ast.parse(f"def test_a():\n    {body}\ndef helper():\n    assert 1\ndef other():\n    other()")
    functions: dict[str, ast.AST] = {each.name: each for each in tree.body if isinstance(each, ast.FunctionDef)}
    assert can_fail(functions["test_a"], functions) == fails


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("import tests.unit.test_a", ["tests.unit.test_a"]),
        ("def f():\n    from tests.unit.conftest import a, b", ["tests.unit.conftest.a", "tests.unit.conftest.b"]),
        ("from tests.unit import test_a", ["tests.unit.test_a"]),
    ],
)
def test_imported_from_finds_every_import_form(line: str, names: list[str]) -> None:
    assert [*imported_from(ast.parse(line))] == names
    assert all(map(is_collected, names))
    assert not is_collected("tests.support.launching.start")
