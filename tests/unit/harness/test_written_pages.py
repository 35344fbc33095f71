"""Pages that tools write from the code are as the code is: files, Python API, environment variables."""

import ast
import os
import re
from pathlib import Path
from types import ModuleType

import pytest

import grpo
from grpo.cli import COMMANDS
from tools import commands_page, environment_page, files_page, python_api_page
from tools.markdown import table

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("tool", [commands_page, environment_page, files_page, python_api_page])
def test_generated_page_matches_its_tool(tool: ModuleType) -> None:
    """If not: `python -m` and the tool's name."""
    assert tool.PAGE.read_text() == tool.page(), f"python -m {tool.__name__}"


def test_files_page_lists_every_file_of_package() -> None:
    folder, named = Path(), set()
    for line in files_page.page().splitlines():
        if line.startswith("#") and "`" in line:
            folder = Path(line.strip("#` /"))
        elif line.startswith("| `") and line.count("`.py") == 0 and ".py` |" in line:
            named.add(folder / line.split("`")[1])
    files = {file.relative_to(ROOT) for file in ROOT.glob("grpo/**/*.py") if file.name != "__init__.py"}
    assert files - named == set()


def test_files_of_package_all_have_first_sentence() -> None:
    files = [file for file in ROOT.glob("grpo/**/*.py") if "files" not in file.parts]
    assert [str(file) for file in files if not files_page.first_sentence(file)] == []


def test_first_sentence_ends_before_second(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text('"""`a.b`: the\nfirst, e.g. this. The second.\n\nMore."""')
    assert files_page.first_sentence(file) == "`a.b`: the first, e.g. this"


def test_environment_page_lists_every_variable_read() -> None:
    listed = [*environment_page.RUN, *environment_page.TEMPLATES, *environment_page.DEVELOPMENT]
    assert {*listed, *environment_page.INTERNAL} == environment_page.read_by_the_code()


def test_python_api_page_matches_public_names() -> None:
    assert python_api_page.PROMISED.keys() == set(grpo.__all__)
    for name, file in python_api_page.PROMISED.items():
        assert grpo._MODULES[name].replace(".", "/") in file


def test_signature_with_many_arguments_has_line_per_argument() -> None:
    shown = python_api_page.signature(python_api_page.node_of("grpo/trainer.py", "GRPOTrainer"), "GRPOTrainer")
    assert "\n    train_dataset: Any = None,\n" in shown
    assert "self" not in shown


def test_described_turns_docstring_sections_into_lists() -> None:
    function = ast.parse(
        'def f():\n    """One.\n\n    Args:\n        a: is\n            long.\n        b: short.\n    """'
    ).body[0]
    assert isinstance(function, ast.FunctionDef)
    found = list(python_api_page.described(ast.get_docstring(function) or ""))
    assert found == ["One.", "**Args**\n\n- `a`: is long.\n- `b`: short."]


def test_table_escapes_bar_in_cell() -> None:
    assert table(["a"], [["x | y"]]).splitlines()[-1] == "| x \\| y |"


def test_commands_page_lists_every_command() -> None:
    page = commands_page.page()
    assert [line for line in page.splitlines() if line.startswith("## ")] == [f"## `grpo {name}`" for name in COMMANDS]
    assert "| `--ranks-per-node` `N \\| N,N,…` |" in page


def test_commands_page_in_slurm_job_keeps_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    before = commands_page.of_command("launch")
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("GRPO_OUTPUT_DIR", "elsewhere")
    assert before in commands_page.page()
    assert os.environ["SLURM_JOB_ID"] == "4711"


@pytest.mark.parametrize("page", ["architecture.md", "paths.md", "processes.md"])
def test_developer_pages_name_existing_files(page: str) -> None:
    """Below grpo/ or the root, or by their name alone."""
    alone = {file.name for folder in ("grpo", "tests") for file in (ROOT / folder).rglob("*.py")}
    named = set(re.findall(r"`([\w./]+\.py)`", (ROOT / "docs" / page).read_text()))
    assert len(named) > 5
    there = {name for name in named if (ROOT / "grpo" / name).exists() or (ROOT / name).exists() or name in alone}
    assert named - there == set()
