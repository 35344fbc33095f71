"""The page of the Python API, from signatures and docstrings: `python -m tools.python_api_page` writes
docs/python_api.md.
"""

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "python_api.md"

PROMISED = {
    "GRPOTrainer": "grpo/trainer.py",
    "GRPOConfig": "grpo/config/__init__.py",
    "agents": "grpo/rollout/agents/rollout.py",
    "scores_each": "grpo/rewards/declared.py",
    "in_threads": "grpo/rollout/turns/declared.py",
}
"""What `grpo.__all__` names, by file."""
GIVEN = {
    "LocalVLLM.sample": (
        "grpo/local_vllm.py",
        "`trainer.vllm_generation` in a [rollout function](multi_turn.md#rollout-functions).",
    ),
    "Sampler.sample": ("grpo/rollout/turns/sampler.py", "The arguments of that call in full."),
    "Turn": ("grpo/rollout/turns/sampler.py", "What `sample` returns."),
    "Door": ("grpo/rollout/agents/door.py", "The first argument of an [agent](agents.md)."),
    "write_report": (
        "grpo/ops/report/page.py",
        "`grpo report` from Python: `from grpo.ops.report.page import write_report`.",
    ),
    "start_host": (
        "grpo/engine/early.py",
        "`from grpo.engine.early import start_host`, at the top of a script: engines import vLLM while your script "
        "imports the rest.",
    ),
}
"""What a user's code is given or may call besides, by file, and where it comes from."""

HEAD = """# Python API

Written from the code (`python -m tools.python_api_page`). `from grpo import …` gives you the five names of the first
part, which stay. `GRPOTrainer` and `GRPOConfig` are subclasses of TRL's, so you can rely on all that TRL documents.
"""
SECTIONS = ("Args:", "Returns:", "Raises:", "Yields:")


def node_of(file: str, name: str) -> ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef:
    """The definition of a class, a function, or a class's function (`Class.function`)."""
    body: list[ast.stmt] = ast.parse((ROOT / file).read_text()).body
    *owners, last = name.split(".")
    for owner in owners:
        body = next(node.body for node in body if isinstance(node, ast.ClassDef) and node.name == owner)
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return next(node for node in body if isinstance(node, kinds) and node.name == last)


def signature(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> str:
    """As it is called: without `self`, one argument a line where it is long."""
    function: ast.stmt | None = node
    if isinstance(node, ast.ClassDef):
        function = next(
            (each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"), None
        )
    if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
        return name
    arguments = function.args
    arguments.args = [each for each in arguments.args if each.arg != "self"]
    shown = re.sub(r"(?<=\w|\])=(?=\S)", " = ", ast.unparse(arguments)).replace("'", "")
    returns = f" -> {ast.unparse(function.returns)}".replace("'", "") if function.returns and function is node else ""
    prefix = "await " if isinstance(node, ast.AsyncFunctionDef) else ""
    call = f"{prefix}{name}({shown}){returns}"
    if len(call) <= 100:
        return call
    each_in_a_line = re.sub(r", (?=\*{0,2}\w+: |\*,)", ",\n    ", shown)
    return f"{prefix}{name}(\n    {each_in_a_line},\n){returns}"


def described(docstring: str) -> Iterator[str]:
    """A docstring as Markdown: its sections become lists."""
    for block in docstring.split("\n\n"):
        head, _, rest = block.partition("\n")
        if head.strip() not in SECTIONS:
            yield block
            continue
        entries = re.split(r"\n(?=\S)", textwrap.dedent(rest))
        named = (re.sub(r"^(\w+): ", r"`\1`: ", " ".join(entry.split())) for entry in entries)
        yield f"**{head.strip()[:-1]}**\n\n" + "\n".join(f"- {entry}" for entry in named)


def fields(node: ast.ClassDef) -> Iterator[str]:
    """Public fields of a record, each with the line under it."""
    for here, following in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(here, ast.AnnAssign) or not isinstance(here.target, ast.Name) or here.target.id[0] == "_":
            continue
        is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
        meaning = f": {' '.join(str(following.value.value).split())}" if is_text else ""  # type: ignore[union-attr]
        yield f"- `{here.target.id}` (`{ast.unparse(here.annotation)}`){meaning}"


def entry(name: str, file: str, lead: str = "") -> str:
    node = node_of(file, name)
    shown = name.rpartition(".")[2] if lead else name
    parts = [f"### {name}", *filter(None, [lead]), f"```text\n{signature(node, shown)}\n```"]
    parts += described(ast.get_docstring(node) or "")
    if isinstance(node, ast.ClassDef) and lead:
        parts.append("\n".join(line for line in fields(node) if "ClassVar" not in line))
    if name == "GRPOConfig":
        parts.append("[Options](options.md) lists every field that TRL does not have, or that behaves otherwise.")
    return "\n\n".join(filter(None, parts))


def page() -> str:
    promised = [entry(name, file) for name, file in PROMISED.items()]
    given = [entry(name, file, lead) for name, (file, lead) in GIVEN.items()]
    parts = [HEAD.rstrip(), "## Stable names", *promised, "## Objects and functions for your code", *given]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
