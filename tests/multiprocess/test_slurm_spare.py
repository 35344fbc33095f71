"""A job on a real Slurm cluster that loses a node and has a spare one: two nodes train, the third waits."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo.ops.train.demo import MODEL
from tests import slurm
from tests.support.launching import BIN
from tests.support.slurm_jobs import STUB, everything_said, submit

ENDS = {"COMPLETED", "FAILED", "TIMEOUT", "CANCELLED"}
REPLACED_S = 90  # from the loss of a node until the next attempt begins: 24 s beside other jobs


@pytest.fixture(scope="module")
def cluster(slurm_is_here: None) -> Iterator[slurm.Slurm]:
    nodes = {"cpu": {"n1": 0, "n2": 0, "n3": 0}, "gpu": {"g1": 8, "g2": 8, "g3": 7}}
    with slurm.cluster(nodes) as running:
        yield running


def submit_stub(
    cluster: slurm.Slurm, tmp_path: Path, *behaviour: str, options: tuple[str, ...] = ("--partition=cpu",)
) -> str:
    programs, output_dir = tmp_path / "bin", tmp_path / "out"
    programs.mkdir()
    (programs / "grpo").write_text(STUB)
    (programs / "grpo").chmod(0o755)
    output_dir.mkdir()
    (output_dir / "behaviour.json").write_text(json.dumps(behaviour))
    options = ("--nodes=3", "--time=30", *options)
    return submit(
        cluster, "train.sbatch", output_dir, [programs, BIN], options=[*options], GRPO_SPARE_NODES="1"
    )  # fmt: skip


def nodes_of(output_dir: Path, attempt: int) -> list[str]:
    launched = [json.loads((output_dir / f"launched.{attempt}.{node}.json").read_text()) for node in (0, 1)]
    return [each["environment"]["SLURMD_NODENAME"] for each in launched]


def await_both(cluster: slurm.Slurm, job: str, output_dir: Path) -> None:
    """Until both nodes of the first attempt run."""

    def are_there() -> bool:
        assert cluster.job(job)["JobState"] in ("PENDING", "RUNNING"), everything_said(output_dir)
        return all((output_dir / f"launched.0.{node}.json").exists() for node in (0, 1))

    cluster.wait_until(are_there, 60, "the job does not start")


def test_spare_node_replaces_unresponsive_node(cluster: slurm.Slurm, tmp_path: Path) -> None:
    """Slurm has not missed it yet, and srun would wait for it."""
    output_dir = tmp_path / "out"
    job = submit_stub(cluster, tmp_path, "silent", "finish")
    await_both(cluster, job, output_dir)
    cluster.lose("n2", is_cut=True)
    try:
        ended = cluster.wait_for_state(job, ENDS, REPLACED_S + 30)
        said = everything_said(output_dir)
        assert (ended["JobState"], ended["Restarts"], ended["NodeList"]) == ("COMPLETED", "0", "n[1,3]"), said
        assert "lost n2: another attempt on n1 n3" in said
        assert [nodes_of(output_dir, attempt) for attempt in (0, 1)] == [["n1", "n2"], ["n1", "n3"]]
    finally:
        cluster.revive("n2")


def test_spare_node_in_no_kill_job_replaces_down_node(cluster: slurm.Slurm, tmp_path: Path) -> None:
    output_dir = tmp_path / "out"
    job = submit_stub(cluster, tmp_path, "wait", "finish", options=("--partition=gpu", "--no-kill"))
    await_both(cluster, job, output_dir)
    cluster.run("scontrol", "update", "nodename=g2", "state=down", "reason=test")
    ended = cluster.wait_for_state(job, ENDS, REPLACED_S + 30)
    said = everything_said(output_dir)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "0"), said
    assert "lost g2: another attempt on g1 g3" in said
    for attempt in (0, 1):
        launched = [json.loads((output_dir / f"launched.{attempt}.{node}.json").read_text()) for node in (0, 1)]
        assert [each["environment"]["CUDA_VISIBLE_DEVICES"] for each in launched] == ["0,1,2,3,4,5,6"] * 2, said


def test_crash_without_blamed_node_requeues_job_on_same_nodes(cluster: slurm.Slurm, tmp_path: Path) -> None:
    output_dir = tmp_path / "out"
    job = submit_stub(cluster, tmp_path, "heal", "finish")
    ended = cluster.wait_for_state(job, ENDS, 180)
    said = everything_said(output_dir)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), said
    assert nodes_of(output_dir, 1) == ["n1", "n2"], said


@pytest.mark.parametrize(("node", "left", "given_back"), [(1, ["n1", "n3"], True), (0, ["n2", "n3"], False)])
def test_spare_node_after_two_blaming_attempts_replaces_host(
    node: int, left: list[str], given_back: bool, cluster: slurm.Slurm, tmp_path: Path
) -> None:
    """It runs, and the batch script may run on it."""
    output_dir = tmp_path / "out"
    job = submit_stub(cluster, tmp_path, f"broken {node}", f"broken {node}", "finish")
    ended = cluster.wait_for_state(job, ENDS, 180)
    said = everything_said(output_dir)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), said
    assert ended["NodeList"] == ("n[1,3]" if given_back else "n[1-3]"), said
    assert "does not shrink" not in said
    assert [nodes_of(output_dir, attempt) for attempt in (0, 1, 2)] == [["n1", "n2"], ["n1", "n2"], left], said


# In every Python that starts: on one node it is as if the engine's GPU were broken.
ENGINE_OF_N2_DIES = """\
import os, sys
if os.environ.get("SLURMD_NODENAME") == "n2" and "grpo.engine.host" in sys.orig_argv:
    sys.stderr.write("CUDA error: uncorrectable ECC error encountered\\n")
    os._exit(1)
"""


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_spare_node_replaces_host_with_failing_engine(cluster: slurm.Slurm, tmp_path: Path) -> None:
    output_dir, programs = tmp_path / "out", tmp_path / "python"
    programs.mkdir()
    (programs / "sitecustomize.py").write_text(ENGINE_OF_N2_DIES)
    job = submit(
        cluster,
        "train.sbatch",
        output_dir,
        [BIN],
        "tests/jobs/lost_node_job.py",
        options=["--partition=cpu", "--nodes=3", "--time=30"],
        PYTHONPATH=str(programs),
        MODEL=str(MODEL),
        GRPO_SPARE_NODES="1",
        GRPO_CONFIG_FILE="configs/cpu.yaml",
        GRPO_RANKS_PER_NODE="1",
        CUDA_VISIBLE_DEVICES="",
    )
    ended = cluster.wait_for_state(job, ENDS, 900)
    said = everything_said(output_dir)
    assert (ended["JobState"], ended["Restarts"], ended["NodeList"]) == ("COMPLETED", "1", "n[1,3]"), said
    assert "lost n2: another attempt on n1 n3" in said
    attempts = json.loads((output_dir / "run.json").read_text())["attempts"]
    blamed = [each["failure"] and (each["failure"]["host"], each["failure"]["kind"]) for each in attempts]
    assert blamed == [("n2", "engine"), ("n2", "engine"), None]
    assert [each["topology"]["hosts"] for each in attempts] == [["n1", "n2"], ["n1", "n2"], ["n1", "n3"]]
    state = json.loads((output_dir / "run_state.json").read_text())
    assert (state["state"], state["step"], state["attempt"]) == ("finished", 6, 2), said


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_training_after_node_loss_continues_on_spare_node(cluster: slurm.Slurm, tmp_path: Path) -> None:
    """Killed in the fourth step, with a checkpoint after the second: no prompt is left out, and none comes twice."""
    output_dir = tmp_path / "out"
    job = submit(
        cluster,
        "train.sbatch",
        output_dir,
        [BIN],
        "tests/jobs/lost_node_job.py",
        options=["--partition=cpu", "--nodes=3", "--time=30"],
        MODEL=str(MODEL),
        GRPO_SPARE_NODES="1",
        GRPO_CONFIG_FILE="configs/cpu.yaml",
        GRPO_RANKS_PER_NODE="1",
        CUDA_VISIBLE_DEVICES="",
    )

    def is_held() -> bool:
        assert cluster.job(job)["JobState"] in ("PENDING", "RUNNING"), everything_said(output_dir)
        return (output_dir / "held").exists()

    def logged_steps() -> list[int]:
        lines = (output_dir / "metrics.jsonl").read_text().split("\n")[:-1]  # without one that is being written
        return [record["step"] for record in map(json.loads, lines) if "reward" in record]

    cluster.wait_until(is_held, 600, "no fourth step")
    cluster.lose("n2")
    lost = time.monotonic()
    try:
        replaced = output_dir / f"replaced_nodes.{job}"
        cluster.wait_until(replaced.exists, REPLACED_S, "the node is not replaced")
        print(f"{time.monotonic() - lost:.0f} s from the loss to the next attempt")
        cluster.wait_until(lambda: 4 in logged_steps(), 600, "no next step")
        print(f"{time.monotonic() - lost:.0f} s from the loss to the next step")
        ended = cluster.wait_for_state(job, ENDS, 300)
        said = everything_said(output_dir)
        assert (ended["JobState"], ended["Restarts"], ended["NodeList"]) == ("COMPLETED", "0", "n[1,3]"), said
        state = json.loads((output_dir / "run_state.json").read_text())
        assert (state["state"], state["step"], state["attempt"]) == ("finished", 6, 1), said
        assert logged_steps() == [1, 2, 3, 4, 5, 6], said
        seen: dict[tuple[int, int], list[str]] = {}
        for rank in (0, 1):
            for line in map(json.loads, (output_dir / f"seen-{rank}.jsonl").read_text().splitlines()):
                prompts = seen.setdefault((line["step"], rank), line["prompts"])
                assert prompts == line["prompts"], "both attempts saw the same in a step"
        assert sorted(seen) == [(step, rank) for step in range(6) for rank in (0, 1)]
        prompts = [prompt for each in seen.values() for prompt in set(each)]
        assert len(prompts) == len(set(prompts)), "none twice"
    finally:
        cluster.revive("n2")
