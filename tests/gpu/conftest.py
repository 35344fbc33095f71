"""Skips what lacks something and says what; the fixtures of GPU tests. Imports torch and pytest alone."""

import gc
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.gpu.requirements import missing_for


def pytest_runtest_setup(item: pytest.Item) -> None:
    if missing := missing_for(item):
        pytest.skip(f"needs {' and '.join(missing)}")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpus(1))])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """On a GPU, its memory is free afterwards."""
    yield torch.device(request.param)
    if request.param == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Callable[[str, float, str], None]:
    """`figure(name, value, unit)`: a number for the report."""
    return lambda name, value, unit: record_property("figure", (name, float(value), unit))
