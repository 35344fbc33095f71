"""Fixtures that several tiers share; and a failed test keeps its logs."""

import atexit
import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import own_environment  # noqa: F401  first: libraries read what is set when they are imported

# isort: split
from grpo.faults import kinds
from tests.support.kept_logs import pytest_runtest_makereport  # noqa: F401  pytest finds the hook here
from tests.support.launching import ENGINES_CACHES
from tests.support.tiny_models import save_tiny_model


def pytest_collection_finish() -> None:
    """Keep what the libraries' imports have made out of every collection: half a second of a core for each trainer."""
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # else triton complains of what is left at the end


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that share a fixture of their module go to one of xdist's processes: each would set it up."""
    for item in items:
        fixtures = getattr(item, "_fixtureinfo", None)
        found = fixtures.name2fixturedefs.values() if fixtures else ()
        if any(definitions[-1].scope == "module" for definitions in found):
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))


if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # a shell's job in the background: its children were deaf to Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)

# As on a user's machine, where caches outlive a job; they would go into a job's own folder for temporary files, and
# every start would compile what the one before has compiled: 14 s of a core out of 50.
os.environ.setdefault("VLLM_CACHE_ROOT", str(ENGINES_CACHES / "vllm"))
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(ENGINES_CACHES / "torchinductor"))

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # every process of every job would compile this package anew

_HANDLERS = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    """A trainer, or a failure watch alone, takes signals for as long as its process lives."""
    yield
    for number, handler in _HANDLERS.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def own_job() -> None:
    """Every test is a job of its own, which has made no step."""
    kinds.note_steps(0)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied Qwen3 of a few hundred thousand random parameters."""
    return save_tiny_model("qwen3-tied", tmp_path_factory.mktemp("tiny") / "qwen3")
