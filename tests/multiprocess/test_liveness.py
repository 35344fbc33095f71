"""Whatever is stopped, killed or cut off in a job under torchrun: all are gone in time with one record, and nothing
stays. On ranks that are stuck in a collective over gloo, without engines.
"""

import json
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.support.contract import STARTUP_S, expect_the_contract, the_record
from tests.support.launching import BIN, ROOT, Job, free_port, start, wait_gone

JOB = ROOT / "tests" / "jobs" / "struck_job.py"
TIMEOUT_S = 5.0
PROMISED_S = TIMEOUT_S + 40


def started(out: Path, how: str, *, ranks: int, nodes: int = 2) -> Job:
    port = free_port()

    def command(node: int) -> list[str]:
        flags = [f"--nnodes={nodes}", f"--node_rank={node}", f"--nproc_per_node={ranks}"]
        script = [str(JOB), str(out), str(TIMEOUT_S), how]
        return [str(BIN / "torchrun"), *flags, "--master_addr=127.0.0.1", f"--master_port={port}", *script]

    return start(command, out, nodes=nodes, env={"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)})


def all_there(job: Job, world_size: int) -> list[dict[str, int]]:
    """The pids that each rank has reported, once all are where they are to be struck."""
    return [json.loads(job.wait_for(f"at-{rank}", STARTUP_S).read_text()) for rank in range(world_size)]


# ranks per node, whose process, which, and how -> what the record says
STRIKES: dict[str, tuple[int, int, str, int, list[str]]] = {
    "the store's process stopped": (
        1,
        0,
        "launcher",
        signal.SIGSTOP,
        ["rank 0", "train", "launcher", "been stopped"],
    ),
    "another launcher stopped": (
        1,
        1,
        "launcher",
        signal.SIGSTOP,
        ["rank 1", "train", "launcher", "been stopped"],
    ),
    "a launcher killed": (1, 1, "launcher", signal.SIGKILL, ["rank 1", "the launcher of", "[GRPO-602]"]),
    "a rank stopped in a collective": (2, 1, "rank", signal.SIGSTOP, ["rank 1 (pid", "[GRPO-603]"]),
    "a local main stopped": (2, 2, "rank", signal.SIGSTOP, ["rank 2 (pid", "[GRPO-603]"]),
    "a sentinel killed": (1, 1, "sentinel", signal.SIGKILL, ["node 1", "[GRPO-605]"]),
    "a sentinel stopped": (1, 1, "sentinel", signal.SIGSTOP, ["node 1", "for 5 s", "[GRPO-604]"]),
    "the hub killed": (1, 0, "sentinel", signal.SIGKILL, ["node 0", "[GRPO-605]"]),
    "the hub stopped": (1, 0, "sentinel", signal.SIGSTOP, ["node 0", "for 5 s", "[GRPO-604]"]),
}
# The others with light ranks alone (`test_sentinel.py`), and here with the rest that takes long.
IN_TESTS = ("a local main stopped",)


@pytest.mark.parametrize(
    "case", [case if case in IN_TESTS else pytest.param(case, marks=pytest.mark.long) for case in STRIKES]
)
def test_killed_or_stopped_process_ends_job_with_one_record(case: str, tmp_path: Path) -> None:
    ranks, rank, what, number, said = STRIKES[case]
    job = started(tmp_path / "out", "stuck", ranks=ranks)
    try:
        pids = all_there(job, 2 * ranks)
        everyone = job.processes()
        psutil.Process(pids[rank][what]).send_signal(number)
        struck = time.monotonic()
        output = expect_the_contract(job, struck, everyone, within_s=PROMISED_S)
    finally:
        job.end()
    the_record(job, output, says=said, ranks={*range(2 * ranks)} - ({rank} if what == "rank" else set()))


def test_suspended_node_is_reported_and_ends_after_it_continues(tmp_path: Path) -> None:
    job = started(tmp_path / "out", "stuck", ranks=1)
    try:
        pids = all_there(job, 2)
        everyone = job.processes()
        vanished = [psutil.Process(pid) for pid in pids[1].values()]
        for process in vanished:
            process.suspend()
        struck = time.monotonic()
        assert job.launchers[0].wait(PROMISED_S) != 0
        launchers = [psutil.Process(launcher.pid) for launcher in job.launchers if launcher.poll() is None]
        others = [process for process in everyone if process not in [*vanished, *launchers] and process.is_running()]
        assert not wait_gone(others, PROMISED_S), job.fail("the other node is still there")
        for process in vanished:
            process.resume()
        output = expect_the_contract(job, struck, everyone, within_s=2 * PROMISED_S)
    finally:
        job.end()
    the_record(job, output, says=["node 1", "for 5 s", "[GRPO-604]"], ranks=[0, 1])


@pytest.mark.parametrize(
    ("how", "rank"), [("reward", "rank 1"), pytest.param("rewards", "rank ", marks=pytest.mark.long)]
)
def test_hanging_reward_is_reported_with_stacks(how: str, rank: str, tmp_path: Path) -> None:
    job = started(tmp_path / "out", how, ranks=2, nodes=1)
    try:
        all_there(job, 2)
        output = expect_the_contract(job, time.monotonic(), job.processes(), within_s=PROMISED_S)
    finally:
        job.end()
    the_record(job, output, says=[rank, "'reward'", "reward function hangs", "within 2 s", "[GRPO-607]"])
    assert " in hangs\n" in output


def test_torch_timeout_of_collective_names_rank_behind(tmp_path: Path) -> None:
    """And not the one that waited for it."""
    job = started(tmp_path / "out", "behind", ranks=3, nodes=1)
    try:
        all_there(job, 3)
        output = expect_the_contract(job, time.monotonic(), job.processes(), within_s=PROMISED_S)
    finally:
        job.end()
    says = ["node 0", "rank 2, phase 'train'", "rank 2 is behind the others", "[GRPO-620]"]
    record = the_record(job, output, says=says, ranks=[0, 1, 2])
    # Gloo's deadline ends one of the two that wait and closes its connections: either rank's error may be the first.
    assert any(cause in record for cause in ("Timed out waiting", "closed by peer")), record


def test_kill_of_rank_before_rendezvous_ends_waiting_ranks(tmp_path: Path) -> None:
    job = started(tmp_path / "out", "late", ranks=2)
    try:
        pids = all_there(job, 4)
        everyone = job.processes()
        psutil.Process(pids[2]["rank"]).kill()
        output = expect_the_contract(job, time.monotonic(), everyone)
    finally:
        job.end()
    the_record(job, output, says=["node 1", "rank 3", "start", "got SIGTERM", "[GRPO-306]"])


def test_launch_with_failed_rank_before_rendezvous_ends_other_nodes(tmp_path: Path) -> None:
    port = free_port()

    def command(node: int) -> list[str]:
        flags = ["--port", str(port), "--nodes", "127.0.0.1,127.0.0.2", "--node-rank", str(node)]
        flags += ["--launcher", "torchrun", "--ranks-per-node", "1"]
        return [str(BIN / "grpo"), "launch", *flags, str(JOB), str(tmp_path / "out"), str(TIMEOUT_S), "absent"]

    job = start(command, tmp_path / "out", nodes=2, env={"PYTHONPATH": str(ROOT)})
    try:
        other = job.launchers[1].wait(STARTUP_S)
        failed = time.monotonic()
        output = expect_the_contract(job, failed, job.processes())
    finally:
        job.end()
    assert other != 0
    assert output.count("KeyError: 'answer'\n") == 2, job.fail("the mistake is not reported on both nodes")
    assert "(rank 1 on " in output


def test_normal_job_end_prints_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    job = started(tmp_path / "out", "finish", ranks=2)
    try:
        assert job.wait(STARTUP_S) == [0, 0], job.fail("it did not end well")
        reported = all_there(job, 4)
        sentinels = [psutil.Process(each["sentinel"]) for each in reported if psutil.pid_exists(each["sentinel"])]
        assert not wait_gone(sentinels, 10.0)
        assert not job.traces()
        assert "[grpo]" not in job.output()
    finally:
        job.end()
