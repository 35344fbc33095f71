"""Skips what lacks something and says what; the fixtures of GPU tests. Imports torch and pytest alone."""

import gc
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.gpu.requirements import STACK, lacking, rehearsed


def pytest_runtest_setup(item: pytest.Item) -> None:
    gpus = max((mark.args[0] for mark in item.iter_markers("gpus")), default=0)
    modules = [module for mark in item.iter_markers("requires") for module in mark.args]
    if item.get_closest_marker("job"):
        modules += STACK
    if rehearsed() and (item.get_closest_marker("job") or item.get_closest_marker("rehearsable")):
        gpus = 0
    if missing := lacking(gpus, modules):
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
