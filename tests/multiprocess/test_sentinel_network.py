"""Sentinels on machines of their own, while the network between them is cut."""

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from grpo.faults.failure import FailureRecord
from grpo.faults.liveness import HEARTBEAT_TIMEOUT_S
from grpo.ops.launch.lost_nodes import silent_nodes
from tests import namespaces
from tests.support.launching import ROOT
from tests.support.networks import Network, network
from tests.support.sentinels import PATIENCE_S, SECRET

SHORT_S = 5.0  # the least that heartbeat_timeout may be
GRACE_S = 30.0  # on a slow machine
LONG_S = 2 * HEARTBEAT_TIMEOUT_S  # than users have: what starts and ends a cut takes seconds on a busy machine
LONG_CUT_S = 28.0
SETTLED_S = LONG_S - LONG_CUT_S + 3.0  # after a cut: a job that takes it for a failure has said so by then


@dataclass(slots=True)
class Node:
    """`tests/jobs/light_node.py` on a machine of the network."""

    process: subprocess.Popen

    def said(self, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], timeout_s)
        assert ready, "it says nothing"
        return json.loads(self.process.stdout.readline())

    def record(self) -> FailureRecord:
        return FailureRecord(**self.said()["record"])

    def has_ended(self) -> bool:
        return self.said(2 * PATIENCE_S) == {"ended": 0}

    def has_said_nothing(self) -> bool:
        assert self.process.stdout is not None
        return self.process.poll() is None and not select.select([self.process.stdout], [], [], 0)[0]

    def leave(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"leave\n")
        self.process.stdin.flush()


@pytest.fixture
def machines() -> Iterator[Callable[[int], Network]]:
    if reason := namespaces.why_not():
        if namespaces.is_promised():
            pytest.fail(reason)
        pytest.skip(reason)
    with contextlib.ExitStack() as stack:
        yield lambda hosts: stack.enter_context(network(hosts))


@contextlib.contextmanager
def job(net: Network, hosts: Sequence[int], timeout_s: float, *, old_kernel: bool = False) -> Iterator[list[Node]]:
    """A job whose nodes are on these machines."""
    path = [str(ROOT / "tests" / "jobs" / "old_kernel")] * old_kernel + [str(ROOT)]
    settings: dict[str, Any] = {"num_nodes": len(hosts), "agent": None, "timeout_s": timeout_s, "secret": SECRET}
    settings |= {
        "join_s": PATIENCE_S,
        "first_ranks": [*range(len(hosts))],
        "is_old_kernel": old_kernel,
        "addresses": [net.address(hosts[0])],
    }
    nodes: list[Node] = []
    with contextlib.ExitStack() as stack:
        for number, host in enumerate(hosts):
            program = [
                sys.executable,
                str(ROOT / "tests" / "jobs" / "light_node.py"),
                str(number),
                json.dumps(settings),
            ]
            process = subprocess.Popen(
                net.inside(host, program),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
            )
            stack.callback(process.wait, PATIENCE_S)
            stack.enter_context(contextlib.closing(process.stdin))  # type: ignore[type-var]
            nodes.append(Node(process))
            settings = {"port": nodes[-1].said()["port"], **settings}  # the first one's stays
        yield nodes


def test_network_cut_shorter_than_timeout_reports_no_failure(machines: Callable[[int], Network]) -> None:
    """TCP waits twice as long with each try: after this cut for another 23 s, if it is left to itself."""
    net = machines(2)
    with (
        job(net, [0, 1], LONG_S) as new,
        job(net, [0, 1], LONG_S, old_kernel=True) as old,
    ):
        net.cut(1)
        time.sleep(LONG_CUT_S)
        net.join(1)
        time.sleep(SETTLED_S)
        assert all(node.has_said_nothing() for node in [*new, *old])
        for node in [*new, *old]:
            node.leave()
        assert all(node.has_ended() for node in [*new, *old])


def test_goodbye_during_network_cut_is_delivered_after_it(machines: Callable[[int], Network]) -> None:
    net = machines(2)
    with job(net, [0, 1], HEARTBEAT_TIMEOUT_S) as (first, second):
        net.cut(1)
        first.leave()
        time.sleep(8.0)  # more than a goodbye takes
        net.join(1)
        assert first.has_ended()
        time.sleep(1.0)
        assert second.has_said_nothing()
        second.leave()
        assert second.has_ended()


def test_lasting_network_cut_is_named_by_both_sides(machines: Callable[[int], Network]) -> None:
    net = machines(3)
    with job(net, [0, 2], SHORT_S) as two, job(net, [0, 1, 2], SHORT_S) as three:
        net.cut(2)
        began = time.monotonic()
        one, other = (node.record() for node in two)
        assert one == other
        assert "node 0 (h0) and node 1 (h1) have not heard of each other for 5 s" in one.cause
        assert "[GRPO-614]" in one.cause
        assert one.nodes == ()  # either may be well
        seen, also_seen, own = (node.record() for node in three)
        assert seen == also_seen
        assert (seen.node, seen.host, seen.nodes) == (2, "h2", (2,))
        assert "[GRPO-604]" in seen.cause
        assert (own.node, own.host, own.nodes) == (2, "h2", ())
        assert "cut off from node 0 (h0) for 5 s" in own.cause
        assert "[GRPO-616]" in own.cause
        assert all(node.has_ended() for node in [*two, *three])
        assert time.monotonic() - began < 3 * SHORT_S + GRACE_S


def test_network_cut_of_node_0_excludes_no_other_node(machines: Callable[[int], Network]) -> None:
    net = machines(4)
    with job(net, [0, 1, 2, 3], SHORT_S) as nodes:
        net.cut(0)
        first, *others = (node.record() for node in nodes)
        assert (first.node, first.nodes) == (0, ())
        assert "cut off from 3 of 3 other nodes at once (1, 2, 3) for 5 s" in first.cause
        assert "[GRPO-616]" in first.cause
        assert silent_nodes({"state": "failed", "why": "", "kind": first.kind, "nodes": list(first.nodes)}) == []
        assert [(record.node, record.nodes) for record in others] == [(1, ()), (2, ()), (3, ())]
        assert all("cut off from node 0 (h0)" in record.cause for record in others)
        assert all(node.has_ended() for node in nodes)
