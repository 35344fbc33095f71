"""What a run says of itself."""

import io
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from grpo.groups.agreement import knowing
from grpo.place.launch import Launch
from grpo.place.topology import plan_node
from grpo.record.screen import closing_lines, placement_lines, say
from tests.support.made_up_jobs import job

RUN = Path("runs/it")
LONE_NODE = Launch(rank=0, world_size=2, local_rank=0, local_world_size=2, node=0, num_nodes=1)


def lines(launch: Launch, devices: tuple[str, ...], *, size: int = 1) -> list[str]:
    topology = plan_node(
        launch, devices, reserved_gpus=None, tensor_parallel_size=size, engines_per_node=None, host="here"
    )
    return placement_lines(topology, RUN, model="a/model")


def test_placement_lines_without_gpus_name_cpus() -> None:
    assert lines(LONE_NODE, ()) == [
        "1 node; on here: ranks 0-1 and 1 engine on its CPUs",
        "model: a/model; the run's folder: runs/it (the engines' logs: runs/it/logs)",
    ]


def test_placement_lines_with_gpus_name_devices() -> None:
    assert lines(LONE_NODE, ("0", "1", "2", "3"))[0] == "1 node; on here: ranks 0-1 on GPUs 0-1, 2 engines on GPUs 2-3"
    named = lines(LONE_NODE, ("0", "2", "GPU-a", "GPU-b"), size=2)[0]
    assert named == "1 node; on here: ranks 0-1 on GPUs 0, 2, 1 engine on GPUs GPU-a, GPU-b"


def test_placement_lines_with_several_nodes_count_all_ranks() -> None:
    launch = replace(LONE_NODE, world_size=3, local_world_size=1, num_nodes=3)
    assert lines(launch, ("0", "1"))[0] == (
        "3 nodes; on here: rank 0 on GPU 0, 1 engine on GPU 1, and so on the others; 3 ranks in all"
    )


def test_placement_lines_with_uneven_nodes_count_each_node() -> None:
    (first, *_) = knowing(job((8, 7), (7, 6)))
    assert placement_lines(first, RUN, model="m")[0] == (
        "2 nodes; on h0: ranks 0-6 on GPUs 0-6, 1 engine on GPU 7; of all nodes 7 + 6 ranks, 1 + 1 engines"
    )


def test_closing_lines_report_steps_time_and_reward(tmp_path: Path) -> None:
    totals = {"step": 20, "train_runtime": 61.4}
    logs = [{"step": 10, "reward": 0.25}, {"step": 20, "reward": 0.5}, totals]
    (tmp_path / "logs").mkdir()
    where = f"every step's metrics are in {tmp_path}/metrics.jsonl, the engines' logs in {tmp_path}/logs"
    assert closing_lines(logs, tmp_path, first_step=0) == [
        "done: 20 steps in 61 s, reward 0.250 at first, 0.500 at last",
        where,
    ]
    assert closing_lines([totals], tmp_path, first_step=0) == ["done: 20 steps in 61 s", where]
    assert closing_lines([], tmp_path, first_step=0) == [where]
    unrewarded = [{"step": 5, "reward": None}, *logs[:2], {"step": 20, "reward": None}, totals]  # as TRL logs it
    assert closing_lines(unrewarded, tmp_path, first_step=15) == [
        "done: 20 steps, the last 5 of them in 61 s, reward 0.250 at first, 0.500 at last",
        where,
    ]
    (tmp_path / "logs").rmdir()
    assert closing_lines([], tmp_path, first_step=0) == [where.partition(",")[0]]


SPEAKS = """
import sys
from grpo.record.screen import say
{before}
say("first")
say("second")
print("what others print")
sys.stderr.write("went on")
"""


@pytest.mark.parametrize("before", ["", "sys.stdout.close()", "sys.stdout = None"], ids=["pipe", "closed", "none"])
def test_say_with_closed_stdout_raises_nothing(before: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        command = [sys.executable, "-c", SPEAKS.format(before=before)]
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (0, "went on")


def test_say_on_full_disk_drops_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.StringIO):
        is_full = True

        def write(self, text: str) -> int:
            if self.is_full:
                raise OSError(28, "No space left on device")
            return super().write(text)

    screen = Full()
    monkeypatch.setattr(sys, "stdout", screen)
    say("lost")
    screen.is_full = False
    say("heard")
    assert screen.getvalue() == "[grpo] heard\n"
