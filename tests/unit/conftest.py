"""Engine hosts that only look as if they ran, for tests that would start one."""

from collections.abc import Iterator

import pytest

from grpo.engine import early
from tests.support.engines import MadeUpHost


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[MadeUpHost]]:
    started: list[MadeUpHost] = []

    def start(environment: dict[str, str]) -> MadeUpHost:
        started.append(MadeUpHost(environment))
        return started[-1]

    monkeypatch.setattr(early, "HostProcess", start)
    yield started
    early.drop_host()
