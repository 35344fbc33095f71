"""What is put aside while libraries are imported, and is there again afterwards."""

import gc
import importlib.metadata
import subprocess
import sys
from functools import partial

import pytest

from grpo.place.importing import importing
from grpo.place.same_everywhere import built_for_another_torch


def test_importing_pauses_gc_and_reads_packages_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    monkeypatch.setattr(importlib.metadata, "packages_distributions", lambda: reads.append(1) or {})
    own = importlib.metadata.packages_distributions
    with importing():
        assert not gc.isenabled()
        importlib.metadata.packages_distributions()
        importlib.metadata.packages_distributions()
        with importing():
            assert importlib.metadata.packages_distributions() == {}
        assert not gc.isenabled(), "an inner import ends before the outer one"
    assert gc.isenabled()
    assert importlib.metadata.packages_distributions is own
    assert reads == [1]


def test_importing_after_import_error_restores_state() -> None:
    own = importlib.metadata.packages_distributions
    with pytest.raises(ImportError), importing():
        raise ImportError("no such library")
    assert gc.isenabled()
    assert importlib.metadata.packages_distributions is own


def test_importing_with_gc_disabled_keeps_it_disabled() -> None:
    gc.disable()
    try:
        with importing():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_importing_after_import_error_names_unfit_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """As pip leaves them behind on a machine without GPUs; transformers says "Could not import module" of any class."""
    looks = partial(built_for_another_torch, {"torch": "2.13.0+cpu", "torchvision": "0.28.0"}.get)
    monkeypatch.setattr("grpo.place.importing.built_for_another_torch", looks)
    with (
        pytest.raises(ImportError, match=r"torchvision 0\.28\.0 beside torch 2\.13\.0\+cpu.*uninstall.*GRPO-216"),
        importing(),
    ):
        raise ModuleNotFoundError("Could not import module 'BloomPreTrainedModel'")
    with pytest.raises(ValueError, match="another"), importing():
        raise ValueError("another")


COUNTED = """
import gc, sys
from grpo.place.importing import importing
sys.modules |= dict.fromkeys({before!r})
kept = [[] for _ in range(1000)]
with importing():
    pass
print(gc.get_freeze_count() >= 1000)
"""


@pytest.mark.parametrize(("before", "is_frozen"), [((), True), (("torch",), False)])
def test_importing_freezes_gc_objects_unless_torch_was_loaded(before: tuple[str, ...], is_frozen: bool) -> None:
    run = [sys.executable, "-c", COUNTED.format(before=before)]
    assert subprocess.run(run, capture_output=True, text=True, check=True).stdout.split() == [str(is_frozen)]
