"""Fixtures that several tiers share; and a failed test keeps its logs."""

import fcntl
from pathlib import Path

import pytest

from tests.kept_logs import pytest_runtest_makereport  # noqa: F401  pytest finds the hook here
from tests.tiny_models import save_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied Qwen3 of a few hundred thousand random parameters."""
    return save_tiny_model("qwen3-tied", tmp_path_factory.mktemp("tiny") / "qwen3")


@pytest.fixture(scope="session")
def demo_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model, warmed up once for all processes of a run; to be copied, or loaded from where it is."""
    from grpo.recipes.demo import ensure_demo_model

    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if folder.name.startswith("popen-") else folder  # xdist: one for each of its processes
    with (folder / "demo-model.lock").open("w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        return ensure_demo_model(folder / "demo-model")
