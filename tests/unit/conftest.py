"""No unit test starts an engine host."""

from collections.abc import Iterator

import pytest

from grpo.engine import early
from tests.support.engines import MadeUpHost


@pytest.fixture(autouse=True)
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[MadeUpHost]]:
    """What `GRPOConfig` starts, too, where a test has made the variables of a launcher up."""
    started: list[MadeUpHost] = []

    def start(environment: dict[str, str]) -> MadeUpHost:
        started.append(MadeUpHost(environment))
        return started[-1]

    monkeypatch.setattr(early, "HostProcess", start)
    yield started
    early.drop_host()
