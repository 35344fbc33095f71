"""`Patch`, on a library that is made up."""

import contextlib
import sys
import types
from typing import Any

import pytest

from grpo.place.patches import patch
from grpo.place.patches.patch import Patch, PatchError

SOURCE = """
__version__ = "3.1"
folder = "/tmp"
options = {"fast": True}
def load(path, *, safe=None, **more):
    return ("loaded", path, safe)
class Worker:
    def answer(self, output):
        return output
    @staticmethod
    def main(*args):
        return args
"""


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = types.ModuleType("madeup")
    exec(SOURCE, module.__dict__)
    monkeypatch.setitem(sys.modules, "madeup", module)
    monkeypatch.setattr(patch, "_given", {})
    return module


def patch_of(symbol: str, looks: str, **more: Any) -> Patch:
    return Patch(symbol=f"madeup.{symbol}", looks=looks, tested="madeup 3", symptom="all is slow", **more)


def twice(answer: Any) -> Any:
    return lambda worker, output: answer(worker, [output, output])


def test_patch_applied_twice_wraps_method_once(library: Any) -> None:
    for _ in range(2):
        patch_of("Worker.answer", "(self, output)").apply(twice)
    assert library.Worker().answer(1) == [1, 1]


def test_patch_of_static_method_keeps_it_static(library: Any) -> None:
    patch_of("Worker.main", "(*args)").apply(lambda main: lambda *args: main("patched", *args))
    assert library.Worker().main(1) == library.Worker.main(1) == ("patched", 1)


def test_patch_of_item_and_value_replaces_them(library: Any) -> None:
    patch_of("options.fast", "bool").apply(lambda _: False)
    patch_of("folder", "str | NoneType").apply(lambda before: before + "/own")
    assert library.options == {"fast": False}
    assert library.folder == "/tmp/own"


def test_patch_applied_as_block_restores_original(library: Any) -> None:
    before = library.load
    patched = patch_of("load", "(path, *, safe=None, ...)")

    def safely(load: Any) -> Any:
        return lambda *args, **more: load(*args, **{**more, "safe": True})

    with contextlib.suppress(OSError), patched.applied(safely):
        assert library.load("a") == ("loaded", "a", True)
        with patched.applied(safely):
            assert library.load("b", safe=False) == ("loaded", "b", True)
        assert library.load("c") == ("loaded", "c", True)
        raise OSError
    assert library.load is before
    with patched.applied(safely):
        assert library.load("d") == ("loaded", "d", True)


def test_patch_after_external_restore_applies_again(library: Any) -> None:
    before = library.Worker.answer
    patch_of("Worker.answer", "(self, output)").apply(twice)
    library.Worker.answer = before
    patch_of("Worker.answer", "(self, output)").apply(twice)
    assert library.Worker().answer(1) == [1, 1]


@pytest.mark.parametrize(
    ("symbol", "looks", "why"),
    [
        ("Worker.reply", "(self, output)", "madeup.Worker.reply is not there"),
        ("gone.Worker.reply", "(self, output)", "madeup.gone.Worker.reply is not there"),
        ("options.slow", "bool", "madeup.options.slow is not there"),
        ("Worker.answer", "(self, output, to)", r"has the signature \(self, output\), not \(self, output, to\)"),
        ("load", "(file, ...)", r"has the signature \(path, \*, safe=None, \*\*more\)"),
        ("folder", "NoneType", "is a str, no NoneType"),
        ("folder", "nothing", "is there"),
    ],
)
def test_patch_of_changed_symbol_raises(symbol: str, looks: str, why: str, library: Any) -> None:
    before = dict(vars(library))
    with pytest.raises(PatchError, match=rf"{why}.*tested with madeup 3, and madeup 3\.1 is here"):
        patch_of(symbol, looks).apply(lambda _: pytest.fail("is not to be patched"))
    assert vars(library) == before


def test_patch_with_missing_source_text_raises(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "madeup_file.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "madeup_file", raising=False)
    looks = {"symbol": "madeup_file.load", "looks": "(path, ...)", "tested": "madeup 3", "symptom": ""}
    with Patch(**looks, contains=('"loaded"',)).applied(lambda load: load):
        pass
    with pytest.raises(PatchError, match="does not contain 'mapped' any more"):
        Patch(**looks, contains=("mapped",)).apply(lambda load: load)
    monkeypatch.delitem(sys.modules, "madeup_file")
