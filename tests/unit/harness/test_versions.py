"""The ranges of pyproject.toml: their lowest and their highest versions can be installed, all together."""

import itertools
import shutil
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.support.launching import ROOT
from tools.constraints import EXTRAS
from tools.versions import EDGES, resolve


def is_offline(said: str) -> bool:
    """Whether uv had no index to ask. Of a CPU's packages PyTorch's is asked second, and may be out of reach alone."""
    if "--no-index" in said or "network was disabled" in said:
        return True
    return "Failed to fetch" in said and "No solution found" not in said


def requirements(backend: str) -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [project["optional-dependencies"][extra] for extra in ("report", *EXTRAS[backend])]
    texts = itertools.chain(project["dependencies"], *extras)
    return [Requirement(text) for text in texts if not text.startswith(f"{project['name']}[")]


def resolved(backend: str, edge: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Version]:
    """By name; without a network the test is skipped."""
    beside = Path(sys.executable).with_name("uv")
    program = str(beside) if beside.exists() else shutil.which("uv")
    if program is None:
        pytest.skip("uv is not here: `make install` brings it where pip finds it")
    monkeypatch.chdir(ROOT)
    try:
        resolve(program, backend, edge, folder / "resolved.txt")
    except ValueError as error:
        if is_offline(str(error)):
            pytest.skip(f"the package index cannot be reached: {str(error).splitlines()[-1]}")
        raise
    lines = [Requirement(line) for line in (folder / "resolved.txt").read_text().splitlines() if "==" in line]
    return {canonicalize_name(each.name): Version(next(iter(each.specifier)).version) for each in lines}


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("backend", EXTRAS)
def test_resolve_at_both_edges_satisfies_ranges(
    backend: str, edge: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = resolved(backend, edge, tmp_path, monkeypatch)
    for wanted in requirements(backend):
        version = found[canonicalize_name(wanted.name)]
        assert wanted.specifier.contains(version)
        floors = [Version(each.version) for each in wanted.specifier if each.operator in (">=", "~=", "==")]
        if edge == "lowest":
            assert floors == [Version(version.public)], f"{wanted}: no such floor, or another package wants more"


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("error: Failed to fetch: https://pypi.org/simple/trl/", True),
        ("error: No solution found\nhint: Packages were unavailable because the network was disabled.", True),
        ("uv pip compile --no-index\nerror: No solution found", True),
        ("error: No solution found\nuv pip compile --torch-backend cpu\nerror: Failed to fetch: https:", False),
        ("error: Failed to parse: pyproject.toml", False),
    ],
)
def test_is_offline_of_uv_output_matches_table(said: str, expected: bool) -> None:
    assert is_offline(said) == expected
