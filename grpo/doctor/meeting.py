"""Where the nodes meet: a TCPStore of the doctor's own on the head, before any launcher runs.

Each node says that it came, examines itself and posts its report as JSON; the head waits, judges, and posts the verdict
that every node exits with. Nobody waits without a deadline, and whoever did not come is named: by the head, or, when it
is the head, by every other node.
"""

import contextlib
import json
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from grpo.doctor.agreement import judge
from grpo.doctor.deadline import within
from grpo.doctor.expected import Place
from grpo.doctor.network import address_of, read_interfaces, route_to
from grpo.doctor.records import Finding, NodeReport, Status, Verdict
from grpo.doctor.report import find_shared_file
from grpo.doctor.storage import nearest_folder

REPORT_S = 120.0  # from a node's coming to its report: checks that hang have 20 s each
GRACE_S = 5.0  # a head that comes last gives the others this long to find it
_CONNECT_S = 10.0  # for the store's handshake, which has no deadline of its own against a port that never answers
_OPEN_S = 30.0  # from the head's store being open to its first word: it writes the shared file before
_LEAVE_S = 10.0  # how long the head stays for the others to read the verdict
_POLL_S = 0.05
_CLOCK_SAMPLES = 3


class JoinFailed(RuntimeError):
    """This node cannot take part; `finding` says why."""

    def __init__(self, node: str, message: str, fix: str) -> None:
        super().__init__(message)
        self.finding = _join_failure(node, message, fix)


def _join_failure(node: str, message: str, fix: str) -> Finding:
    return Finding(check="join", status=Status.FAIL, message=message, fix=fix, nodes=(node,))


# -- the head -----------------------------------------------------------------------------------------------------


def preside(
    place: Place,
    examine: Callable[[], NodeReport],
    show: Callable[[Verdict], None],
    *,
    output_dir: Path | None,
    join_timeout_s: float,
    started: float,
) -> Verdict:
    """The head's part: opens the store, waits for the others, judges, shows the verdict and posts it.

    Returns within the join timeout, counted from the first node that was up, plus `REPORT_S` for the last that came.

    Args:
        show: called before the others hear the verdict, so that their lines come after the table.
        started: `time.monotonic()` of this node's start.
    """
    try:
        store = dist.TCPStore("127.0.0.1", place.port, is_master=True, wait_for_workers=False)
    except dist.DistError as error:
        taken = f"the head cannot open its store on port {place.port}: {str(error).splitlines()[0]}"
        fix = "start one doctor per node (srun --ntasks-per-node=1), or give all of them another --port"
        verdict = judge(place.nodes, [examine()], [_join_failure(place.node, taken, fix)])
        show(verdict)
        return verdict
    with _shared_file(output_dir) as shared:
        store.set("head", json.dumps(shared))
        own = replace(examine(), sees_shared_file=None if shared is None else True)
        findings, reports = _receive(store, place, join_timeout_s=join_timeout_s, started=started)
        if reports and not own.route_source:  # the others' names need not resolve here, their addresses do
            interface, source = route_to(reports[0].route_source, read_interfaces())
            own = replace(own, route_interface=interface, route_source=source)
        verdict = judge(place.nodes, [own, *reports], findings)
        show(verdict)
        store.set("verdict", replace(verdict, reports=()).dumps())
        deadline = time.monotonic() + _LEAVE_S
        for report in reports:
            while not store.check([f"left/{report.node}"]) and time.monotonic() < deadline:
                time.sleep(_POLL_S)
    return verdict


@contextlib.contextmanager
def _shared_file(output_dir: Path | None) -> Iterator[tuple[str, str] | None]:
    """Path and content of a file at the output path, for the others to find; None without one, or where none can be
    written, of which the node's own check tells."""
    path = None
    if output_dir is not None:
        text = f"{socket.gethostname()} {time.time()}"
        with contextlib.suppress(OSError, TimeoutError):
            path = within(_OPEN_S / 2, lambda: _write_shared_file(nearest_folder(output_dir.absolute()), text))
    if path is None:
        yield None
        return
    try:
        yield str(path), text
    finally:
        path.unlink(missing_ok=True)


def _write_shared_file(folder: Path, text: str) -> Path:
    descriptor, name = tempfile.mkstemp(prefix=".grpo-doctor-", dir=folder)
    with open(descriptor, "w") as file:
        file.write(text)
    return Path(name)


def _receive(
    store: dist.Store, place: Place, *, join_timeout_s: float, started: float
) -> tuple[list[Finding], list[NodeReport]]:
    """Who came, and the reports in the order of the expected nodes. Tells everyone who asks the head's time."""
    others = place.nodes[1:]
    opened, first_up = time.monotonic(), started
    came: dict[str, float] = {}
    answers: dict[str, bytes] = {}
    while True:
        for node in others:
            if node not in came and store.check([f"hello/{node}"]):
                came[node] = time.monotonic()
                first_up = min(first_up, came[node] - float(store.get(f"hello/{node}")))
            if store.check([f"ask/{node}"]):
                store.delete_key(f"ask/{node}")
                store.set(f"clock/{node}", str(time.time()))
            if node in came and node not in answers and store.check([f"report/{node}"]):
                answers[node] = store.get(f"report/{node}")
        now = time.monotonic()
        may_join = len(came) < len(others) and now < max(first_up + join_timeout_s, opened + GRACE_S)
        may_report = any(node not in answers and now < at + REPORT_S for node, at in came.items())
        if not may_join and not may_report:
            break
        time.sleep(_POLL_S)
    findings, reports = [], []
    if missing := tuple(node for node in others if node not in came):
        message = f"{', '.join(missing)} did not come within {join_timeout_s:.0f} s of the first node"
        fix = f"is grpo doctor started there, and does it reach {place.head_address}:{place.port}? Under Slurm: srun "
        fix += "--ntasks-per-node=1 grpo doctor; slow starters: --join-timeout"
        findings.append(Finding(check="join", status=Status.FAIL, message=message, fix=fix, nodes=missing))
    for node in others:
        if node not in came:
            continue
        if node not in answers:
            message = f"{node} came, but did not report within {REPORT_S:.0f} s"
            findings.append(_join_failure(node, message, "run grpo doctor on it alone: what hangs there?"))
            continue
        try:
            reports.append(NodeReport.loads(answers[node]))
        except ValueError as error:
            fix = "install the same grpo on all nodes"
            findings.append(_join_failure(node, f"{node} runs another version of grpo: {error}", fix))
        if (processes := store.add(f"count/{node}", 0)) > 1:
            fix = "start one per node: srun --ntasks-per-node=1 grpo doctor"
            findings.append(_join_failure(node, f"{processes} processes came as {node}", fix))
    if not findings:
        message = f"all {len(place.nodes)} nodes came within {max(came.values()) - first_up:.1f} s"
        findings.append(Finding(check="join", status=Status.PASS, message=message, nodes=place.nodes))
    return findings, reports


# -- the others ---------------------------------------------------------------------------------------------------


def attend(
    place: Place, examine: Callable[[], NodeReport], *, join_timeout_s: float, started: float
) -> tuple[Verdict, bool]:
    """Another node's part.

    Returns:
        The head's verdict and True; or this node's own, which names the head, and False.
    """
    try:
        _reach(place, started + join_timeout_s, join_timeout_s)
        store = _join(place)
        # A head whose machine goes dark leaves calls without an end of their own.
        limit_s = join_timeout_s + 3 * REPORT_S
        return within(limit_s, lambda: _take_part(store, place, examine, limit_s=limit_s, started=started)), True
    except JoinFailed as error:
        failure = error.finding
    except (dist.DistError, TimeoutError) as error:
        cause = f"the head {place.head} came, but stopped answering: {str(error).splitlines()[0]}"
        failure = _join_failure(place.head, cause, f"look at the output of grpo doctor on {place.head}")
    return judge(place.nodes, [examine()], [failure]), False


def _reach(place: Place, until: float, join_timeout_s: float) -> None:
    """Wait until something listens where the head should. Plain sockets say why they fail; the store does not."""
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
            raise JoinFailed(
                place.head,
                f"the head {place.head} ({place.head_address}:{place.port}) did not come within "
                f"{join_timeout_s:.0f} s: {cause}; here {resolved}{route}",
                f"is it up, is grpo doctor started on it, is port {place.port} open between the nodes? If it is "
                "reached under another name: --head ADDRESS; slow starters: --join-timeout",
            )
        time.sleep(0.5)


def _join(place: Place) -> dist.Store:
    address, port, timeout = place.head_address, place.port, timedelta(seconds=_CONNECT_S)
    try:
        store = within(
            _CONNECT_S,
            lambda: dist.TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False),
        )
        store.wait(["head"], timedelta(seconds=_OPEN_S))
        return store
    except (dist.DistError, TimeoutError) as error:
        raise JoinFailed(
            place.head,
            f"what answers at {place.head_address}:{place.port} is not the doctor of the head {place.head}: "
            f"{str(error).splitlines()[0]}",
            "give all nodes another --port",
        ) from error


def _take_part(
    store: dist.Store, place: Place, examine: Callable[[], NodeReport], *, limit_s: float, started: float
) -> Verdict:
    if store.add(f"count/{place.node}", 1) > 1:
        fix = "start one per node: srun --ntasks-per-node=1 grpo doctor"
        raise JoinFailed(place.node, f"another process came as {place.node} before this one", fix)
    store.set(f"hello/{place.node}", str(time.monotonic() - started))
    report = examine()
    offset_s, error_s = _measure_clock(store, place.node)
    shared = json.loads(store.get("head"))
    sees = None if shared is None else find_shared_file(Path(shared[0]), shared[1])
    report = replace(report, clock_offset_s=offset_s, clock_error_s=error_s, sees_shared_file=sees)
    store.set(f"report/{place.node}", report.dumps())
    store.wait(["verdict"], timedelta(seconds=limit_s))
    verdict = Verdict.loads(store.get("verdict"))
    store.set(f"left/{place.node}", "1")
    return verdict


def _measure_clock(store: dist.Store, node: str) -> tuple[float | None, float]:
    """This clock minus the head's, and by how much that may be wrong; the quickest of a few round trips."""
    best: tuple[float | None, float] = (None, 0.0)
    for _ in range(_CLOCK_SAMPLES):
        asked = time.time()
        store.set(f"ask/{node}", "1")
        try:
            store.wait([f"clock/{node}"], timedelta(seconds=REPORT_S / 2))
        except dist.DistStoreError:
            return best  # the head is not listening: of that its own deadlines tell
        answered = time.time()
        head = float(store.get(f"clock/{node}"))
        store.delete_key(f"clock/{node}")
        error_s = (answered - asked) / 2
        if best[0] is None or error_s < best[1]:
            best = ((asked + answered) / 2 - head, error_s)
    return best
