"""What torchrun says while it runs in this process."""

import logging

import pytest

from grpo.launch import agent

LOGGER = "torch.distributed.elastic.agent.server.api"


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher whose ranks end well; the first node's is gone before it has read that all are done."""

    def launch(line: list[str]) -> None:
        logger = logging.getLogger(LOGGER)
        logger.warning("something else")
        try:
            raise ConnectionError("Failed to recv, got 0 bytes")
        except ConnectionError:
            logger.exception("Error waiting on exit barrier. Elapsed: %s seconds", 0.1)

    monkeypatch.setattr(agent, "_launch", launch)


@pytest.mark.usefixtures("ends")
def test_a_good_end_needs_no_farewell(caplog: pytest.LogCaptureFixture) -> None:
    ending = agent.run_launcher(["torchrun"], lambda: False)
    assert ending.has_succeeded
    assert [record.getMessage() for record in caplog.records if record.name == LOGGER] == ["something else"]


@pytest.mark.usefixtures("ends")
def test_it_is_heard_where_something_has_failed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = agent._launch

    def fails(line: list[str]) -> None:
        launch(line)
        raise RuntimeError("port taken")

    monkeypatch.setattr(agent, "_launch", fails)
    assert not agent.run_launcher(["torchrun"], lambda: False).has_succeeded
    assert "Error waiting on exit barrier" in caplog.text
