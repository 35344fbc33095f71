"""A failed test keeps its logs: what it and its fixtures wrote is copied to `runs/test-failures/<test>/`.

pytest removes old temporary folders, and what a job said is in files there. `tests/conftest.py` takes the hook over.
"""

import re
import shutil
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path

import pytest

from tests.support.launching import LAUNCHED

KEPT = Path(__file__).resolve().parents[2] / "runs" / "test-failures"
SUFFIXES = {".log", ".json", ".jsonl", ".txt"}
FILE_BYTES, TEST_BYTES = 2**20, 20 * 2**20


def folders_of(item: pytest.Item) -> Iterator[Path]:
    """The output folders of the jobs that it started, and those that its fixtures gave it, `tmp_path` among them."""
    yield from LAUNCHED
    for value in getattr(item, "funcargs", {}).values():
        folder = getattr(value, "output_dir", value)
        if isinstance(folder, Path) and folder.is_dir():
            yield folder


def outermost(folders: Iterable[Path]) -> list[Path]:
    """Without those that lie in another one."""
    found = set(folders)
    return sorted(folder for folder in found if not found & set(folder.parents))


def keep(name: str, folders: Iterable[Path], into: Path) -> Path:
    """Copy the logs and records in `folders`, of large ones the end, of a large number as many as fit.

    Returns:
        The folder under `into`, which replaces that of an earlier failure.
    """
    target = into / re.sub(r"[^\w.,=-]+", "-", name).strip("-")[-150:]
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    left = TEST_BYTES
    for folder in outermost(folders):
        for path in sorted(folder.rglob("*")):
            if path.suffix not in SUFFIXES or path.is_symlink() or not path.is_file() or left <= 0:
                continue
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - FILE_BYTES))
                end = file.read(min(FILE_BYTES, left))
            copy = target / folder.name / path.relative_to(folder)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(end)
            left -= len(end)
    return target


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        name = item.nodeid.removeprefix("tests/")
        kept = keep(name if report.when == "call" else f"{name}-{report.when}", folders_of(item), KEPT)
        (kept / "report.txt").write_text(report.longreprtext)  # to be read while the others still run
        if (add_section := getattr(report.longrepr, "addsection", None)) is not None:
            add_section("its logs", f"are kept in {kept}")
    if report.when == "teardown":
        LAUNCHED.clear()
    return report
