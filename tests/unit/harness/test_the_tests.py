"""Rules for the tests themselves, by their syntax trees: nothing is imported."""

import ast
from collections.abc import Iterator

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


def test_nothing_is_imported_from_a_test_module_or_a_conftest() -> None:
    """What several tests need is in tests/support; otherwise a test cannot be deleted or moved by itself."""
    imports = [
        f"{module}: {name}"
        for module, tree in modules("tests", "bench")
        for name in imported_from(tree)
        if name.startswith("tests.") and is_collected(name)
    ]
    assert imports == []


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("import tests.unit.test_a", ["tests.unit.test_a"]),
        ("def f():\n    from tests.unit.conftest import a, b", ["tests.unit.conftest.a", "tests.unit.conftest.b"]),
        ("from tests.unit import test_a", ["tests.unit.test_a"]),
    ],
)
def test_imports_of_test_modules_are_found_in_every_form(line: str, names: list[str]) -> None:
    assert [*imported_from(ast.parse(line))] == names
    assert all(map(is_collected, names))
    assert not is_collected("tests.support.launching.start")
