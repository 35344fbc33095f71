"""Of which code a result is: a digest of the files that it depends on, and the commit.

A Python file counts by its syntax tree, comments and docstrings aside; any other file by its bytes.
"""

import ast
import hashlib
import subprocess
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def digest_of(paths: Iterable[Path], root: Path = ROOT, also: str = "") -> str:
    """Of these files under `root` as they are now, 16 hexadecimal digits; `also` is taken in with them."""
    digest = hashlib.sha256(also.encode())
    for path in sorted({*paths}):
        content = path.read_bytes()
        of_content = _syntax(content) if path.suffix == ".py" else hashlib.sha256(content).hexdigest()
        digest.update(f"{path.relative_to(root)} {of_content}".encode())
    return digest.hexdigest()[:16]


def commit(*apart_from: str) -> str:
    """Of the working tree, short; with `-dirty` where tracked files differ; "unknown" without git.

    Args:
        apart_from: files and folders that may differ, such as the results themselves.
    """
    others = (".", *(f":(exclude){path}" for path in apart_from))
    try:
        head = _git("rev-parse", "--short=8", "HEAD").strip()
        return head + ("-dirty" if _git("diff", "--name-only", "HEAD", "--", *others) else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


@cache
def _syntax(source: bytes) -> str:
    tree = ast.parse(source)
    for node in _with_docstrings(tree):
        del node.body[0]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()


def _with_docstrings(tree: ast.AST) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            yield node
