"""What schedulers say of a job's nodes."""

from pathlib import Path

import pytest

from grpo.ops.rendezvous import schedulers
from grpo.ops.rendezvous.schedulers import SchedulerNodes, read_scheduler


def test_read_scheduler_without_scheduler_returns_none() -> None:
    assert read_scheduler({}, "n2") is None
    assert read_scheduler({"MASTER_ADDR": "somewhere"}, "n2") is None, "some sites export it for all shells"


PET = {"PET_MASTER_ADDR": "job-node-0-0.job", "PET_MASTER_PORT": "29500", "PET_NODE_RANK": "1", "PET_NNODES": "3"}
PYTORCH_JOB = {"MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456", "RANK": "1", "WORLD_SIZE": "3"}


@pytest.mark.parametrize(
    ("env", "count", "rank", "address", "port"),
    [
        pytest.param(PET, 3, 1, "job-node-0-0.job", 29500, id="PET"),
        pytest.param({**PET, "PET_NNODES": "3:3"}, 3, 1, "job-node-0-0.job", 29500, id="a-range-of-one-number"),
        pytest.param({**PET, "RANK": "0", "WORLD_SIZE": "24"}, 3, 1, "job-node-0-0.job", 29500, id="PET-counts-more"),
        pytest.param(PYTORCH_JOB, 3, 1, "job-master-0", 23456, id="PyTorchJob"),
        pytest.param(
            {**PYTORCH_JOB, "WORLD_SIZE": "24", "PET_NPROC_PER_NODE": "8"},
            3,
            1,
            "job-master-0",
            23456,
            id="PyTorchJob-that-counts-processes",
        ),
        pytest.param({**PYTORCH_JOB, "PET_NPROC_PER_NODE": "0"}, 3, 1, "job-master-0", 23456, id="reported-elsewhere"),
        pytest.param({**PYTORCH_JOB, "PET_NPROC_PER_NODE": "auto"}, 3, 1, "job-master-0", 23456, id="as-many-as-fit"),
    ],
)
def test_read_scheduler_in_kubeflow_pod_finds_nodes_and_rank(
    env: dict[str, str], count: int, rank: int, address: str, port: int
) -> None:
    reported = read_scheduler(env, "some-pod")
    nodes = tuple(f"node{k}" for k in range(count))
    assert reported == SchedulerNodes(nodes=nodes, rank=rank, head_address=address, port=port)


def test_read_scheduler_in_launched_rank_returns_none() -> None:
    assert read_scheduler({**PYTORCH_JOB, "LOCAL_RANK": "0"}, "n2") is None


def test_read_scheduler_in_single_pod_finds_one_node() -> None:
    pet = {**PET, "PET_NNODES": "1", "PET_NODE_RANK": "0", "JOB_COMPLETION_INDEX": "0"}  # Kubernetes sets it as well
    reported = read_scheduler(pet, "n2")
    assert reported is not None
    assert (reported.nodes, reported.rank) == (("node0",), 0)
    assert read_scheduler({"JOB_COMPLETION_INDEX": "0", "NNODES": "1"}, "grpo-0") == SchedulerNodes(
        nodes=("grpo-0",), rank=0
    )


INDEXED = {"JOB_COMPLETION_INDEX": "2", "NNODES": "4"}


def test_read_scheduler_in_indexed_job_names_all_pods() -> None:
    reported = read_scheduler(INDEXED, "my-run-2.trainers.default.svc.cluster.local")
    assert reported == SchedulerNodes(nodes=tuple(f"my-run-{k}.trainers" for k in range(4)), rank=2)


@pytest.mark.parametrize(
    ("env", "hostname", "said"),
    [
        ({**PET, "PET_NNODES": "1:3"}, "pod", r"PET_NNODES is 1:3, but a job has the same nodes"),
        ({**PET, "PET_NNODES": "three"}, "pod", "PET_NNODES is 'three': it must be a whole number"),
        ({**PET, "PET_NODE_RANK": "3"}, "pod", "PET_NODE_RANK is 3, but there are 3 nodes, counted from 0"),
        ({"MASTER_ADDR": "a", "RANK": "1"}, "pod", "RANK=1 says which node this is, but not how many: set PET_NNODES"),
        ({"JOB_COMPLETION_INDEX": "2"}, "run-2.s", "set the variable NNODES to the Job's `completions`"),
        (INDEXED, "run-1.s", r"called run-1.s, not JOB-2.SERVICE: name the Job's headless service"),
    ],
)
def test_read_scheduler_with_incomplete_variables_names_missing(env: dict[str, str], hostname: str, said: str) -> None:
    with pytest.raises(ValueError, match=said.replace("not how many:", "not how many there are:")):
        read_scheduler(env, hostname)


def test_read_scheduler_in_pod_without_service_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.getfqdn", lambda name: name)
    with pytest.raises(ValueError, match=r"this pod is called run-2, not JOB-2\.SERVICE"):
        read_scheduler(INDEXED, "run-2")


def test_read_scheduler_with_unresolvable_slurm_name_takes_node_addr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "scontrol"
    program.write_text(
        '#!/bin/sh\n[ "$*" = "show node n1" ] && echo "NodeName=n1\n   NodeAddr=192.0.2.7 NodeHostName=n1"'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    slurm = {"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_NODEID": "1", "SLURMD_NODENAME": "n2"}
    monkeypatch.setattr(schedulers, "address_of", lambda name: "")
    assert read_scheduler(slurm, "x") == SchedulerNodes(nodes=("n1", "n2"), rank=1, name="n2", head_address="192.0.2.7")
    monkeypatch.setattr(schedulers, "address_of", lambda name: "192.0.2.9")
    assert read_scheduler(slurm, "x") == SchedulerNodes(nodes=("n1", "n2"), rank=1, name="n2", head_address="n1")
