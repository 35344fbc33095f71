"""A sentinel and what its ranks tell it, whatever that holds; how it is started."""

import json
import os
import resource
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from grpo.faults import sentinel_start
from grpo.faults.failure import FailureRecord
from grpo.faults.liveness import NodePlace
from grpo.faults.packets import MAX_PACKET_BYTES
from grpo.faults.sentinel_link import SentinelLink
from grpo.faults.sentinel_start import _started, link_to_sentinel, start_sentinel
from tests.support.launching import free_port
from tests.support.made_up_jobs import launch

PATIENCE_S = 20.0
ALONE: dict[str, Any] = {"node": 0, "host": "a", "num_nodes": 1, "agent": None, "timeout_s": PATIENCE_S}


def record_of(cause: str) -> FailureRecord:
    return FailureRecord(node=0, rank=0, host="a", phase="train", cause=cause)


@pytest.fixture
def link() -> Iterator[SentinelLink]:
    """Of rank 0, whose node has one."""
    name, _ = start_sentinel({**ALONE, "pids": {0: os.getpid()}})
    link = SentinelLink(name, 0, NodePlace(node=0, rank=0, host="a", pid=0), timeout_s=PATIENCE_S)
    yield link
    link.say("stop")
    assert _started[-1].wait(PATIENCE_S) == 0
    link.close()


def heard(link: SentinelLink, look: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while (found := look()) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


# -- records ----------------------------------------------------------------------------------------------------------

SMILE, HALF = "\U0001f600", "\udc80"  # 12 bytes in JSON; half of a pair, as of a file name that is no UTF-8


@pytest.mark.parametrize("character", ["x", "\x1b", SMILE, HALF])
def test_failure_record_fits_one_packet(character: str, link: SentinelLink) -> None:
    record = record_of(f"first{character * 100_000}last")
    assert record.cause.startswith("first")
    assert record.cause.endswith("last")
    assert FailureRecord(**record.as_dict()) == record
    record.cause.encode()
    assert len(json.dumps({"kind": "report", "record": record.as_dict()})) < MAX_PACKET_BYTES
    assert link.say("report", record=record.as_dict())
    assert heard(link, link.receive) == record


def test_failure_record_with_short_cause_is_unchanged() -> None:
    text = "ä" * 10_000 + SMILE
    assert record_of(text).cause == text


@pytest.mark.parametrize("packet", [b"{", b"\xff", b"[1]", b'"text"'])
def test_sentinel_after_malformed_packet_keeps_answering(packet: bytes, link: SentinelLink) -> None:
    link._packets._socket.send(packet)
    link.say_phase("train", 3)
    answered = link.ask()
    heard(link, lambda: link.receive() or answered.is_set() or None)
    assert link.not_come(4) == {0: "train"}


# -- its log ----------------------------------------------------------------------------------------------------------


def test_sentinel_logs_reports_to_file(link: SentinelLink, tmp_path: Path) -> None:
    path = tmp_path / "logs" / "sentinel-node0.attempt-0.log"
    link.say("log", path=str(path))
    record = record_of("a wall")
    assert link.say("report", record=record.as_dict())
    assert heard(link, link.receive) == record
    last = "the job failed on node 0 (a), rank 0, phase 'train': a wall"
    assert heard(link, lambda: (path.exists() and last in path.read_text()) or None), path.read_text()
    lines = path.read_text().splitlines()
    assert all(line.split()[2] == "sentinel-node0" for line in lines)
    assert "sentinel of ranks [0]" in lines[0]
    assert "rank 0 reports a failure in phase 'train'" in lines[1]


def test_sentinel_with_hanging_log_keeps_answering(link: SentinelLink, tmp_path: Path) -> None:
    """It answers, and ends in time; see the fixture."""
    os.mkfifo(path := tmp_path / "sentinel-node0.attempt-0.log")
    link.say("log", path=str(path))
    link.say_phase("sync", 7)
    answered = link.ask()
    heard(link, lambda: link.receive() or answered.is_set() or None)
    assert link.not_come(8) == {0: "sync"}


# -- the start --------------------------------------------------------------------------------------------------------


def test_start_sentinel_suggests_open_ports_only_when_unreachable() -> None:
    """Whatever else keeps a sentinel from its start has nothing to do with them."""
    away = {"secret": "ab" * 32, "addresses": ["127.0.0.1"], "port": free_port()}
    with pytest.raises(RuntimeError, match=r"refused.*: the nodes' processes must reach each other at any port"):
        start_sentinel({**ALONE, **away, "node": 1, "num_nodes": 2, "pids": {1: os.getpid()}})
    with pytest.raises(RuntimeError, match=r"node 0 .*\[GRPO-606\]: it ended without a word$"):
        start_sentinel({**ALONE, "pids": {}})


def test_start_sentinel_with_1024_open_files_starts() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, hard))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1024)]
    try:
        name, _ = start_sentinel({**ALONE, "pids": {0: os.getpid()}})
        link = SentinelLink(name, 0, NodePlace(node=0, rank=0, host="a", pid=0), timeout_s=PATIENCE_S)
        link.say("stop")
        assert _started[-1].wait(PATIENCE_S) == 0
        link.close()
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def light_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if sentinels were started, each at port 7."""
    monkeypatch.setattr(sentinel_start, "start_sentinel", lambda settings, **_: ("its name", 7))
    monkeypatch.setattr(sentinel_start, "agent_pid", lambda: None)
    monkeypatch.setattr(sentinel_start, "_addresses", list)
    monkeypatch.setattr(sentinel_start, "SentinelLink", lambda *_, **__: None)


@pytest.mark.usefixtures("light_start")
def test_link_to_sentinel_deletes_secret_after_last_node() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stranger = dist.TCPStore("127.0.0.1", store.port, is_master=False)
    for node in range(3):
        link_to_sentinel(
            launch(2 * node, 6, 2), "a", {}, dist.PrefixStore("watch/0", store), timeout_s=20.0, join_s=7.0
        )
        assert any(b"secret" in stranger.get(key) for key in stranger.list_keys() if "hub" in key) == (node < 2)
    assert {key.rpartition("/")[2] for key in stranger.list_keys()} == {"node0", "node1", "node2", "come"}


@pytest.mark.usefixtures("light_start")
def test_link_to_sentinel_waits_for_sentinel_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of a node, the other nodes, and the hub."""
    waited: dict[str, timedelta] = {}
    started: list[dict[str, Any]] = []

    class Store:
        def wait(self, keys: list[str], patience: timedelta) -> None:
            waited.update(dict.fromkeys(keys, patience))

        def get(self, key: str) -> str:
            return json.dumps({"name": "its name", "secret": "its secret"})

        def set(self, key: str, value: str) -> None:
            pass

        def add(self, key: str, count: int) -> int:
            return count

    def start(settings: dict[str, Any], *, timeout_s: float) -> tuple[str, int]:
        assert timeout_s == 7.0
        started.append(settings)
        return "its name", 7

    monkeypatch.setattr(sentinel_start, "start_sentinel", start)
    for rank in (0, 1, 2):
        link_to_sentinel(launch(rank, 4, 2), "a", {}, Store(), timeout_s=20.0, join_s=7.0)  # type: ignore[arg-type]
    patience_s = 14.0
    assert waited == dict.fromkeys(["node0", "hub"], timedelta(seconds=patience_s))
    assert [settings["join_s"] for settings in started] == [patience_s] * 2
    assert [settings["first_stall_s"] for settings in started] == [7.0] * 2  # `start_timeout`, and no longer
