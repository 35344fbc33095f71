"""Rendezvous of the nodes: a TCPStore of their own on the head, before any launcher runs.

Each node announces itself and brings a report; the head waits, decides, and posts a verdict for all nodes. Every wait
has a deadline, and missing nodes are named: by the head, or, if it is the head, by every other node.

A duplicate or late process is refused. The head closes the rendezvous in one atomic step per name, right before it
decides: a process that came before is part of the decision, and a later one finds it closed.
"""

import json
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from grpo.faults.deadlines import REMINDER_S, within
from grpo.ops.rendezvous.addresses import address_of, read_interfaces, route_to
from grpo.ops.rendezvous.expected import Place
from grpo.ops.rendezvous.trouble import Trouble

T = TypeVar("T")

GRACE_S = 5.0  # a head that comes last gives the others this long to find it
_CONNECT_S = 10.0  # for the store's handshake, which has no timeout of its own against a port that never answers
_OPEN_S = 30.0  # from the opening of the head's store to its first message
_LEAVE_S = 10.0  # how long the head stays for the others to read the verdict
_POLL_S = 0.05
_CLOCK_SAMPLES = 3
_CLOCK_S = 60.0  # for the head's answer
_CLOSED = 1 << 20  # more processes than ever come under one name: added to its count at the close


class RendezvousFailed(RuntimeError):
    """There is no verdict of the head for this process; `trouble` has the reason."""

    def __init__(self, node: str, message: str, fix: str) -> None:
        super().__init__(message)
        self.trouble = Trouble(nodes=(node,), message=message, fix=fix)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeArrival:
    """A node with its report."""

    node: str
    report: bytes
    """Report of the node, encoded."""
    clock_offset_s: float | None
    """Clock of the node minus the head's, in seconds; None if not measured."""
    clock_error_s: float
    """Half the round trip of the measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attendance:
    """Basis of the head's decision."""

    arrivals: tuple[NodeArrival, ...]
    """Arrived nodes in the order of the expected ones, without the head."""
    troubles: tuple[Trouble, ...]
    """Missing nodes, missing reports, and duplicates; empty if all is well."""
    waited_s: float
    """Seconds from the first node's start to the last one's arrival."""


# -- the head -----------------------------------------------------------------------------------------------------


def preside(
    place: Place,
    bring: Callable[[], T],
    decide: Callable[[T, Attendance], str],
    *,
    opening: Any = None,
) -> tuple[Trouble, ...]:
    """Run the head's part: open the store, wait for the others, decide, and post the verdict.

    Returns within the join timeout, counted from the first node that was up, plus the report timeout for the last
    arrival.

    Args:
        bring: makes the head's own report, while the others arrive.
        decide: returns the verdict for all nodes. Its output comes before theirs.
        opening: JSON, passed to every other node before it makes its report.

    Returns:
        Processes that came after the verdict: they have been refused, but the others do not know.

    Raises:
        RendezvousFailed: the store cannot be opened, or the head's own report exceeds the report timeout.
    """
    try:
        store = dist.TCPStore("127.0.0.1", place.port, is_master=True, wait_for_workers=False)
    except dist.DistError as error:
        raise RendezvousFailed(
            place.node,
            f"the head cannot open its store on port {place.port}: {str(error).splitlines()[0]}",
            f"start one per node (srun --ntasks-per-node=1 {place.command}), or give all of them another --port",
        ) from error
    store.set("opening", json.dumps([place.command, place.nodes, opening]))
    try:
        own = within(place.report_timeout_s, bring)
    except TimeoutError as error:
        raise RendezvousFailed(
            place.node,
            f"the head {place.node} did not report within {place.report_timeout_s:.0f} s",
            f"run {place.command} on it alone: what hangs there?",
        ) from error
    attendance, counts = _receive(store, place)
    store.set("verdict", decide(own, attendance))
    deadline = time.monotonic() + _LEAVE_S
    for arrival in attendance.arrivals:
        while not store.check([f"left/{arrival.node}"]) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
    late = [node for node, count in counts.items() if store.add(f"count/{node}", 0) > count + _CLOSED]
    return tuple(_too_late(place, node, counts[node]).trouble for node in late)


def _receive(store: dist.Store, place: Place) -> tuple[Attendance, Mapping[str, int]]:
    """Wait for the others, and close the rendezvous: returns their reports, and the number of processes under each
    name."""
    others = place.nodes[1:]
    answers, came, first_up = _listen(store, place)
    counts = {node: store.add(f"count/{node}", _CLOSED) - _CLOSED for node in others}
    attendance = Attendance(
        arrivals=tuple(answers[node] for node in others if node in answers),
        troubles=tuple(_troubles(place, counts, came, answers)),
        waited_s=max(came.values(), default=first_up) - first_up,
    )
    return attendance, counts


def _listen(store: dist.Store, place: Place) -> tuple[dict[str, NodeArrival], dict[str, float], float]:
    """Wait until all have reported or the time is up; answer requests for the head's clock.

    Returns:
        Reports; arrival of each node, and the first node's start, by this node's `time.monotonic()`.
    """
    others, opened, first_up = place.nodes[1:], time.monotonic(), place.started
    came: dict[str, float] = {}
    answers: dict[str, NodeArrival] = {}
    reminded = opened
    while True:
        for node in others:
            if node not in came and store.check([f"hello/{node}"]):
                came[node] = time.monotonic()
                first_up = min(first_up, came[node] - float(store.get(f"hello/{node}")))
            if store.check([f"ask/{node}"]):
                store.delete_key(f"ask/{node}")
                store.set(f"time/{node}", str(time.time()))
            if node in came and node not in answers and store.check([f"report/{node}"]):
                offset_s, error_s = json.loads(store.get(f"clock/{node}"))
                report = store.get(f"report/{node}")
                answers[node] = NodeArrival(node=node, report=report, clock_offset_s=offset_s, clock_error_s=error_s)
        now = time.monotonic()
        may_join = len(came) < len(others) and now < max(first_up + place.join_timeout_s, opened + GRACE_S)
        may_report = any(node not in answers and now < at + place.report_timeout_s for node, at in came.items())
        if not may_join and not may_report:
            return answers, came, first_up
        if now > reminded + REMINDER_S:
            reminded = now
            print(
                f"[grpo] for {now - opened:.0f} s {place.command} waits for {_awaited(place, came, answers)}",
                flush=True,
            )
        time.sleep(_POLL_S)


def _awaited(place: Place, came: Mapping[str, float], answers: Mapping[str, NodeArrival]) -> str:
    """Describe missing nodes, and nodes still making their report."""
    parts = [f"{node} to come" for node in place.nodes[1:] if node not in came]
    return ", ".join([*parts, *(f"the report of {node}" for node in came if node not in answers)])


def _troubles(
    place: Place, counts: Mapping[str, int], came: Mapping[str, float], answers: Mapping[str, NodeArrival]
) -> list[Trouble]:
    troubles, patience = [], f"{place.join_timeout_s:.0f} s"
    if missing := tuple(node for node in place.nodes[1:] if node not in came):
        message = f"{', '.join(missing)} did not come within {patience} of the first node [GRPO-302]"
        fix = f"is {place.command} started there, and does it reach {place.head_address}:{place.port}? Under Slurm: "
        fix += f"srun --ntasks-per-node=1 {place.command}; slow starters: --join-timeout"
        troubles.append(Trouble(nodes=missing, message=message, fix=fix))
    for node, count in counts.items():
        if node in came and node not in answers:
            message = f"{node} came, but did not report within {place.report_timeout_s:.0f} s"
            fix = f"run {place.command} on it alone: what hangs there?"
            troubles.append(Trouble(nodes=(node,), message=message, fix=fix))
        if count > 1:
            message = f"{count} processes came as {node}"
            troubles.append(Trouble(nodes=(node,), message=message, fix=_one_per_node(place)))
    return troubles


def _one_per_node(place: Place) -> str:
    return f"start one per node: srun --ntasks-per-node=1 {place.command}"


def _too_late(place: Place, node: str, before: int) -> RendezvousFailed:
    """Error for a process that came as `node` after the close; `before` others came under this name in time."""
    message = f"a process came as {node} when the verdict of the head {place.head} stood already"
    if before:
        return RendezvousFailed(node, f"{message}, for another process that had come as {node}", _one_per_node(place))
    return RendezvousFailed(node, message, "start all nodes together; slow starters: --join-timeout")


# -- the others ---------------------------------------------------------------------------------------------------


def attend(place: Place, bring: Callable[[Any], str]) -> bytes:
    """Run another node's part. Returns the head's verdict.

    Args:
        bring: makes this node's report; receives the head's opening.

    Raises:
        RendezvousFailed: the head does not come, does not answer, or has no place for this process.
    """
    until = place.started + place.join_timeout_s
    # A head whose machine loses power leaves calls that never end.
    limit_s = place.join_timeout_s + 3 * place.report_timeout_s
    try:
        while True:
            _reach(place, until)
            store = _join(place)
            command, nodes, opening = json.loads(store.get("opening"))
            if command == place.command:
                break
            if time.monotonic() > until:
                raise RendezvousFailed(
                    place.head,
                    f"at {place.head_address}:{place.port} nodes meet for {command}, not for {place.command}",
                    "give all nodes another --port",
                )
            del store  # an earlier rendezvous of this head, about to end
            time.sleep(_POLL_S)
        _check_expected(place, nodes)
        return within(limit_s, lambda: _take_part(store, place, lambda: bring(opening), timedelta(seconds=limit_s)))
    except (dist.DistError, TimeoutError) as error:
        raise RendezvousFailed(
            place.head,
            f"the head {place.head} came, but stopped answering: {str(error).splitlines()[0]}",
            f"look at the output of {place.command} on {place.head}",
        ) from error


def _reach(place: Place, until: float) -> None:
    """Wait until the head's port is open. Plain sockets report errors; the store does not."""
    while True:
        try:
            socket.create_connection((place.head_address, place.port), timeout=2.0).close()
            return
        except OSError as error:
            cause = f"{type(error).__name__}: {error}" if error.errno is None else str(error.strerror)
        if time.monotonic() > until:
            address = address_of(place.head_address)
            resolved = f"{place.head_address} resolves to {address}" if address else "the name does not resolve"
            resolved = "" if address == place.head_address else f"{resolved}, "
            interface, source = route_to(place.head_address, read_interfaces())
            route = f"packets leave by {interface or 'an unknown interface'} from {source}" if source else "no route"
            raise RendezvousFailed(
                place.head,
                f"the head {place.head} ({place.head_address}:{place.port}) did not come within "
                f"{place.join_timeout_s:.0f} s [GRPO-303]: {cause}; here {resolved}{route}",
                f"is it up, is {place.command} started on it and not over already, is port {place.port} open between "
                "the nodes? If it is reached under another name: --head ADDRESS; slow starters: --join-timeout",
            )
        time.sleep(0.5)


def _join(place: Place) -> dist.Store:
    address, port, timeout = place.head_address, place.port, timedelta(seconds=_CONNECT_S)
    try:
        store = within(
            _CONNECT_S,
            lambda: dist.TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False),
        )
        store.wait(["opening"], timedelta(seconds=_OPEN_S))
        return store
    except (dist.DistError, TimeoutError) as error:
        raise RendezvousFailed(
            place.head,
            f"what answers at {place.head_address}:{place.port} is not {place.command} of the head {place.head}: "
            f"{str(error).splitlines()[0]}",
            "give all nodes another --port",
        ) from error


def _check_expected(place: Place, nodes: Sequence[str]) -> None:
    if place.node not in nodes:
        message = f"the head {place.head} expects {', '.join(nodes)}, and not {place.node}"
        raise RendezvousFailed(place.node, message, "give every node the same list of nodes")


def _take_part(store: dist.Store, place: Place, bring: Callable[[], str], limit: timedelta) -> bytes:
    count = store.add(f"count/{place.node}", 1)
    if count > _CLOSED:
        raise _too_late(place, place.node, count - _CLOSED - 1)
    if count > 1:
        raise RendezvousFailed(
            place.node, f"another process came as {place.node} before this one", _one_per_node(place)
        )
    store.set(f"hello/{place.node}", str(time.monotonic() - place.started))
    report = bring()
    store.set(f"clock/{place.node}", json.dumps(_measure_clock(store, place.node)))
    store.set(f"report/{place.node}", report)
    store.wait(["verdict"], limit)
    verdict = store.get("verdict")
    store.set(f"left/{place.node}", "1")
    return verdict


def _measure_clock(store: dist.Store, node: str) -> tuple[float | None, float]:
    """Measure this clock minus the head's, and the possible error; uses the fastest of a few round trips."""
    samples: list[tuple[float | None, float]] = []
    for _ in range(_CLOCK_SAMPLES):
        asked = time.time()
        store.set(f"ask/{node}", "1")
        try:
            store.wait([f"time/{node}"], timedelta(seconds=_CLOCK_S))
        except dist.DistStoreError:
            break  # the head does not answer: its own deadlines report it
        answered = time.time()
        head = float(store.get(f"time/{node}"))
        store.delete_key(f"time/{node}")
        samples.append(((asked + answered) / 2 - head, (answered - asked) / 2))
    return min(samples, key=lambda sample: sample[1], default=(None, 0.0))
