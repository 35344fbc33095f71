"""A sentinel notices whatever is dead, stopped, late or cut off, and nothing else; on nodes of ranks without torch."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from grpo.faults.channel import join
from grpo.faults.failure import FailureRecord
from grpo.faults.liveness import AwakeClock
from grpo.place.timeouts import Timeouts
from tests.support.sentinels import (
    PATIENCE_S,
    SECOND,
    SECRET,
    LightNode,
    ends_well,
    everyone,
    light_job,
    nothing_happens,
)

TIMEOUT_S = 2.0
LONG_S = 60.0  # no beat is missed within it


@pytest.fixture
def launcher() -> Iterator[subprocess.Popen]:
    """What stands for torchrun's agent."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def one_record(nodes: list[LightNode], *without: int) -> FailureRecord:
    """The job's, as all ranks have it but those `without`; every sentinel of theirs ends."""
    records = {rank.record() for rank in everyone(nodes) if rank.rank not in without}
    assert len(records) == 1
    return records.pop()


# -- what is noticed --------------------------------------------------------------------------------------------------


def test_sentinel_with_killed_rank_reports_it_on_all_nodes() -> None:
    with light_job(LONG_S, nodes=2) as nodes:
        nodes[1].ranks[0].do("phase sync 3")
        nodes[1].ranks[0].send(signal.SIGKILL)
        record = one_record(nodes, 2)
        assert (record.node, record.rank, record.host, record.phase) == (1, 2, "h1", "sync")
        assert re.match(rf"the process of rank 2 \(pid {nodes[1].ranks[0].pid}\) .*\[GRPO-601\]$", record.cause)
        assert [node.sentinel.wait(PATIENCE_S) for node in nodes] == [0, 0]


def test_failure_reports_of_two_ranks_keep_first() -> None:
    with light_job(LONG_S, nodes=2) as nodes:
        nodes[1].ranks[1].tell("fail first")
        assert nodes[0].ranks[0].record().cause == "first"
        with contextlib.suppress(BrokenPipeError):  # it may have heard of the first, and be gone
            nodes[0].ranks[1].tell("fail second")
        assert one_record(nodes, 0).cause == "first"


def test_sentinel_with_stopped_rank_names_and_kills_it(capfd: pytest.CaptureFixture) -> None:
    with light_job(TIMEOUT_S, nodes=2) as nodes:
        stopped = nodes[1].ranks[1]
        stopped.do("phase train 0")
        stopped.send(signal.SIGSTOP)
        record = one_record(nodes, 3)
        assert (record.node, record.rank, record.phase) == (1, 3, "train")
        assert re.match(rf"the process of rank 3 \(pid {stopped.pid}\) .* \d+ s .*\[GRPO-603\]$", record.cause)
        assert stopped.wait() == -signal.SIGKILL
        assert [node.sentinel.wait(PATIENCE_S) for node in nodes] == [0, 0]
    assert f"the sentinel of node 1 kills rank 3 (pid {stopped.pid})" in capfd.readouterr().err


def test_sentinel_after_failure_kills_unresponsive_rank() -> None:
    with light_job(TIMEOUT_S) as (node,):
        deaf, other = node.ranks
        deaf.deafen()
        other.tell("fail now")
        assert other.record().cause == "now"
        assert deaf.wait() == -signal.SIGKILL


def test_sentinel_with_stopped_launcher_names_and_kills_it(launcher: subprocess.Popen) -> None:
    with light_job(TIMEOUT_S, agent=launcher.pid) as nodes:
        launcher.send_signal(signal.SIGSTOP)
        cause = one_record(nodes).cause
        assert re.match(rf"the launcher of this node \(pid {launcher.pid}\) .* \d+ s .*\[GRPO-603\]$", cause)
        assert launcher.wait(PATIENCE_S) == -signal.SIGKILL


def test_sentinel_with_killed_launcher_names_it(launcher: subprocess.Popen) -> None:
    with light_job(LONG_S, agent=launcher.pid) as nodes:
        launcher.kill()
        cause = one_record(nodes).cause
        assert re.match(rf"the launcher of this node \(pid {launcher.pid}\) .*\[GRPO-602\]$", cause)


def test_call_past_deadline_with_gil_held_reports_stack() -> None:
    with light_job(LONG_S) as (node,):
        hanging, other = node.ranks
        hanging.do("phase train 0")  # the call's own phase counts, whatever else the rank does meanwhile
        hanging.tell("hang 1")
        record = other.record()
        assert (record.rank, record.phase) == (0, "reward")
        assert record.cause.startswith("the rewards take too long; it was here, the innermost call first:\n")
        assert "light_rank.py" in record.cause


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("node", [0, 1])
def test_killed_or_stopped_sentinel_is_reported_alike_on_all_nodes(node: int, number: int) -> None:
    with light_job(TIMEOUT_S, nodes=2) as nodes:
        for rank in everyone(nodes):
            rank.do("phase train 0")
        time.sleep(2 * TIMEOUT_S / 10)  # until the phase is in a beat
        nodes[node].sentinel.send_signal(number)
        record = one_record(nodes)
        assert (record.node, record.rank, record.host, record.phase) == (node, 2 * node, f"h{node}", "train")
        said = "[GRPO-605]" if number == signal.SIGKILL else "[GRPO-604]"
        assert said in record.cause
        assert f"(pid {nodes[node].sentinel.pid})" in record.cause
        assert nodes[node].sentinel.wait(PATIENCE_S) == -signal.SIGKILL
        assert nodes[1 - node].sentinel.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("node", [0, 1])
def test_vanished_node_is_named_and_gets_same_record_on_return(node: int) -> None:
    with light_job(TIMEOUT_S, nodes=2) as nodes:
        nodes[node].send(signal.SIGSTOP)
        others = everyone([nodes[1 - node]])
        records = {rank.record() for rank in others}
        assert len(records) == 1
        assert f"node {node} (h{node})" in str(*records)
        assert "for 2 s" in str(*records)
        assert "[GRPO-604]" in str(*records)
        assert nodes[1 - node].sentinel.wait(PATIENCE_S) == 0
        nodes[node].send(signal.SIGCONT)
        returned = {rank.record() for rank in nodes[node].ranks}
        assert returned == records


def test_hub_with_missing_sentinel_names_node_after_join_timeout() -> None:
    with light_job(LONG_S, missing=1, join_s=1.0) as nodes:
        record = one_record(nodes)
        assert (record.node, record.rank) == (1, 2)
        assert record.cause == "the node's sentinel has not come within 1 s"


def test_hub_with_node_silent_after_greeting_names_it() -> None:
    """As one that is held right behind its greeting."""
    with light_job(LONG_S, missing=1) as (node,):
        channel, hub = join(["127.0.0.1"], node.port, SECRET, SECOND, LONG_S)
        assert (hub.node, hub.rank, hub.host, hub.pid) == (0, 0, "h0", node.sentinel.pid)
        channel.close()
        record = one_record([node])
        assert (record.node, record.rank, record.host) == (1, 2, "h1")
        assert "(pid 17)" in record.cause


# -- what is not ------------------------------------------------------------------------------------------------------


def test_normal_end_with_either_node_first_is_silent(capfd: pytest.CaptureFixture) -> None:
    for first in (0, 1):
        with light_job(LONG_S, nodes=2) as nodes:
            ends_well([nodes[first]])
            nothing_happens([nodes[1 - first]], 0.5)
            ends_well([nodes[1 - first]])
    assert capfd.readouterr() == ("", "")


def test_sentinel_after_suspend_and_continue_reports_no_failure() -> None:
    with light_job(TIMEOUT_S, nodes=2) as nodes:
        held: list[Callable[[int], None]] = [
            nodes[0].ranks[0].send,
            nodes[0].sentinel.send_signal,
            nodes[1].ranks[1].send,
            nodes[1].sentinel.send_signal,
        ]
        for send in held:  # each for less than the time; the last one is not back when the next one is held
            send(signal.SIGSTOP)
            time.sleep(TIMEOUT_S / 2)
            send(signal.SIGCONT)
        nothing_happens(nodes, TIMEOUT_S)
        # The whole job, for longer: as a machine that sleeps, or swaps.
        for node in nodes:
            node.send(signal.SIGSTOP)
        time.sleep(2 * TIMEOUT_S)
        for node in reversed(nodes):
            node.send(signal.SIGCONT)
        nothing_happens(nodes, 2 * TIMEOUT_S)
        ends_well(nodes)


def test_sentinel_with_gil_held_by_ranks_reports_no_failure() -> None:
    with light_job(TIMEOUT_S) as (node,):
        for rank in node.ranks:
            rank.tell(f"hold {3 * TIMEOUT_S}")
        for rank in node.ranks:
            assert rank.said() == f"done hold {3 * TIMEOUT_S}"
        nothing_happens([node], TIMEOUT_S)
        ends_well([node])


def test_sentinel_on_busy_cores_reports_no_failure() -> None:
    spinners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3 * (os.cpu_count() or 1))]
    try:
        with light_job(TIMEOUT_S, nodes=2) as nodes:
            nothing_happens(nodes, 3 * TIMEOUT_S)
            ends_well(nodes)
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()


def test_call_within_deadline_reports_no_failure() -> None:
    with light_job(LONG_S) as (node,):
        node.ranks[0].do("limited 1")
        node.ranks[0].do("unlimited")
        nothing_happens([node], 3.0)
        ends_well([node])


# -- what else it does ------------------------------------------------------------------------------------------------


def test_not_come_query_returns_late_ranks_with_phases() -> None:
    with light_job(TIMEOUT_S, nodes=2) as nodes:
        for rank, at in zip(everyone(nodes), (3, 3, 2, 3), strict=True):
            rank.do(f"phase phase-of-{rank.rank} {at}")
        time.sleep(2 * TIMEOUT_S / 10)  # until it is in a beat
        asking = nodes[1].ranks[1]
        asking.tell("not_come 3")
        assert asking.said() == '{"2": "phase-of-2"}'
        ends_well(nodes)


def test_sentinel_after_local_main_death_ends_engine_and_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "engine"
    folder.mkdir()
    (folder / "socket").touch()
    engine = subprocess.Popen(
        [sys.executable, "-c", "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        with light_job(LONG_S) as (node,):
            node.ranks[0].do(f"covers {folder} {engine.pid}")
            engine.send_signal(signal.SIGSTOP)  # so that it does not notice by itself
            node.ranks[0].send(signal.SIGKILL)
            assert engine.wait(PATIENCE_S) == -signal.SIGKILL
            assert "rank 0" in node.ranks[1].record().cause
            assert node.sentinel.wait(PATIENCE_S) == 0
        assert not folder.exists()
    finally:
        engine.kill()


ONCE = Timeouts(hub_join_s=0.0)
"""A node that is turned away does not try again."""


def test_hub_refuses_unauthenticated_and_duplicate_connections() -> None:
    with light_job(LONG_S, nodes=2) as nodes:
        port = nodes[0].port
        for said in (b"GET / HTTP/1.1\r\n\r\n", b'{"kind": "hello", "node": [1]}\n', b"[]\n", b"x" * 100_000):
            with contextlib.suppress(ConnectionError), socket.create_connection(("127.0.0.1", port), 10) as stranger:
                stranger.sendall(said)
                while stranger.recv(1000):  # a challenge, and the end
                    pass
        with pytest.raises(OSError, match="it ends the connection"):
            join(["127.0.0.1"], port, SECRET, SECOND, LONG_S, ONCE)  # another process of a node that is there
        nothing_happens(nodes, 0.5)
        ends_well(nodes)


def test_join_with_other_secret_is_refused_and_leaves_place_free() -> None:
    with light_job(LONG_S, missing=1) as (node,):
        with pytest.raises(OSError, match="it ends the connection"):
            join(["127.0.0.1"], node.port, "cd" * 32, SECOND, LONG_S, ONCE)
        join(["127.0.0.1"], node.port, SECRET, SECOND, LONG_S)[0].close()  # its place is free


def test_join_to_hub_without_secret_raises() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b'{"kind": "challenge", "challenge": "00"}\n')
                connection.recv(4096)
                connection.sendall(b'{"kind": "welcome", "proof": "00"}\n')
                connection.recv(4096)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(OSError, match="somebody else is there"):
            join(["127.0.0.1"], listener.getsockname()[1], SECRET, SECOND, LONG_S, ONCE)
        thread.join()


def test_awake_clock_after_own_pause_bounds_elapsed_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    clock = AwakeClock(2.0)
    now = 101.5
    assert clock.tick() == 1.5
    now = 1000.0
    assert clock.tick() == 5.5
