"""`docs/processes.md` has a row for every file that starts a process or a thread, or makes a lock, and for no other."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
STARTS = {
    "Processes": {"Popen"},
    "Threads": {"Thread", "ThreadPoolExecutor"},
    "Locks": {"Lock", "RLock", "Condition", "Semaphore", "BoundedSemaphore"},
}


def files_that_call(names: set[str]) -> set[str]:
    found = set()
    for path in (ROOT / "grpo").rglob("*.py"):
        calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        called = {func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "") for func in calls}
        if called & names and "files" not in path.parts:
            found.add(str(path.relative_to(ROOT / "grpo")))
    return found


@pytest.mark.parametrize("heading", STARTS)
def test_processes_page_lists_every_file_with_calls(heading: str) -> None:
    page = (ROOT / "docs" / "processes.md").read_text()
    section = re.split(r"^## ", page.partition(f"## {heading}\n")[2], flags=re.MULTILINE)[0]
    rows = [line.split("|") for line in section.splitlines() if line.startswith("| ")][1:]
    assert {row[2].strip(" `") for row in rows} == files_that_call(STARTS[heading])
    assert len(rows) == len(files_that_call(STARTS[heading]))
