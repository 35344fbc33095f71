"""A copy of the package in which every sentence reads otherwise: whoever decides by our words decides otherwise there.

    python -m tests.support.reworded FOLDER

Ids such as [GRPO-401], names and what belongs to a format stay. Each file has words of its own, so that a sentence that
two files share is no longer the same in both. Regular expressions stay: they are for other libraries' words.
"""

import ast
import re
import shutil
import sys
from pathlib import Path

from tests.support.launching import ROOT

WORDS = 3  # that make a sentence of a literal
_KEPT = re.compile(r"(\[GRPO-\d{3}\]|%\(\w+\)\w|%[-.\d]*\w)")
_WORD = re.compile(r"(?<![\w./_-])[A-Za-z]{2,}(?![\w./_-])")


def reword(text: str, shift: int) -> str:
    """`text` with its letters moved by `shift` in the alphabet, but for what is kept."""

    def move(letter: str) -> str:
        first = ord("a") if letter.islower() else ord("A")
        return chr(first + (ord(letter) - first + shift) % 26)

    parts = _KEPT.split(text)
    moved = [_WORD.sub(lambda word: "".join(map(move, word[0])), part) for part in parts[::2]]
    return "".join(piece for pair in zip(moved, [*parts[1::2], ""], strict=True) for piece in pair)


class _Rewording(ast.NodeTransformer):
    def __init__(self, shift: int) -> None:
        self.shift, self.count = shift, 0

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        return node if isinstance(node.value, ast.Constant) else self.generic_visit(node)  # a docstring

    def visit_Call(self, node: ast.Call) -> ast.AST:
        is_pattern = ast.unparse(node.func).startswith("re.")
        return node if is_pattern else self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        constants = [each for each in node.values if isinstance(each, ast.Constant)]
        if self._is_sentence(" ".join(str(each.value) for each in constants)):
            for constant in constants:
                constant.value = reword(str(constant.value), self.shift)
        for each in node.values:
            if isinstance(each, ast.FormattedValue):
                each.value = self.visit(each.value)
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, str) and self._is_sentence(node.value):
            return ast.copy_location(ast.Constant(reword(node.value, self.shift)), node)
        return node

    def _is_sentence(self, text: str) -> bool:
        is_one = len(_WORD.findall(text)) >= WORDS
        self.count += is_one
        return is_one


def reworded_package(folder: Path) -> int:
    """Writes `folder`/grpo; the number of sentences that read otherwise there."""
    shutil.copytree(ROOT / "grpo", folder / "grpo", ignore=shutil.ignore_patterns("__pycache__"))
    count = 0
    for number, path in enumerate(sorted((folder / "grpo").rglob("*.py"))):
        rewording = _Rewording(1 + number % 25)
        path.write_text(ast.unparse(rewording.visit(ast.parse(path.read_text()))))
        count += rewording.count
    return count


if __name__ == "__main__":
    print(reworded_package(Path(sys.argv[1])))
