"""`make coverage`: which lines of grpo/ no test without a GPU reaches, held against the table in docs/gpu.md.

    python -m tests.line_coverage run [PYTEST ARGUMENTS]  measure unit, multiprocess and engine tests, then check
    python -m tests.line_coverage check                   what was measured last against the table
    python -m tests.line_coverage table                   the table as measured, to put into docs/gpu.md

A row stands for one function: line numbers would change with every edit. It counts the statements that are not reached,
so that a new one in a listed function is reported too.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from coverage import Coverage, CoverageData

from tests.coverage_snapshots import PREFIX
from tools.sizes import functions

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "runs" / "coverage"
DOCUMENT = ROOT / "docs" / "gpu.md"
TIERS = ("tests/unit", "tests/multiprocess", "tests/engine")
TITLE = "| file | function | statements | reached by |"
NOT_GPU = "no GPU:"  # begins the reason of a row that no GPU test reaches either
MODULE = "(module)"

Key = tuple[str, str]  # file, qualified name of a function


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One function of the table."""

    fewest: int
    """Statements that no test reaches, at least: other than `most` where it depends on timing or on the machine."""
    most: int
    reached_by: str
    """GPU tests in backquotes; or `no GPU:` and why no test reaches them."""

    def allows(self, unreached: int) -> bool:
        return self.fewest <= unreached <= self.most


def by_function(file: str, source: str, lines: Sequence[int]) -> dict[Key, list[int]]:
    """`lines` under the innermost function that holds them."""
    known = functions(source)
    grouped: dict[Key, list[int]] = {}
    for line in lines:
        owners = [name for name, first, last in known if first <= line <= last]
        grouped.setdefault((file, owners[-1] if owners else MODULE), []).append(line)
    return grouped


def read_table(markdown: str) -> dict[Key, Row]:
    """The rows under `TITLE`.

    Raises:
        ValueError: there is no table, a row is not one, or one comes twice; names it.
    """
    _, found, rest = markdown.partition(TITLE)
    if not found:
        raise ValueError(f"no table with the title {TITLE}")
    rows: dict[Key, Row] = {}
    for line in rest.strip().splitlines()[1:]:
        if not line.startswith("|"):
            break
        match = re.fullmatch(r"\| `(\S+)` \| `(\S+)` \| (\d+)(?:-(\d+))? \| (.+) \|", line)
        if match is None:
            raise ValueError(f"not a row of the table: {line}")
        file, function, fewest, most, reached_by = match.groups()
        if (file, function) in rows:
            raise ValueError(f"{file} {function} stands in the table twice")
        rows[file, function] = Row(fewest=int(fewest), most=int(most or fewest), reached_by=reached_by)
    return rows


def disagreements(
    unreached: Mapping[Key, Sequence[int]], rows: Mapping[Key, Row], gpu_tests: frozenset[str]
) -> list[str]:
    """What the table does not say, or says wrongly; one line each."""
    found = []
    for key in sorted(unreached.keys() | rows.keys()):
        lines, row = unreached.get(key, ()), rows.get(key)
        name = f"{key[0]} {key[1]}"
        if row is None:
            found.append(f"{name}: {shown(lines)} not reached, and not in the table")
        elif not row.allows(len(lines)):
            reported = f"{row.fewest}" if row.fewest == row.most else f"{row.fewest}-{row.most}"
            found.append(f"{name}: the table says {reported} statements, not reached are {len(lines)}: {shown(lines)}")
        if row is not None and not row.reached_by.startswith(NOT_GPU):
            named = set(re.findall(r"`(test_\w+)`", row.reached_by))
            unknown = sorted(named - gpu_tests) or ([] if named else [row.reached_by])
            if unknown:
                found.append(f"{name}: no test in tests/gpu is called {', '.join(unknown)}; or begin with {NOT_GPU!r}")
    return found


def shown(lines: Sequence[int]) -> str:
    """Line numbers with runs of neighbours put together: `lines 3-5, 9`."""
    runs: list[list[int]] = []
    for line in lines:
        if runs and line == runs[-1][-1] + 1:
            runs[-1].append(line)
        else:
            runs.append([line])
    return "lines " + ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def table(unreached: Mapping[Key, Sequence[int]], rows: Mapping[Key, Row]) -> str:
    """The table as measured; what it says of a function is kept, a new one is left open."""
    lines = [TITLE, "|---|---|---|---|"]
    for key in sorted(unreached.keys() | {key for key, row in rows.items() if row.fewest == 0}):
        num, row = len(unreached.get(key, ())), rows.get(key)
        count = f"{row.fewest}-{row.most}" if row and row.fewest < row.most and row.allows(num) else str(num)
        lines.append(f"| `{key[0]}` | `{key[1]}` | {count} | {row.reached_by if row else '?'} |")
    return "\n".join(lines)


def gpu_tests() -> frozenset[str]:
    sources = [path.read_text() for path in (ROOT / "tests" / "gpu").glob("test_*.py")]
    return frozenset(name for source in sources for name in re.findall(r"^def (test_\w+)", source, re.MULTILINE))


# -- measuring --------------------------------------------------------------------------------------------------------


def measure(program: Sequence[str], folder: Path) -> int:
    """Run a program (a script or `-m module`, with its arguments) and what it starts. Returns its exit code."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    env = {**os.environ, "COVERAGE_FILE": str(folder / "data")}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))  # for the plugin
    if sys.version_info >= (3, 12):
        env.setdefault("COVERAGE_CORE", "sysmon")  # costs next to nothing where nothing of grpo/ runs
    return subprocess.run(
        [sys.executable, "-m", "coverage", "run", *program], cwd=ROOT, env=env, check=False
    ).returncode


def reached(folder: Path) -> CoverageData:
    """The lines that any process has reached: snapshots, and what coverage.py wrote at the others' exits."""
    measured = CoverageData(no_disk=True)
    for path in sorted(folder.glob(f"{PREFIX}*.json")):
        measured.add_lines(json.loads(path.read_text()))
    for path in sorted(folder.glob("data*")):
        with contextlib.suppress(Exception):  # of a process that was killed while it wrote: it has a snapshot
            one = CoverageData(str(path))
            one.read()
            measured.update(one)
    return measured


def unreached(measured: CoverageData) -> tuple[dict[Key, list[int]], int]:
    """Statements of grpo/ that were not reached, and the number of all of its statements."""
    analyser = Coverage(data_file=None, config_file=str(ROOT / "pyproject.toml"))
    analyser.get_data().update(measured)
    missing: dict[Key, list[int]] = {}
    total = 0
    for path in sorted(ROOT.glob("grpo/**/*.py")):
        _, statements, _, lines, _ = analyser.analysis2(str(path))
        total += len(statements)
        missing |= by_function(str(path.relative_to(ROOT)), path.read_text(), lines)
    return missing, total


def main(arguments: Sequence[str]) -> int:
    what, *rest = arguments or ["run"]
    if what not in ("run", "check", "table"):
        print(__doc__)
        return 2
    code = measure(["-m", "pytest", *(rest or TIERS)], DATA) if what == "run" else 0
    if not any(DATA.glob(f"{PREFIX}*.json")):
        print(f"nothing was measured in {DATA}: make coverage")
        return 1
    missing, total = unreached(reached(DATA))
    rows = read_table(DOCUMENT.read_text())
    if what == "table":
        print(table(missing, rows))
        return 0
    num_missing = sum(map(len, missing.values()))
    print(f"grpo/: {total} statements, {num_missing} not reached ({1 - num_missing / total:.1%} reached)")
    wrong = disagreements(missing, rows, gpu_tests())
    for line in wrong:
        print(line)
    if wrong:
        print(f"{len(wrong)} disagreements with docs/gpu.md; `python -m tests.line_coverage table` writes its table")
    return code or bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
