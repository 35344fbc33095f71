"""Of which code a result is: a digest of what a cell exercises, whatever has changed elsewhere.

Files count by their syntax trees, comments and docstrings aside: what cannot change how a cell ends leaves it alone.
"""

import ast
import hashlib
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.faults.matrix import NODES, Cell

ROOT = Path(__file__).resolve().parents[2]
ALWAYS = (
    "grpo/*.py",
    "grpo/config/**/*.py",
    "grpo/engine/**/*.py",
    "grpo/faults/**/*.py",
    "grpo/groups/**/*.py",
    "grpo/place/**/*.py",
    "grpo/rollout/*.py",
    "grpo/seam/**/*.py",
    "grpo/weights/**/*.py",
    "tests/faults/judge.py",
    "tests/faults/strike.py",
    "tests/jobs/fault_job.py",
    "tests/support/contract.py",
    "tests/support/left_over.py",
)
"""What starts, runs and ends in every cell; not the checks before a start, nor what a run writes for its readers."""
OF_PHASES = {"save": ("grpo/checkpoints/**/*.py",), "resume": ("grpo/checkpoints/**/*.py",)}
OF_TWO_NODES = ("grpo/ops/launch/**/*.py", "grpo/ops/meeting/**/*.py")
OF_REWARDS = ("grpo/rewards/**/*.py",)


def code_of(cell: Cell) -> str:
    """A digest of what the cell is and of the code that it exercises, as it stands in the working tree."""
    patterns = [*ALWAYS, *OF_PHASES.get(cell.phase, ())]
    patterns += OF_TWO_NODES if NODES[cell.layout] > 1 else ()
    patterns += OF_REWARDS if cell.fault.name.startswith("reward") else ()
    digest = hashlib.sha256(repr(cell).encode())
    for path in sorted({path for pattern in patterns for path in _files(pattern)}):
        digest.update(f"{path.relative_to(ROOT)} {_syntax(path)}".encode())
    return digest.hexdigest()[:16]


def commit() -> str:
    """Of the working tree, short; with `-dirty` where tracked files differ."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude=*"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return described.stdout.strip()


@cache
def _files(pattern: str) -> tuple[Path, ...]:
    return tuple(ROOT.glob(pattern))


@cache
def _syntax(path: Path) -> str:
    tree = ast.parse(path.read_text())
    for node in _with_docstrings(tree):
        del node.body[0]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()


def _with_docstrings(tree: ast.AST) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        is_kind = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if is_kind and ast.get_docstring(node, clean=False) is not None:
            yield node
