"""What torchrun says while it runs in this process."""

import logging
import socket
import threading

import pytest

from grpo.ops.launch import agent, last_words
from grpo.ops.launch.line import Rendezvous

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
def test_run_launcher_after_success_drops_exit_barrier_error(caplog: pytest.LogCaptureFixture) -> None:
    ending = agent.run_launcher(["torchrun"], lambda: False)
    assert ending.has_succeeded
    assert [record.getMessage() for record in caplog.records if record.name == LOGGER] == ["something else"]


@pytest.mark.usefixtures("ends")
def test_run_launcher_after_failure_logs_exit_barrier_error(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = agent._launch

    def fails(line: list[str]) -> None:
        launch(line)
        raise RuntimeError("port taken")

    monkeypatch.setattr(agent, "_launch", fails)
    assert not agent.run_launcher(["torchrun"], lambda: False).has_succeeded
    assert "Error waiting on exit barrier" in caplog.text


def test_outlast_head_waits_until_head_store_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 may still write a model, and a scheduler ends a job some minutes after its first node."""
    monkeypatch.setattr(last_words, "LOOK_S", 0.02)
    with socket.create_server(("127.0.0.1", 0)) as store:
        at = Rendezvous(ranks_by_node=(1, 1), node_rank=1, head_address="127.0.0.1", port=store.getsockname()[1])
        waits = threading.Thread(target=last_words.outlast_head, args=[at, agent.Ending(has_succeeded=True)])
        waits.start()
        for _ in range(3):
            store.accept()[0].close()
        assert waits.is_alive()
        last_words.outlast_head(at, agent.Ending(has_succeeded=False))  # it has a failure to tell, at once
    waits.join(30)
    assert not waits.is_alive()
