"""A made-up cluster for `grpo plan`: files that describe it, and the command on them; nothing is started."""

from pathlib import Path

import pytest

from tests.support.planned_cluster import Cluster


@pytest.fixture
def cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Cluster:
    return Cluster(tmp_path, capsys)
