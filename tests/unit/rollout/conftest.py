"""What tests of the pool and of what stands before it share."""

from collections.abc import Iterator

import pytest

from grpo.rollout import pool as engine_pool
from tests.support.pools import Node


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setattr(engine_pool, "POLL_S", 0.02)
    node = Node()
    yield node
    node.end()
