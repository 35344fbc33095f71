"""A spare node in the allocation of a Slurm job takes the place of one that is lost, and of no other."""

import itertools
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from grpo.faults.failure import FailureKind
from grpo.faults.liveness import NodePlace
from grpo.ops.launch import lost_nodes
from grpo.ops.launch.lost_nodes import probe, silent_nodes, watch
from grpo.ops.launch.next_attempt import read_state
from grpo.record.files import Entry
from grpo.record.folder import RunFolder
from tests.support.machine import DONE, FAILED, Machine

ONE_SPARE = {
    "SLURM_NNODES": "3",
    "SLURM_JOB_NODELIST": "n[0-2]",
    "FAKE_GPUS": "8 8 7",
    "GRPO_SPARE_NODES": "1",
}
NODES = ["a", "b", "c"]


def failed(kind: FailureKind, *nodes: int) -> Entry:
    return {"state": "failed", "why": "words that nobody reads", "kind": kind, "nodes": list(nodes), "step": 3}


MACHINE = failed(FailureKind.MACHINE)


def silent(node: int) -> Entry:
    return failed(FailureKind.NODE_LOST, node)


# -- which nodes are lost -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "unreachable", "expected"),
    [
        (None, set(), []),
        (MACHINE, set(), []),
        (MACHINE, {"b"}, ["b"]),
        (None, {"b", "c"}, ["b", "c"]),
        (silent(1), set(), ["b"]),
        (silent(1), {"b"}, ["b"]),
        (silent(0), set(), []),  # the batch script runs on it
        (failed(FailureKind.NODE_LOST), set(), []),  # it went, or its sentinel was killed: Slurm says which
        (None, {"a", "b", "c"}, []),  # Slurm does not answer
        ({"state": "stopped", "why": ""}, set(), []),
    ],
)
def test_lost_nodes_combines_state_and_probe(
    state: Entry | None, unreachable: set[str], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lost_nodes, "probe", lambda nodes: unreachable)
    assert lost_nodes.lost_nodes(state, NODES, used=2, here="a") == expected


def test_silent_nodes_reads_nodes_from_failure_record(tmp_path: Path) -> None:
    """As a sentinel makes it, and as rank 0 writes it."""
    place = NodePlace(node=12, rank=96, host="b.x", pid=7)
    for missed, nodes in ((place.is_silent(20), [12]), (place.is_gone(0, 20), [])):
        run = RunFolder(tmp_path / str(len(nodes)), {"GRPO_JOB": "17", "GRPO_ATTEMPT": "0"})
        run.update(state="failed", why=str(missed), kind=missed.kind, nodes=missed.nodes)
        run.release()
        state = read_state(run.path, lambda _: True)
        assert (silent_nodes(state), state and state["kind"]) == (nodes, "node_lost")
    assert silent_nodes(failed(FailureKind.MACHINE, 1)) == []
    assert silent_nodes({"state": "running", "why": ""}) == []


def test_probe_of_hanging_node_ends_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "srun").write_text(
        '#!/bin/sh\ncase "$*" in *--nodelist=a*) exit 0 ;; *--nodelist=b*) exit 1 ;; *) exec /bin/sleep 60 ;; esac\n'
    )
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(lost_nodes, "PROBE_S", 2.0)
    began = time.monotonic()
    assert probe(NODES) == {"b", "c"}
    assert time.monotonic() - began < 30


# -- when they are looked for -------------------------------------------------------------------------------------


@pytest.fixture
def srun() -> Iterator[subprocess.Popen]:
    """It ends neither by itself nor by SIGTERM."""
    program = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_nodes, "POLL_S", 0.02)
    monkeypatch.setattr(lost_nodes, "GRACE_S", 0.1)
    monkeypatch.setattr(lost_nodes, "SRUN_END_S", 0.2)


def asked(answers: list[list[str]]) -> tuple[list[Entry | None], Callable[[Entry | None], list[str]]]:
    """What `find` was asked about, and a `find` that gives these answers."""
    states: list[Entry | None] = []

    def find(state: Entry | None) -> list[str]:
        states.append(state)
        return answers.pop(0)

    return states, find


def in_turn(*states: Entry | None, then: Callable[[], None] = lambda: None) -> Callable[[], Entry | None]:
    """A state at a time; behind the last one stays what it is, and `then` is called."""
    left: Sequence[Entry | None] = list(states)

    def state() -> Entry | None:
        nonlocal left
        if len(left) > 1:
            left = left[1:]
        else:
            then()
        return left[0]

    return state


def test_watch_with_lost_node_kills_srun(srun: subprocess.Popen) -> None:
    crashed = MACHINE
    states, find = asked([["b"]])
    assert watch(srun.pid, in_turn(None, None, None, crashed), find) == ["b"]
    assert srun.wait(10) == -9
    assert states == [crashed]


def test_watch_with_reachable_nodes_keeps_srun_and_looks_again_at_end(srun: subprocess.Popen) -> None:
    """It leaves node 0 the time to write, and nodes are looked for once more at its end."""
    calls = itertools.count()

    def end_later() -> None:
        if next(calls) == 9:
            srun.kill()

    states, find = asked([[], ["c"]])
    assert watch(srun.pid, in_turn(None, MACHINE, then=end_later), find) == ["c"]
    assert len(states) == 2


@pytest.mark.parametrize(
    ("ended", "asks"),
    [
        (None, 1),
        ({"state": "running"}, 1),
        ({"state": "finished"}, 0),
        ({"state": "stopped"}, 0),
        (MACHINE, 1),
        (failed(FailureKind.USER), 0),
        (failed(FailureKind.MEMORY), 0),
    ],
)
def test_watch_of_ended_srun_looks_only_where_node_may_be_lost(
    ended: Entry | None, asks: int, srun: subprocess.Popen
) -> None:
    srun.kill()
    states, find = asked([["b"]])
    assert watch(srun.pid, lambda: ended, find) == (["b"] if asks else [])
    srun.wait()
    assert watch(srun.pid, lambda: ended, asked([["b"]])[1]) == (["b"] if asks else [])
    assert len(states) == asks


# -- what the templates make of it --------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["lopsided", "vanish", "silent"])
def test_spare_replaces_lost_node_in_same_allocation(fault: str, machine: Machine) -> None:
    """`silent` is one that Slurm still reaches."""
    machine.behave(fault, "finish")
    code, output = machine.run("train.sbatch", **ONE_SPARE, FAKE_LOST="" if fault == "silent" else "n1")
    assert (code, "lost n1: another attempt on n0 n2" in output) == (DONE, True), output
    assert not machine.lines("requeued")
    assert machine.lines("shrunk") == ["NodeList=n0,n2"], "Slurm is not to requeue the job when it misses the node"
    options = machine.lines("srun_options")
    assert [each for each in options if each.startswith("--nodelist")] == ["--nodelist=n0,n1", "--nodelist=n0,n2"]
    assert [each for each in options if each.startswith("--gpus")] == ["--gpus-per-node=7"] * 2, "that of all"
    assert options.count("--nodes=2") == 2, "the world keeps its size"
    for attempt in (0, 1):
        assert [machine.launched(node, attempt)["environment"]["GRPO_ATTEMPT"] for node in (0, 1)] == [str(attempt)] * 2
        log = machine.output_dir / "logs" / f"train-node1.job-123456.attempt-{attempt}.log"
        assert f"attempt {attempt}" in log.read_text()
    assert not [*machine.output_dir.glob("lost_nodes.*")]


def test_spare_without_lost_node_stays_unused(machine: Machine) -> None:
    machine.behave("heal")
    code, output = machine.run("train.sbatch", **ONE_SPARE)
    assert (code, machine.lines("requeued")) == (DONE, ["requeue"]), output
    assert sorted(machine.lines("probed")) == ["0", "1", "2"]
    assert "another attempt" not in output
    machine.behave("heal", "heal")
    code, output = machine.run("train.sbatch", **ONE_SPARE, SLURM_RESTART_COUNT="1", FAKE_LOST="n2")
    assert (code, len(machine.lines("requeued"))) == (DONE, 2), f"the spare is lost, which explains nothing: {output}"


@pytest.mark.parametrize(("node", "left"), [(1, "n0 n2"), (0, "n1 n2")])
def test_spare_replaces_host_blamed_by_two_attempts(node: int, left: str, machine: Machine) -> None:
    """Slurm reaches it all the while; the batch script may run on it, and goes on there."""
    machine.behave(f"broken {node}", f"broken {node}", "finish")
    code, output = machine.run("train.sbatch", **ONE_SPARE)
    assert (code, machine.lines("requeued")) == (DONE, ["requeue"]), output
    assert "out of the job" not in output
    code, output = machine.run("train.sbatch", **ONE_SPARE, SLURM_RESTART_COUNT="1")
    assert (code, f"lost n{node}: another attempt on {left}" in output) == (DONE, True), output
    assert f"take n{node} out of the job" in output
    assert machine.lines("requeued") == ["requeue"]
    assert machine.lines("shrunk") == (["NodeList=n0,n2"] if node else []), "without this shell there is no job"
    names = [machine.launched(each, 2)["environment"]["SLURMD_NODENAME"] for each in (0, 1)]
    assert names == left.split()


def test_spare_with_different_blamed_hosts_stays_unused(machine: Machine) -> None:
    machine.behave("broken 0", "broken 1")
    for restarts in ("0", "1"):
        code, output = machine.run("train.sbatch", **ONE_SPARE, SLURM_RESTART_COUNT=restarts)
        assert (code, "another attempt" in output, "out of the job" in output) == (DONE, False, False), output
    assert machine.lines("requeued") == ["requeue"] * 2


def test_slurm_job_without_spare_names_faulty_host(machine: Machine) -> None:
    machine.behave("broken 1", "broken 1", "broken 1")
    for restarts, said, expected in (("0", False, DONE), ("1", True, DONE), ("2", True, FAILED)):
        code, output = machine.run("train.sbatch", SLURM_RESTART_COUNT=restarts)
        assert (code, "take n1 out of the job" in output) == (expected, said), output
    assert machine.lines("requeued") == ["requeue"] * 2


def test_spare_after_hopeless_failure_probes_nothing(machine: Machine) -> None:
    machine.behave("hopeless")
    code, output = machine.run("train.sbatch", **ONE_SPARE, FAKE_LOST="n1")
    assert (code, machine.lines("probed"), machine.lines("requeued")) == (FAILED, [], []), output


def test_slurm_job_with_spare_lost_too_is_requeued(machine: Machine) -> None:
    machine.behave("vanish")
    code, output = machine.run("train.sbatch", **ONE_SPARE, FAKE_LOST="n1 n2")
    assert (code, machine.lines("requeued")) == (DONE, ["requeue"]), output
    assert "crash 1 of 3" in output


def test_crash_count_continues_through_replacements_and_requeues(machine: Machine) -> None:
    machine.behave("vanish", "vanish", "vanish")
    code, output = machine.run("train.sbatch", **ONE_SPARE, FAKE_LOST="n1")
    assert (code, machine.lines("requeued")) == (DONE, ["requeue"]), output
    assert "crash 1 of 3" in output
    assert "crash 2 of 3" in output
    code, output = machine.run("train.sbatch", **ONE_SPARE, SLURM_RESTART_COUNT="1")
    assert (code, "attempt 2 of job" in output, "crash 3 of 3" in output) == (FAILED, True, True), output


@pytest.mark.parametrize("spares", ["3", "-1"])
def test_spare_count_without_remaining_node_is_refused(spares: str, machine: Machine) -> None:
    code, output = machine.run("train.sbatch", **{**ONE_SPARE, "GRPO_SPARE_NODES": spares})
    assert (code, f"GRPO_SPARE_NODES is {spares}, but the job has 3 nodes" in output) == (2, True), output
