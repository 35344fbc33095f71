"""Generation on one GPU, ours beside bare vLLM."""

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.mark.gpus(1)
@pytest.mark.job
@pytest.mark.takes(300)
def test_generate_benchmark_reports_figures(tmp_path: Path, figure: Callable[[str, float, str], None]) -> None:
    from tests.gpu.jobs import benchmark  # imports psutil

    benchmark("generate", tmp_path, figure, gpus=1)
