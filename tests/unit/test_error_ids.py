"""Ids of errors, `[GRPO-406]`: one raise site, one entry in docs/troubleshooting.md and at least one test for each.

The tests that raise an error for its real reason assert its id, and the values in it; they leave its words alone.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ID = re.compile(r"GRPO-\d+")
IN_BRACKETS = re.compile(r"\[(GRPO-\d+)\]")
MADE_UP = ("ops/report/", "test_error_ids.py")  # tests whose texts were written for them


def texts_of(path: Path) -> Iterable[str]:
    """String constants, those in f-strings included, without docstrings."""
    tree = ast.parse(path.read_text())
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


def raised() -> Counter[str]:
    """Ids in the package and in the launcher files, by how often they are written; several files may share a text."""
    texts = [text for path in sorted(ROOT.glob("grpo/**/*.py")) for text in texts_of(path)]
    texts += {text for path in ROOT.glob("configs/*.yaml") for text in re.findall(r'"(.*)"', path.read_text())}
    return Counter(name for text in texts for name in ID.findall(text))


def explained() -> list[str]:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    return re.findall(r"^### (.*)$", page, re.MULTILINE)


def test_error_ids_have_one_raise_site_and_one_entry() -> None:
    sites = raised()
    assert [name for name, count in sites.items() if count > 1] == [], "a cause has one id, an id one cause"
    assert sorted(sites) == explained(), "the entries of docs/troubleshooting.md, in order"
    assert all(re.fullmatch(r"GRPO-[1-9]\d\d", name) for name in sites)


def test_error_ids_in_texts_stand_in_brackets() -> None:
    """As the report looks for them."""
    for path in sorted(ROOT.glob("grpo/**/*.py")):
        for text in texts_of(path):
            assert ID.findall(text) == IN_BRACKETS.findall(text), f"{path}: {text}"


def test_error_ids_are_all_asserted_in_tests() -> None:
    tests = [path for path in ROOT.glob("tests/**/test_*.py") if not any(part in str(path) for part in MADE_UP)]
    asserted = {name for path in tests for text in texts_of(path) for name in ID.findall(text)}
    assert asserted == raised().keys()
