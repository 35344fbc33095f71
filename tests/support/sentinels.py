"""Nodes of light ranks on this machine, each with a sentinel, as a job has them."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from grpo.faults.failure import FailureRecord
from grpo.faults.liveness import NodePlace
from grpo.faults.sentinel_start import _started, start_sentinel

LIGHT_RANK = Path(__file__).resolve().parents[1] / "jobs" / "light_rank.py"
PATIENCE_S = 60.0  # on a slow machine; nothing waits for it to pass
SECRET = "ab" * 32
SECOND = NodePlace(node=1, rank=2, host="h1", pid=17)  # of a job of two


class LightRank:
    def __init__(self, rank: int, timeout_s: float) -> None:
        self.rank = rank
        self._process = subprocess.Popen(
            [sys.executable, str(LIGHT_RANK), str(rank), str(timeout_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # what `select` says is true
            env={**os.environ, "PYTHONPATH": str(LIGHT_RANK.parents[2])},
        )
        self.pid = self._process.pid

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())
        self._process.stdin.flush()

    def do(self, line: str) -> None:
        """Until it is done."""
        self.tell(line)
        assert self.said() == f"done {line}"

    def deafen(self) -> None:
        """Until it hears and does nothing any more."""
        self.tell("deaf")
        deadline = time.monotonic() + PATIENCE_S
        while Path(f"/proc/{self.pid}/comm").read_text() != "deaf\n":
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def said(self, timeout_s: float = PATIENCE_S) -> str:
        """Its next line."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        assert ready, f"rank {self.rank} says nothing"
        return self._process.stdout.readline().decode().strip()

    def record(self) -> FailureRecord:
        """The job's, when it has it."""
        while not (line := self.said()).startswith("{"):
            assert line.startswith("done"), f"rank {self.rank} said {line!r}, and no record"
        return FailureRecord(**json.loads(line))

    def is_running(self) -> bool:
        return self._process.poll() is None

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        return self._process.wait(timeout_s)

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


class LightNode:
    """A node with its ranks and its sentinel, which all say that they are ready."""

    def __init__(self, node: int, ranks: Sequence[LightRank], settings: dict[str, Any]) -> None:
        self.node, self.ranks = node, ranks
        pids = {rank.rank: rank.pid for rank in ranks}
        name, self.port = start_sentinel({**settings, "node": node, "host": f"h{node}", "pids": pids})
        self.sentinel = _started[-1]
        for rank in ranks:
            rank.tell(name)
            assert rank.said() == "ready"

    def send(self, number: int) -> None:
        """To all of it, so that nobody is left to tell."""
        for rank in self.ranks:
            rank.send(number)
        self.sentinel.send_signal(number)


@contextlib.contextmanager
def light_job(
    timeout_s: float,
    *,
    nodes: int = 1,
    ranks: int = 2,
    agent: int | None = None,
    missing: int = 0,
    join_s: float = PATIENCE_S,
    through: Callable[[int], int] = lambda port: port,
    **more: Any,
) -> Iterator[list[LightNode]]:
    """All of it is ended with the context.

    Args:
        missing: nodes that the job has beside these.
        through: the port at which other nodes reach the hub, by its own.
        more: settings of the sentinels.
    """
    settings: dict[str, Any] = {"num_nodes": nodes + missing, "agent": agent, "timeout_s": timeout_s, **more}
    settings |= {"secret": SECRET, "join_s": join_s, "first_ranks": [*range(0, (nodes + missing) * ranks, ranks)]}
    started: list[LightNode] = []
    processes = [LightRank(rank, timeout_s) for rank in range(nodes * ranks)]
    try:
        for node in range(nodes):
            own = processes[node * ranks : (node + 1) * ranks]
            started.append(LightNode(node, own, settings))
            if node == 0 and (port := started[0].port) is not None:
                settings |= {"addresses": ["127.0.0.1"], "port": through(port)}
        yield started
    finally:
        for rank in processes:
            rank.close()
        for each in started:
            with contextlib.suppress(ProcessLookupError):
                each.sentinel.send_signal(signal.SIGCONT)
            try:
                each.sentinel.wait(PATIENCE_S)
            finally:
                each.sentinel.kill()


def everyone(nodes: Sequence[LightNode]) -> list[LightRank]:
    return [rank for node in nodes for rank in node.ranks]


def nothing_happens(nodes: Sequence[LightNode], seconds: float) -> None:
    """All ranks and sentinels go on, and have nothing to say."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert all(rank.is_running() for rank in everyone(nodes))
        assert all(node.sentinel.poll() is None for node in nodes)
        time.sleep(0.05)


def ends_well(nodes: Sequence[LightNode]) -> None:
    """All ranks leave, and the sentinels go with them."""
    for rank in everyone(nodes):
        rank.tell("leave")
    for rank in everyone(nodes):
        assert rank.wait() == 0
    for node in nodes:
        assert node.sentinel.wait(PATIENCE_S) == 0
