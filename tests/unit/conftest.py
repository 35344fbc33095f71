"""Engine hosts that only look as if they ran, for tests that would start one."""

from collections.abc import Iterator

import pytest

from grpo.engine import early
from grpo.place.log import start_log
from tests.support.engines import MadeUpHost

start_log()  # `caplog` looks once, before each test, which loggers hand nothing on to the root's


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[MadeUpHost]]:
    started: list[MadeUpHost] = []

    def start(environment: dict[str, str]) -> MadeUpHost:
        started.append(MadeUpHost(environment))
        return started[-1]

    monkeypatch.setattr(early, "HostProcess", start)
    yield started
    early.drop_host()
