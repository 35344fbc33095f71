"""`python -m tools.sizes` on trees that are made up."""

import pytest

from tools import sizes
from tools.sizes import File, broken, circle, measure, read, rooms, table

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


def test_a_file_is_read_with_the_functions_inside_functions() -> None:
    file = read("grpo/engine/sender.py", NESTED)
    assert (file.lines, file.module) == (13, "grpo.engine.sender")
    assert file.functions == (("Sender.name", 3), ("Sender.send", 5), ("Sender.send.inner", 2))
    assert read("grpo/engine/__init__.py", "").module == "grpo.engine"


def test_figures_by_hand() -> None:
    files = [
        read("grpo/engine/__init__.py", '"""The child."""\n'),  # no file of the figures, but its room's
        read("grpo/engine/host.py", function(10) + function(30, "g")),
        read("grpo/config.py", function(20) + "x = 1\n" * 300),
        *tree(run__folder=100),
    ]
    measured = measure(files)
    assert (measured.files, measured.lines, measured.large_files) == (3, 460, 1)
    assert (measured.median_file, measured.p95_file) == (100, pytest.approx(100 + 0.9 * 220))
    assert (measured.median_function, measured.p95_function, measured.max_function) == (20, pytest.approx(29), 30)
    assert rooms(files) == {".": 320, "run": 100, "engine": 41}
    assert table(measured, rooms(files)).splitlines() == [
        "| tree | files / lines | median file | p95 file | function median / p95 / max | files > 300 | circles |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| grpo | 3 / 460 | 100 | 298 | 20 / 29 / 30 | 1 | 0 |",
        "",
        "| room | lines |",
        "| --- | --- |",
        "| . | 320 |",
        "| run | 100 |",
        "| engine | 41 |",
    ]


def test_an_empty_tree_breaks_nothing() -> None:
    measured = measure([])
    assert (measured.files, measured.lines, measured.p95_file, measured.max_function) == (0, 0, 0, 0)
    assert broken([], measured) == []


def test_a_circle_is_found_through_lazy_imports_and_those_for_types() -> None:
    parts = {
        "grpo/a.py": "from grpo.room import b\n",
        "grpo/room/__init__.py": "def f():\n    from grpo.a import x\n",
        "grpo/room/b.py": "if TYPE_CHECKING:\n    from grpo.c import C\n",
        "grpo/c.py": "import json\n\n\ndef f():\n    from grpo.a import x\n",
    }
    ring = circle([read(path, source) for path, source in parts.items()])
    assert ring[0] == ring[-1]
    assert set(ring) == {"grpo.a", "grpo.room.b", "grpo.c"}, "to import a room's file is not to import the room"
    parts["grpo/c.py"] = "import json\n"
    assert circle([read(path, source) for path, source in parts.items()]) == ()


def test_what_is_just_within_the_bounds_is_not_named() -> None:
    files = [
        *tree(a=400, b=160, c=1),
        *tree(d=1, e=1, f=1, g=160, h=160),
        *[read(f"grpo/room/f{n}.py", function(40) + "x = 1\n" * 120) for n in range(20)],
        read("grpo/room/long.py", function(100) + "x = 1\n" * 60),
    ]
    measured = measure(files)
    assert (measured.median_file, measured.p95_function) == (160, 40)
    assert broken(files, measured) == []


def test_every_broken_bound_is_named() -> None:
    package = [
        *tree(a=401, b=161, c=161, d=161, e=161, f=161, g=161, h=161, i=161),
        read("grpo/room/long.py", function(101, "g") + function(41, "h")),
    ]
    files = [*package, read("tests/test_a.py", "x = 1\n" * 401), read("bench/push.py", function(101))]
    found = broken(files, measure(package))
    assert names(found)[:2] == ["grpo/a.py", "tests/test_a.py"]
    assert names(found)[2:4] == ["grpo/room/long.py g", "bench/push.py f"]
    assert found[4] == "grpo/ holds 9 files, of at most 8: a.py, b.py, c.py, d.py, e.py, f.py, g.py, h.py, i.py"
    assert names(found)[5] == "the median file of grpo/"
    assert found[6].startswith("the 95th percentile of functions in grpo/ is 98 lines")
    assert len(found) == 7


def test_it_exits_with_the_names(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sizes, "ROOT_FILES", 0)
    assert sizes.main() == 1
    assert "grpo/ holds " in capsys.readouterr().out
