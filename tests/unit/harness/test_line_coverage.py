"""The check of `make coverage`: what it counts, what it finds wrong in the table, and that no death hides a line."""

from pathlib import Path

import pytest

from tests.line_coverage import (
    DOCUMENT,
    NOT_GPU,
    ROOT,
    TITLE,
    Row,
    by_function,
    disagreements,
    gpu_tests,
    measure,
    reached,
    read_table,
    shown,
    table,
    unreached,
)

SOURCE = """import os

@decorated
def outer(x):
    def inner():
        return x
    return inner

class Sender:
    limit = 3
    async def send(self):
        pass
"""

GPU_TESTS = frozenset({"test_weight_sync"})


def row(fewest: int, most: int | None = None, reached_by: str = "`test_weight_sync`") -> Row:
    return Row(fewest=fewest, most=fewest if most is None else most, reached_by=reached_by)


def test_by_function_assigns_lines_to_innermost_function() -> None:
    lines = [1, 3, 4, 6, 7, 10, 12]
    assert by_function("a.py", SOURCE, lines) == {
        ("a.py", "(module)"): [1, 10],
        ("a.py", "outer"): [3, 4, 7],
        ("a.py", "outer.inner"): [6],
        ("a.py", "Sender.send"): [12],
    }


def test_read_table_of_written_table_returns_its_rows() -> None:
    rows = {("a.py", "outer"): row(2), ("b.py", "C.send"): row(0, 3, f"{NOT_GPU} a race")}
    written = table({("a.py", "outer"): [1, 2], ("b.py", "C.send"): [9]}, rows)
    assert read_table(f"# title\n\n{written}\n\nmore\n") == rows
    assert table({("c.py", "new"): [4]}, {}).splitlines()[-1] == "| `c.py` | `new` | 1 | ? |"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("| `a.py` | outer | 2 | x |", "not a row"),
        ("| `a.py` | `f` | 2 | x |\n| `a.py` | `f` | 3 | x |", "a.py f stands in the table twice"),
    ],
)
def test_read_table_with_bad_rows_raises(rows: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_table(f"{TITLE}\n|---|---|---|---|\n{rows}\n")


@pytest.mark.parametrize(
    ("lines", "listed", "message"),
    [
        ([3, 4, 9], None, "lines 3-4, 9 not reached, and not in the table"),
        ([3, 4, 9], row(2), "says 2 statements, not reached are 3"),
        ([], row(2), "says 2 statements, not reached are 0"),
        ([3], row(2, 4), "says 2-4 statements, not reached are 1"),
        ([3, 4], row(2, reached_by="`test_gone`"), "no test in tests/gpu is called test_gone"),
        ([3, 4], row(2, reached_by="?"), r"no test in tests/gpu is called \?"),
    ],
)
def test_disagreements_with_table_are_reported(lines: list[int], listed: Row | None, message: str) -> None:
    key = ("a.py", "f")
    found = disagreements({key: lines} if lines else {}, {key: listed} if listed else {}, GPU_TESTS)
    assert len(found) == 1
    with pytest.raises(ValueError, match=f"a.py f: .*{message}"):
        raise ValueError(found[0])


def test_disagreements_of_matching_table_are_none() -> None:
    rows = {("a.py", "f"): row(2), ("a.py", "g"): row(0, 1), ("a.py", "h"): row(1, reached_by=f"{NOT_GPU} a race")}
    assert disagreements({("a.py", "f"): [1, 2], ("a.py", "h"): [7]}, rows, GPU_TESTS) == []


def test_shown_joins_consecutive_lines() -> None:
    assert shown([1, 2, 3, 7, 9, 10]) == "lines 1-3, 7, 9-10"


def test_coverage_table_names_existing_functions_and_tests() -> None:
    """What it counts is for `make coverage` alone."""
    for (file, function), listed in read_table(DOCUMENT.read_text()).items():
        names = {"(module)"} | {key[1] for key in by_function(file, (ROOT / file).read_text(), range(1, 2000))}
        assert function in names, f"{file} has no {function}"
        counted = {(file, function): range(listed.most)} if listed.most else {}
        assert disagreements(counted, {(file, function): listed}, gpu_tests()) == []


def test_measure_counts_lines_of_killed_and_forked_processes(tmp_path: Path) -> None:
    """One that is started and kills itself, one that is forked and ends by `os._exit`, one that is killed in a loop."""
    started = "import os, grpo.place.same_everywhere; os.kill(os.getpid(), 9)"
    waiting = "import grpo.rollout.queue, time; print('here', flush=True); time.sleep(600)"
    (tmp_path / "script.py").write_text(
        f"""
import os, subprocess, sys, time
subprocess.run([sys.executable, "-c", {started!r}])
if os.fork() == 0:
    import grpo.faults.failure
    os._exit(0)
os.wait()
with subprocess.Popen([sys.executable, "-c", {waiting!r}], stdout=subprocess.PIPE) as child:
    child.stdout.readline()
    folder = os.path.dirname(os.environ["COVERAGE_FILE"])
    while not [name for name in os.listdir(folder) if name.startswith(f"lines.{{child.pid}}.") and "new" not in name]:
        time.sleep(0.01)
    child.kill()
"""
    )
    assert measure([str(tmp_path / "script.py")], tmp_path / "data") == 0
    missing, total = unreached(reached(tmp_path / "data"))
    for name in ("place/same_everywhere", "rollout/queue", "faults/failure"):
        assert (f"grpo/{name}.py", "(module)") not in missing, name
        assert any(file == f"grpo/{name}.py" for file, _ in missing), "a file is never reached as a whole"
    assert ("grpo/trainer.py", "(module)") in missing
    assert 0 < sum(map(len, missing.values())) < total
