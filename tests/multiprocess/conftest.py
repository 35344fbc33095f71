"""Where a real Slurm can run."""

import os

import pytest

from tests import slurm


@pytest.fixture(scope="module")
def slurm_is_here() -> None:
    if reason := slurm.why_not():
        if os.environ.get("GRPO_TEST_SLURM") == "install":
            pytest.fail(reason)
        pytest.skip(reason)
