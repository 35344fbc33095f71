"""Fixtures that several tiers share."""

from pathlib import Path

import pytest

from tests.tiny_models import save_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied Qwen3 of a few hundred thousand random parameters."""
    return save_tiny_model("qwen3-tied", tmp_path_factory.mktemp("tiny") / "qwen3")
