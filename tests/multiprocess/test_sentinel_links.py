"""A connection between sentinels that is reset is replaced, and nothing that was said is lost with it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.proxies import Wire
from tests.support.sentinels import PATIENCE_S, LightNode, ends_well, everyone, light_job, nothing_happens

TIMEOUT_S = 20.0


@contextmanager
def wired_job(nodes: int = 2, timeout_s: float = TIMEOUT_S) -> Iterator[tuple[list[LightNode], Wire]]:
    wires: list[Wire] = []

    def through(port: int) -> int:
        wires.append(Wire(port))
        return wires[0].port

    with light_job(timeout_s, nodes=nodes, through=through) as started:
        yield started, wires[0]
    wires[0].refuse()


def await_joined(wire: Wire, times: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while wire.joined < times:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_connection_reset_is_replaced_without_failure() -> None:
    with wired_job(nodes=3) as (nodes, wire):
        for again in (1, 2, 3):
            wire.reset()
            await_joined(wire, 2 + 2 * again)
            nothing_happens(nodes, 0.2)
        for rank in everyone(nodes):
            rank.do(f"phase phase-of-{rank.rank} {3 - (rank.rank == 4)}")
        wire.reset()
        nodes[1].ranks[1].tell("not_come 3")  # the answer may come without the last phase, which goes with a beat
        assert nodes[1].ranks[1].said().startswith("{")
        ends_well(nodes)


@pytest.mark.parametrize("node", [0, 1])
def test_failure_record_survives_connection_reset(node: int) -> None:
    with wired_job() as (nodes, wire):
        wire.reset()
        nodes[node].ranks[1].tell("fail now")
        assert {rank.record().cause for rank in everyone(nodes)} == {"now"}
        assert [each.sentinel.wait(PATIENCE_S) for each in nodes] == [0, 0]


@pytest.mark.parametrize("node", [0, 1])
def test_goodbye_survives_connection_reset(node: int) -> None:
    with wired_job() as (nodes, wire):
        wire.reset()
        ends_well([nodes[node]])
        nothing_happens([nodes[1 - node]], 1.0)
        ends_well([nodes[1 - node]])


def test_connection_reset_without_reconnect_is_reported_on_both_sides() -> None:
    with wired_job() as (nodes, wire):
        wire.refuse()
        wire.reset()
        began = time.monotonic()
        for rank in nodes[1].ranks:  # at once
            record = rank.record()
            assert (record.node, record.host, record.nodes) == (0, "h0", ())
            assert "[GRPO-605]" in record.cause
        for rank in nodes[0].ranks:
            record = rank.record()
            assert (record.node, record.host, record.nodes) == (1, "h1", ())
            assert "[GRPO-605]" in record.cause
        assert time.monotonic() - began < TIMEOUT_S


def test_silent_connection_to_live_peer_is_replaced() -> None:
    """As a router does that has forgotten a connection: nothing comes through, and a new one does."""
    with wired_job(timeout_s=4.0) as (nodes, wire):
        wire.swallow()
        await_joined(wire, 2)
        nothing_happens(nodes, 6.0)
        ends_well(nodes)
