"""Who comes to a sentinel: strangers, latecomers, ranks that are dead already; and who finds none."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo.faults.channel import Channel, join
from grpo.faults.hub import GREETING_S, MAX_STRANGERS
from grpo.faults.sentinel_start import _started, start_sentinel
from grpo.place.timeouts import Timeouts
from tests.support.launching import free_port
from tests.support.memory_groups import MemoryGroup
from tests.support.proxies import pipe
from tests.support.sentinels import (
    PATIENCE_S,
    SECOND,
    SECRET,
    LightNode,
    LightRank,
    ends_well,
    light_job,
    nothing_happens,
)

LONG_S = 60.0
FLOODED_S = 5.0  # the flood goes on for twice as long


def test_hub_with_silent_strangers_limits_their_number_and_time() -> None:
    with light_job(LONG_S, nodes=2) as nodes, contextlib.ExitStack() as stack:
        address = ("127.0.0.1", nodes[0].port)
        silent = []
        for _ in range(MAX_STRANGERS + 1):
            silent.append(stack.enter_context(socket.create_connection(address, GREETING_S + PATIENCE_S)))
            assert b"challenge" in silent[-1].recv(1000)
        before = time.monotonic()
        assert silent[0].recv(1000) == b""  # it makes space
        assert time.monotonic() - before < GREETING_S / 2
        for stranger in silent[1:]:
            assert stranger.recv(1000) == b""
        ends_well(nodes)


def test_hub_with_crowd_of_silent_strangers_admits_node() -> None:
    with light_job(LONG_S, missing=1) as (node,), contextlib.ExitStack() as stack:
        for _ in range(2 * MAX_STRANGERS):
            stack.enter_context(socket.create_connection(("127.0.0.1", node.port), PATIENCE_S))
        before = time.monotonic()
        join(["127.0.0.1"], node.port, SECRET, SECOND, LONG_S)[0].close()
        assert time.monotonic() - before < GREETING_S


def test_join_after_closed_connections_tries_again() -> None:
    with light_job(LONG_S, missing=1) as (node,), socket.create_server(("127.0.0.1", 0)) as door:

        def let_in_the_third() -> None:
            for _ in range(2):
                door.accept()[0].close()
            pipe(door.accept()[0], socket.create_connection(("127.0.0.1", node.port)))

        thread = threading.Thread(target=let_in_the_third)
        thread.start()
        channel, hub = join(["127.0.0.1"], door.getsockname()[1], SECRET, SECOND, LONG_S)
        assert hub.host == "h0"
        channel.close()
        thread.join(PATIENCE_S)
    short = Timeouts(hub_join_s=0.5, hub_answer_s=0.5)
    with socket.create_server(("127.0.0.1", 0)) as door, pytest.raises(OSError, match=r"says nothing for 0.5 s"):
        join(["127.0.0.1"], door.getsockname()[1], SECRET, SECOND, LONG_S, short)


@pytest.mark.parametrize("line", [b"\n", b"[]\n", b"x"], ids=["newlines", "lists", "one line"])
def test_hub_under_flood_without_secret_stays_responsive(line: bytes) -> None:
    with light_job(FLOODED_S, nodes=2) as nodes:
        deadline, flood, thrown_out = time.monotonic() + 2 * FLOODED_S, line * (1 << 20), 0
        while time.monotonic() < deadline:
            with socket.create_connection(("127.0.0.1", nodes[0].port), PATIENCE_S) as stranger:
                stranger.settimeout(FLOODED_S)
                with contextlib.suppress(ConnectionError):
                    stranger.sendall(flood)  # more than the kernel keeps for a reader
                    stranger.sendall(flood)
                    while stranger.recv(1 << 16):
                        pass
                thrown_out += 1
            nothing_happens(nodes, 0.01)
        assert thrown_out > 1
        ends_well(nodes)


def test_hub_with_two_lines_before_proof_closes_connection() -> None:
    with light_job(LONG_S, missing=1) as (node,), socket.create_connection(("127.0.0.1", node.port), 10) as stranger:
        assert b"challenge" in stranger.recv(1000)
        stranger.sendall(b'{"kind": "hello"}\n{"kind": "hello"}\n')
        assert stranger.recv(1000) == b""


def test_rank_socket_refuses_process_outside_ranks() -> None:
    settings = {"node": 0, "host": "a", "num_nodes": 1, "agent": None, "timeout_s": LONG_S}
    rank = LightRank(0, LONG_S)
    try:
        name, port = start_sentinel({**settings, "pids": {0: rank.pid}})
        assert port is None
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:  # of this process, which is no rank
            stranger.settimeout(PATIENCE_S)
            stranger.connect(f"\0{name}")
            assert stranger.recv(1000) == b""
        rank.tell(name)
        assert rank.said() == "ready"
        rank.tell("leave")
        assert rank.wait() == 0
        assert _started[-1].wait(PATIENCE_S) == 0
    finally:
        rank.close()


def test_start_sentinel_with_dead_rank_and_launcher_reports_rank() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    rank = LightRank(1, LONG_S)
    try:
        settings = {"node": 0, "host": "a", "num_nodes": 1, "agent": gone.pid, "timeout_s": LONG_S}
        name, _ = start_sentinel({**settings, "pids": {0: gone.pid, 1: rank.pid}})
        rank.tell(name)
        assert rank.said() == "ready"
        assert re.match(rf"the process of rank 0 \(pid {gone.pid}\) .*\[GRPO-601\]$", rank.record().cause)
    finally:
        rank.close()


@pytest.fixture
def small_group() -> Iterator[MemoryGroup]:
    """In which a process may have 64 MiB."""
    try:
        group = MemoryGroup()
    except OSError as error:
        pytest.skip(f"needs a memory control group that may be written ({error})")
    group.limit(64 << 20)
    yield group
    group.remove()


def test_sentinel_with_rank_killed_for_memory_names_oom_killer(small_group: MemoryGroup) -> None:
    ranks = [LightRank(rank, LONG_S) for rank in (0, 1)]
    try:
        small_group.members.write_text(str(ranks[0].pid))
        node = LightNode(0, ranks, {"num_nodes": 1, "agent": None, "timeout_s": LONG_S})
        ranks[0].tell("eat 512")
        cause = ranks[1].record().cause
        assert re.match(rf"the process of rank 0 \(pid {ranks[0].pid}\) died .*OOM killer.*\[GRPO-628\]$", cause)
        assert ranks[0].wait() == -signal.SIGKILL
        assert node.sentinel.wait(PATIENCE_S) == 0
    finally:
        for rank in ranks:
            rank.close()


def test_node_joining_after_failure_gets_record() -> None:
    late = [LightRank(rank, LONG_S) for rank in (2, 3)]
    try:
        with light_job(LONG_S, missing=1) as (first,):
            deaf, other = first.ranks
            deaf.deafen()  # so that the hub is still there
            other.tell("fail now")
            assert other.record().cause == "now"
            where = {"num_nodes": 2, "secret": SECRET, "addresses": ["127.0.0.1"], "port": first.port}
            LightNode(1, late, {**where, "agent": None, "timeout_s": LONG_S, "join_s": PATIENCE_S})
            assert {rank.record().cause for rank in late} == {"now"}
    finally:
        for rank in late:
            rank.close()


def test_node_after_goodbye_of_hub_decides_alone() -> None:
    with light_job(LONG_S, nodes=2) as nodes:
        ends_well([nodes[0]])
        nothing_happens([nodes[1]], 0.5)
        first, second = nodes[1].ranks
        first.do("phase train 1")
        second.tell("not_come 1")
        assert second.said() == '{"3": "start"}'
        assert second.said() == "done not_come 1"
        second.tell("fail alone")
        assert {rank.record().cause for rank in nodes[1].ranks} == {"alone"}


def test_sentinel_after_suspension_catches_up_with_rank_progress() -> None:
    with light_job(LONG_S) as (node,):
        first, second = node.ranks
        node.sentinel.send_signal(signal.SIGSTOP)
        first.do("flood 5000")
        node.sentinel.send_signal(signal.SIGCONT)
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            second.tell("not_come 5000")
            behind = second.said()
            assert second.said() == "done not_come 5000"
            if "0" not in re.findall(r'"(\d)":', behind):
                break
        assert time.monotonic() < deadline, behind
        ends_well([node])


def test_start_sentinel_with_unreachable_hub_raises(tmp_path: Path) -> None:
    settings = {"node": 1, "host": "b", "num_nodes": 2, "pids": {1: os.getpid()}, "agent": None, "timeout_s": LONG_S}
    port = free_port()
    what = rf"node 1 .*\[GRPO-606\]: port {port} cannot be reached: 127.0.0.1: .*refused"
    with pytest.raises(RuntimeError, match=what):
        start_sentinel({**settings, "secret": SECRET, "addresses": ["127.0.0.1"], "port": port})


def test_sentinel_with_blocked_stderr_kills_stopped_rank() -> None:
    """As behind `| tee` in a shell that has stopped both."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 4096)
    os.set_blocking(writing, True)
    before = os.dup(2)
    try:
        os.dup2(writing, 2)
        with light_job(2.0) as (node,):
            os.dup2(before, 2)
            stopped, other = node.ranks
            stopped.send(signal.SIGSTOP)
            assert "[GRPO-603]" in other.record().cause
            assert stopped.wait() == -signal.SIGKILL
            assert node.sentinel.wait(PATIENCE_S) == 0
    finally:
        os.dup2(before, 2)
        for descriptor in (before, reading, writing):
            os.close(descriptor)


def test_channel_to_unreading_or_gone_peer_closes_without_blocking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo.faults.channel.MAX_UNSENT_BYTES", 1 << 20)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel = Channel(ours)
        for _ in range(200):
            channel.send("beat", table="x" * 10_000)
        assert not channel.is_open
    ours, theirs = socket.socketpair()
    with ours:
        channel = Channel(ours)
        theirs.close()
        channel.send("beat")
        assert channel.receive() == []
        assert not channel.is_open
