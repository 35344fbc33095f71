"""`python -m tools.sizes` on trees that are made up."""

import ast
from pathlib import PurePosixPath

import pytest

from tools import code_lines, sizes
from tools.sizes import Code, File, broken, broken_code, circle, code_of_parts, measure, parts, read, table

NESTED = """import os


class Sender:
    @property
    def name(self):
        return "x"

    async def send(self):
        def inner():
            return 1

        return inner()
"""


def tree(**lines: int) -> list[File]:
    """Files of so many lines without a function, by path; `__` stands for a slash."""
    return [read(f"grpo/{name.replace('__', '/')}.py", "x = 1\n" * count) for name, count in lines.items()]


def function(lines: int, name: str = "f") -> str:
    return f"def {name}():\n" + "    pass\n" * (lines - 1)


def names(found: list[str]) -> list[str]:
    return [line.split(" has ")[0] for line in found]


def test_read_file_includes_nested_functions() -> None:
    file = read("grpo/engine/sender.py", NESTED)
    assert (file.lines, file.module) == (13, "grpo.engine.sender")
    assert file.functions == (("Sender.name", 3), ("Sender.send", 5), ("Sender.send.inner", 2))
    assert read("grpo/engine/__init__.py", "").module == "grpo.engine"


def test_measure_and_table_match_hand_calculation() -> None:
    files = [
        read("grpo/engine/__init__.py", '"""The child."""\n'),  # no file of the figures
        read("grpo/engine/host.py", function(10) + function(30, "g")),
        read("grpo/config.py", function(20) + "x = 1\n" * 300),
        *tree(run__folder=100),
    ]
    measured = measure(files)
    assert (measured.files, measured.lines, measured.large_files) == (3, 460, 1)
    assert (measured.median_file, measured.p95_file) == (100, pytest.approx(100 + 0.9 * 220))
    assert (measured.median_function, measured.p95_function, measured.max_function) == (20, pytest.approx(29), 30)
    assert table(measured, {"core": Code(lines=1460, python_lines=400, tokens=3500)}).splitlines() == [
        "| tree | files / lines | median file | p95 file | function median / p95 / max | files > 300 | circles |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| grpo | 3 / 460 | 100 | 298 | 20 / 29 / 30 | 1 | 0 |",
        "",
        "| part | code lines | tokens per line |",
        "| --- | --- | --- |",
        "| core | 1,460 | 8.8 |",
    ]


def test_measure_of_empty_tree_is_zero() -> None:
    measured = measure([])
    assert (measured.files, measured.lines, measured.p95_file, measured.max_function) == (0, 0, 0, 0)
    assert broken([], measured) == []


def test_circle_through_lazy_and_type_imports_is_found() -> None:
    parts = {
        "grpo/a.py": "from grpo.space import b\n",
        "grpo/space/__init__.py": "def f():\n    from grpo.a import x\n",
        "grpo/space/b.py": "if TYPE_CHECKING:\n    from grpo.c import C\n",
        "grpo/c.py": "import json\n\n\ndef f():\n    from grpo.a import x\n",
    }
    ring = circle([read(path, source) for path, source in parts.items()])
    assert ring[0] == ring[-1]
    assert set(ring) == {"grpo.a", "grpo.space.b", "grpo.c"}, "to import a space's file is not to import the space"
    parts["grpo/c.py"] = "import json\n"
    assert circle([read(path, source) for path, source in parts.items()]) == ()


def test_broken_at_exact_bounds_is_empty() -> None:
    files = [
        *tree(a=400, b=160, c=1),
        *tree(d=1, e=1, f=1, g=160, h=160),
        *[read(f"grpo/space/f{n}.py", function(40) + "x = 1\n" * 120) for n in range(20)],
        read("grpo/space/long.py", function(100) + "x = 1\n" * 60),
    ]
    measured = measure(files)
    assert (measured.median_file, measured.p95_function) == (160, 40)
    assert broken(files, measured) == []


def test_broken_names_every_exceeded_bound() -> None:
    package = [
        *tree(a=401, b=161, c=161, d=161, e=161, f=161, g=161, h=161, i=161),
        read("grpo/space/long.py", function(101, "g") + function(41, "h")),
    ]
    files = [*package, read("tests/test_a.py", "x = 1\n" * 401), read("bench/weight_sync.py", function(101))]
    found = broken(files, measure(package))
    assert names(found)[:2] == ["grpo/a.py", "tests/test_a.py"]
    assert names(found)[2:4] == ["grpo/space/long.py g", "bench/weight_sync.py f"]
    assert found[4] == "grpo/ holds 9 files, of at most 8: a.py, b.py, c.py, d.py, e.py, f.py, g.py, h.py, i.py"
    assert names(found)[5] == "the median file of grpo/"
    assert found[6].startswith("the 95th percentile of functions in grpo/ is 98 lines")
    assert len(found) == 7


COMMENTED = '''"""What the file is for.

Two paragraphs.
"""

# why
LIMIT = 3  # so many
"""Under a field:
two lines."""


def first(rows: list[int]) -> int:
    """Of the rows."""
    return max(
        rows[0],

        # not more
        LIMIT,
    )
'''


def test_of_python_ignores_docstrings_comments_and_blank_lines() -> None:
    # LIMIT; def, return, rows[0], LIMIT, ): six lines. 3 + 13 + 3 + 5 + 2 + 1 tokens.
    assert code_lines.of_python(COMMENTED) == (6, 27)
    assert code_lines.of_python("") == (0, 0)


def test_of_python_counts_multiline_string_as_one_token() -> None:
    assert code_lines.of_python('text = """one\n\nthree"""\n') == (3, 3)


@pytest.mark.parametrize(
    ("suffix", "source"),
    [
        (".js", "// head\nlet a = 1; // so many\n\n/* of\ntwo */\nlet b;\n"),
        (".css", "/* of\ntwo */\np { top: 0 } /* why */\n\nb { }\n"),
        (".jinja", "{#- head\nof two -#}\n<p>{{ a }}</p>\n<!-- no\nmore -->\n\n</p>\n"),
    ],
)
def test_of_template_ignores_comments_and_blank_lines(suffix: str, source: str) -> None:
    assert code_lines.of_template(suffix, source) == 2


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("grpo/trainer.py", {"core", "."}),
        ("grpo/cli.py", {"wing", "."}),
        ("grpo/rollout/queue.py", {"core", "rollout"}),
        ("grpo/rollout/turns/episode.py", {"core", "rollout", "rollout/turns"}),
        ("grpo/config/patches/torch.py", {"core", "config"}),
        ("grpo/ops/__init__.py", {"wing", "ops"}),
        ("grpo/ops/report/page.js", {"wing", "ops", "ops/report"}),
        ("grpo/ops/files/train.py", {"wing", "ops", "ops/files"}),
    ],
)
def test_parts_of_file_are_core_or_wing_and_folders(path: str, expected: set[str]) -> None:
    assert parts(PurePosixPath(path)) == expected


def test_code_of_parts_adds_templates_to_lines_only() -> None:
    files = [read("grpo/trainer.py", "x = 1\n" * 4), read("grpo/ops/report/page.py", "f(x)\n" * 10)]
    code = code_of_parts(files, {PurePosixPath("grpo/ops/report/page.js"): 30})
    assert list(code) == ["core", "wing", ".", "ops", "ops/report"]
    assert code["core"] == code["."] == Code(lines=4, python_lines=4, tokens=12)
    assert code["wing"] == code["ops"] == code["ops/report"] == Code(lines=40, python_lines=10, tokens=40)
    assert (code["core"].tokens_per_line, code["wing"].tokens_per_line) == (3, 4)


def test_broken_code_names_part_and_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "CODE_LINES", {"core": 1_000, "wing": 50})
    monkeypatch.setattr(sizes, "TOKENS_PER_LINE", {"core": 8.7, "wing": 9.4})
    just_within = Code(lines=1_000, python_lines=1_000, tokens=8_749)
    assert broken_code({"core": just_within, "wing": Code(lines=50)}) == []
    assert broken_code({"core": just_within, "wing": Code(lines=51, python_lines=20, tokens=190)}) == [
        "wing has 51 code lines, of at most 50",
        "wing has 9.5 tokens in a code line, of at most 9.4",
    ]
    assert broken_code({"core": Code(lines=1_001), "wing": Code()}) == ["core has 1,001 code lines, of at most 1,000"]


def test_sizes_command_over_bound_exits_1_with_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sizes, "ROOT_FILES", 0)
    assert sizes.main() == 1
    assert "grpo/ holds " in capsys.readouterr().out


def test_class_names_of_package_are_unique() -> None:
    where: dict[str, list[str]] = {}
    for path in sorted((sizes.ROOT / sizes.PACKAGE).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                where.setdefault(node.name, []).append(f"{path.relative_to(sizes.ROOT)}:{node.lineno}")
    assert {name: places for name, places in where.items() if len(places) > 1} == {}
