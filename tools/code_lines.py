"""Counts code: lines without docstrings, comments and blank ones, and Python's tokens in them.

A line counts where code begins or goes on in it. A docstring is every string that stands alone as a statement, so that
the lines under a record's fields are documentation too. Tokens are those of `tokenize` less line ends and indents: a
name, a number, a string, an operator or a bracket is one. Templates, scripts and style sheets have lines alone.
"""

import ast
import io
import re
import tokenize

NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
COMMENTS = {
    ".jinja": re.compile(r"\{#.*?#\}|<!--.*?-->", re.DOTALL),
    ".js": re.compile(r"/\*.*?\*/|^\s*//[^\n]*", re.DOTALL | re.MULTILINE),
    ".css": re.compile(r"/\*.*?\*/", re.DOTALL),
}
"""The comments of each kind of file that is counted beside Python's, by the end of its name."""


def of_python(source: str) -> tuple[int, int]:
    """Code lines of a Python file, and the tokens in them."""
    documentation = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    code = [
        token
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in NO_CODE and token.start[0] not in documentation
    ]
    lines = {line for token in code for line in range(token.start[0], token.end[0] + 1)}
    return len(lines), len(code)


def of_template(suffix: str, source: str) -> int:
    """Code lines of a template, a script or a style sheet. `suffix` is a key of `COMMENTS`."""
    return sum(bool(line.strip()) for line in COMMENTS[suffix].sub("", source).splitlines())
