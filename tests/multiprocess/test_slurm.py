"""The templates in launch/ on a real Slurm cluster: two nodes without GPUs, and two whose GPUs are device files."""

import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo.place.devices import device_tokens
from grpo.place.launch import Launch
from grpo.place.topology import plan_node
from tests import slurm
from tests.support.launching import BIN, ROOT
from tests.support.slurm_jobs import STUB, everything_said, submit


@pytest.fixture(scope="module")
def cluster(slurm_is_here: None) -> Iterator[slurm.Slurm]:
    with slurm.cluster({"cpu": {"n1": 0, "n2": 0}, "gpu": {"g7": 7, "g8": 8}}) as running:
        yield running


def plan(visible: str, *, ranks: int, node: int = 0) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(devices, reserved devices) of a node whose ranks see what Slurm has put into CUDA_VISIBLE_DEVICES."""
    count = len(visible.split(","))  # torch's count, where the devices are real
    reported = Launch(
        rank=node * ranks, world_size=2 * ranks, local_rank=0, local_world_size=ranks, node=node, num_nodes=2
    )
    topology = plan_node(
        reported,
        device_tokens({"CUDA_VISIBLE_DEVICES": visible}, count),
        reserved_gpus=None,
        tensor_parallel_size=1,
        engines_per_node=None,
    )
    return topology.devices, topology.reserved_devices


def test_plan_node_with_slurm_gpus_reserves_last_of_its_share(cluster: slurm.Slurm, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="node configuration is not available"):
        cluster.submit("--partition=gpu", "--nodelist=g7", "--gres=gpu:8", "--wrap=true")
    # Two jobs on one node: another one has its first three GPUs, so ours are called 3 to 7.
    its_output = tmp_path / "other.log"
    printed = ["printenv", "CUDA_VISIBLE_DEVICES"]
    other = cluster.submit(
        *("--partition=gpu", "--nodelist=g8", "--gres=gpu:3", f"--output={its_output}"),
        f"--wrap={' '.join(printed)}; sleep 60",
    )
    try:
        cluster.wait_until(lambda: its_output.exists() and its_output.read_text().endswith("\n"), 60, "it does not run")
        theirs = plan(its_output.read_text().strip(), ranks=2)
        ours = plan(cluster.run("srun", "--partition=gpu", "--nodelist=g8", "--gres=gpu:5", *printed).strip(), ranks=4)
        assert theirs == (("0", "1", "2"), ("2",))
        assert ours == (("3", "4", "5", "6", "7"), ("7",))
    finally:
        cluster.run("scancel", other)


@pytest.fixture(scope="module")
def short_of_time(cluster: slurm.Slurm, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A job of a minute and its folder: it runs on the nodes with GPUs while another test needs those without."""
    folder = tmp_path_factory.mktemp("short")
    programs, output_dir = folder / "bin", folder / "out"
    programs.mkdir()
    (programs / "grpo").write_text(STUB)
    (programs / "grpo").chmod(0o755)
    output_dir.mkdir()
    (output_dir / "behaviour.json").write_text(json.dumps(["wait", "finish"]))
    # Slurm looks at time limits twice a minute, so 30 s before the end of a minute is the next time it looks.
    options = ["--partition=gpu", "--nodes=2", "--time=1", "--signal=B:USR1@30"]
    template, words = "train_torchrun.sbatch", ("--run_name", "two words")
    return submit(cluster, template, output_dir, [programs, BIN], *words, options=options), output_dir


@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("short_of_time")
def test_requeued_slurm_job_after_stop_finishes_remaining_steps(
    cluster: slurm.Slurm, tiny_model: Path, tmp_path: Path
) -> None:
    """A script that reads no arguments, on two nodes with an engine each: asked to stop in the fourth of its six steps,
    it goes on with the fifth, in the folder that the template says."""
    output_dir = tmp_path / "out"
    job = submit(
        cluster,
        "train.sbatch",
        output_dir,
        [BIN],
        "tests/jobs/no_arguments_job.py",
        options=["--partition=cpu", "--nodes=2", "--time=30"],
        MODEL=str(tiny_model),
        GRPO_CONFIG_FILE="configs/cpu.yaml",
        GRPO_RANKS_PER_NODE="1",
        CUDA_VISIBLE_DEVICES="",
    )

    def logged_steps() -> list[int]:
        metrics = output_dir / "metrics.jsonl"
        lines = metrics.read_text().split("\n")[:-1] if metrics.exists() else []  # without one that is being written
        return [record["step"] for record in map(json.loads, lines) if "reward" in record]

    def third_step() -> bool:
        assert cluster.job(job)["JobState"] in ("PENDING", "RUNNING"), everything_said(output_dir)
        return 3 in logged_steps()

    cluster.wait_until(third_step, 600, "no third step")
    cluster.run("scancel", "--batch", "--signal=USR1", job)
    ended = cluster.wait_for_state(job, {"COMPLETED", "FAILED", "TIMEOUT", "CANCELLED"}, 400)
    said = everything_said(output_dir)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), said
    state = json.loads((output_dir / "run_state.json").read_text())
    assert (state["state"], state["step"], state["attempt"], state["job"]) == ("finished", 6, 1, job), said
    assert logged_steps() == [1, 2, 3, 4, 5, 6], said
    assert "goes on after step 4" in said
    assert list(output_dir.glob("*.safetensors")), "the model at the end"
    assert not (ROOT / "runs" / "hard-coded").exists(), "what the script says"
    logs = output_dir / "logs"
    for attempt in (0, 1):
        for node in (0, 1):
            assert (logs / f"train-node{node}.job-{job}.attempt-{attempt}.log").exists(), said
            assert list(logs.glob(f"engine-node{node}-0*attempt-{attempt}*")), said


def test_slurm_job_near_time_limit_stops_and_requeues(cluster: slurm.Slurm, short_of_time: tuple[str, Path]) -> None:
    """Slurm's own signal before the time limit, and an exclusive job that has not asked for its GPUs by number."""
    job, output_dir = short_of_time
    ended = cluster.wait_for_state(job, {"COMPLETED", "FAILED", "TIMEOUT", "CANCELLED"}, 120)
    said = everything_said(output_dir)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), said
    assert "stopped after step 3 to go on later" in said
    assert "training has finished" in said
    launched = {
        (attempt, node): json.loads((output_dir / f"launched.{attempt}.{node}.json").read_text())
        for attempt in (0, 1)
        for node in (0, 1)
    }
    for (attempt, node), record in launched.items():
        assert (record["environment"]["GRPO_JOB"], record["environment"]["GRPO_ATTEMPT"]) == (job, str(attempt))
        assert record["arguments"][-3:] == ["train.py", "--run_name", "two words"]
        # Each sees all GPUs of its node.
        assert record["environment"]["CUDA_VISIBLE_DEVICES"] == ("0,1,2,3,4,5,6", "0,1,2,3,4,5,6,7")[node]


def test_srun_of_launch_starts_two_jobs_on_shared_nodes(cluster: slurm.Slurm, tmp_path: Path) -> None:
    """`srun … grpo launch SCRIPT`, for two jobs that share both nodes."""
    script = ROOT / "tests" / "jobs" / "mistake_job.py"
    jobs = {}
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        words = ["srun", "--ntasks-per-node=1", str(BIN / "grpo"), "launch", "--launcher", "torchrun", str(script)]
        options = ["--partition=cpu", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=2", f"--job-name={name}"]
        log = f"--output={tmp_path / name}/slurm.log"
        wrapped = f"--wrap={shlex.join([*words, str(tmp_path / name)])}"
        jobs[name] = cluster.submit(*options, log, wrapped, env={"CUDA_VISIBLE_DEVICES": ""})
    for name, job in jobs.items():
        ended = cluster.wait_for_state(job, {"COMPLETED", "FAILED", "TIMEOUT", "CANCELLED"}, 240)
        said = (tmp_path / name / "slurm.log").read_text()
        assert ended["JobState"] == "COMPLETED", said
        reported = [json.loads((tmp_path / name / f"{rank}.json").read_text())["reported"] for rank in (0, 1)]
        assert [(each["WORLD_SIZE"], each["GROUP_RANK"]) for each in reported] == [("2", "0"), ("2", "1")]
        assert "node 1 of 2: 1 rank per node (no GPU here), head n1 (" in said


@pytest.mark.usefixtures("slurm_is_here")
def test_slurm_cluster_helper_leaves_no_process_or_folder() -> None:
    with slurm.cluster({"cpu": {"n1": 0}}) as short_lived:
        short_lived.submit("--partition=cpu", "--output=/dev/null", "--wrap=sleep 600")
        # munged, slurmctld, slurmd, the job's shell and its sleep
        short_lived.wait_until(lambda: len(short_lived.processes()) >= 5, 20, "the job does not run")
    assert not short_lived.processes()
    assert not short_lived.folder.exists()
