"""Made-up runs that several tests read; none of them writes into one."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.made_runs import MadeRun, make_run


@pytest.fixture(scope="session")
def run_with(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a run of 80 steps on 3 nodes with a fault of `FAULTS`, or without one: ""."""
    made: dict[str, Path] = {}

    def run(fault: str = "") -> Path:
        if fault not in made:
            folder = tmp_path_factory.mktemp(f"run-{fault or 'healthy'}") / (fault or "healthy")
            made[fault] = make_run(folder, MadeRun(steps=80, nodes=3, fault=fault))
        return made[fault]

    return run
