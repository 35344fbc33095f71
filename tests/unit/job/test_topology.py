"""Placement and launch variables: made-up nodes, no process and no GPU."""

import os
import pickle
import sys
import warnings
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

from grpo.job.agreement import check_nodes
from grpo.job.launch import Launch, accelerate_request, check_accelerate_request, parent_argv, read_launch
from grpo.job.same_everywhere import read_settings
from grpo.job.topology import plan_node, read_topology

EIGHT = tuple(str(i) for i in range(8))


def torchrun_env(rank, world_size, local_world_size, **changes):
    env = {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": rank % local_world_size,
        "LOCAL_WORLD_SIZE": local_world_size,
        "GROUP_RANK": rank // local_world_size,
        "GROUP_WORLD_SIZE": world_size // local_world_size,
    } | changes
    return {name: str(value) for name, value in env.items() if value is not None}


def launch(rank=0, world_size=7, local_world_size=7):
    return read_launch(torchrun_env(rank, world_size, local_world_size))


def plan(launch, devices=EIGHT, *, reserved=None, size=1, engines=None, **kwargs):
    return plan_node(
        launch,
        devices,
        reserved_gpus=reserved,
        tensor_parallel_size=size,
        engines_per_node=engines,
        host=kwargs.pop("host", "n0"),
        **kwargs,
    )


# --- the launcher's variables


def test_no_launcher_is_one_process():
    assert read_launch({"PATH": "/bin", "RANK": ""}) == Launch(
        rank=0, world_size=1, local_rank=0, local_world_size=1, node=0, num_nodes=1, launched=False
    )


@pytest.mark.parametrize("group", [{}, {"GROUP_RANK": None, "GROUP_WORLD_SIZE": None}, {"GROUP_WORLD_SIZE": None}])
def test_torchrun_variables(group):
    assert read_launch(torchrun_env(9, 28, 7, **group)) == Launch(
        rank=9, world_size=28, local_rank=2, local_world_size=7, node=1, num_nodes=4, launched=True
    )


def test_nodes_of_different_size_are_left_to_check_nodes():
    result = read_launch(torchrun_env(9, 15, 7, GROUP_RANK=1, GROUP_WORLD_SIZE=2, LOCAL_RANK=1, LOCAL_WORLD_SIZE=8))
    assert (result.node, result.num_nodes, result.local_world_size) == (1, 2, 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"LOCAL_RANK": None}, "not LOCAL_RANK:"),
        ({"RANK": None, "WORLD_SIZE": None}, "not RANK, WORLD_SIZE:.*deepspeed_multinode_launcher: standard"),
        ({"RANK": "x"}, "RANK must be whole numbers.*RANK=x"),
        ({"WORLD_SIZE": -1}, "WORLD_SIZE must be whole numbers"),
        ({"RANK": 14}, "RANK < WORLD_SIZE"),
        ({"LOCAL_RANK": 7}, "LOCAL_RANK < LOCAL_WORLD_SIZE"),
        ({"LOCAL_WORLD_SIZE": 15}, "LOCAL_WORLD_SIZE must be between 1 and WORLD_SIZE"),
        ({"LOCAL_WORLD_SIZE": 0}, "LOCAL_WORLD_SIZE must be between 1 and WORLD_SIZE"),
        ({"GROUP_RANK": 2}, "2 nodes, of which this is node 2"),
        ({"GROUP_WORLD_SIZE": 1, "GROUP_RANK": 0}, "they give 1 nodes"),
        ({"GROUP_WORLD_SIZE": None, "WORLD_SIZE": 15}, "no multiple of LOCAL_WORLD_SIZE"),
        ({"GROUP_RANK": None, "LOCAL_RANK": 3}, "RANK modulo LOCAL_WORLD_SIZE"),
    ],
)
def test_incomplete_or_contradicting_variables(changes, message):
    with pytest.raises(ValueError, match=message):
        read_launch(torchrun_env(9, 14, 7, **changes))


# --- placement


def test_last_devices_are_reserved():
    node = plan(launch(rank=8, world_size=14))
    assert node.devices == EIGHT
    assert node.reserved_devices == ("7",)
    assert node.engines == (("7",),)
    assert (node.node, node.local_rank, node.is_local_main, node.num_engines) == (1, 1, False, 1)
    assert plan(launch(rank=7, world_size=14)).is_local_main
    assert pickle.loads(pickle.dumps(node)) == node


def test_several_engines_with_tensor_parallel():
    devices = tuple(f"GPU-{c}" for c in "abcdefgh")
    node = plan(launch(0, 4, 4), devices, reserved=4, size=2, engines=2, num_attention_heads=8, num_key_value_heads=1)
    assert node.engines == (("GPU-e", "GPU-f"), ("GPU-g", "GPU-h"))
    assert plan(launch(0, 6, 6), size=2).engines == (("6", "7"),)
    assert plan(launch(0, 4, 4), size=4).engines == (("4", "5", "6", "7"),)


def test_cpu():
    node = plan(launch(0, 2, 2), ())
    assert (node.devices, node.reserved_devices, node.engines) == ((), (), ((),))
    assert plan(launch(0, 2, 2), (), engines=3, size=2, reserved=0).engines == ((), (), ())
    with pytest.raises(ValueError, match="vllm_reserved_gpus is 1, but n0 has no visible GPU"):
        plan(launch(0, 2, 2), (), reserved=1)


def test_the_error_works_out_the_number_to_write():
    with pytest.raises(ValueError, match="4 nodes x 8 GPUs with 1 reserved leave 28 training processes, but") as error:
        plan(launch(0, 32, 8))
    assert "num_processes is 32" in str(error.value)
    assert "write num_processes: 28 in the accelerate config (with torchrun: --nproc_per_node 7)" in str(error.value)


@pytest.mark.parametrize(
    ("ranks", "nodes", "gpus", "kwargs", "message"),
    [
        (8, 1, 8, {"reserved": 2}, "1 node x 8 GPUs with 2 reserved leave 6 .* num_processes: 6 .*--nproc_per_node 6"),
        (7, 2, 8, {"reserved": 2}, "leave 12 training .*--nproc_per_node 6.*, or set vllm_reserved_gpus to 1$"),
        (9, 1, 8, {}, "leave 7 training processes, but num_processes is 9"),
        (7, 1, 8, {"size": 2}, "8 GPUs with 2 reserved leave 6 training"),
        (7, 4, 7, {}, "4 nodes x 7 GPUs with 1 reserved leave 24 .* but num_processes is 28 .*num_processes: 24 "),
        (1, 1, 4, {"reserved": 4}, "4 reserved leave no GPU of n0 to train on: lower vllm_reserved_gpus"),
        (1, 1, 4, {"size": 4}, "lower vllm_tensor_parallel_size"),
        (5, 1, 8, {"size": 2}, "leave 3 of the 8 GPUs of n0.*set vllm_reserved_gpus to 2, or start 6 or 4 processes"),
        (4, 1, 8, {"reserved": 3, "size": 2}, "3 is no multiple of vllm_tensor_parallel_size 2.*to 2 or 4"),
        (4, 1, 8, {"reserved": 1, "size": 2}, "no multiple of vllm_tensor_parallel_size 2.*vllm_reserved_gpus to 2$"),
        (6, 1, 8, {"engines": 1}, "vllm_engines_per_node is 1, but the 2 .* hold 2 engines.*vllm_reserved_gpus to 1$"),
        (7, 1, 8, {"reserved": 0}, "vllm_reserved_gpus is 0"),
        (7, 1, 8, {"reserved": -1}, "vllm_reserved_gpus is -1"),
        (7, 1, 8, {"size": 0}, "vllm_tensor_parallel_size is 0"),
        (7, 1, 8, {"engines": 0}, "vllm_engines_per_node is 0"),
        (2, 1, 0, {"engines": 0}, "vllm_engines_per_node is 0"),
        (1, 1, 1, {}, "1 visible GPU, but two are needed"),
    ],
)
def test_placements_that_cannot_work(ranks, nodes, gpus, kwargs, message):
    with pytest.raises(ValueError, match=message):
        plan(launch(0, ranks * nodes, ranks), EIGHT[:gpus], **kwargs)


@pytest.mark.parametrize(
    ("heads", "kv", "sizes"), [(14, 2, "1 or 2 or 14"), (14, None, "1 or 2 or 7 or 14"), (6, 3, "1 or 3 or 6")]
)
def test_heads_that_tensor_parallel_does_not_divide(heads, kv, sizes):
    with pytest.raises(ValueError, match=f"4 does not fit the model.*to {sizes}$"):
        plan(launch(0, 4, 4), size=4, num_attention_heads=heads, num_key_value_heads=kv)


def test_key_value_heads_are_split_or_copied():
    for kv in (1, 2, 4, 8):
        assert plan(launch(0, 4, 4), size=4, num_attention_heads=32, num_key_value_heads=kv).num_engines == 1
    with pytest.raises(ValueError, match="6 key-value heads"):
        plan(launch(0, 4, 4), size=4, num_attention_heads=12, num_key_value_heads=6)


def test_idle_gpus_warn_once_per_node():
    with pytest.warns(UserWarning, match="3 of the 8 GPUs of n0 stay idle: 4 train and 1 are reserved"):
        node = plan(launch(0, 4, 4), reserved=1)
    assert node.engines == (("7",),)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan(launch(1, 4, 4), reserved=1)
        plan(launch(0, 7, 7))


def test_without_a_launcher():
    alone = read_launch({})
    node = plan(alone, ("3", "5"))
    assert (node.local_world_size, node.engines) == (1, (("5",),))
    with pytest.raises(
        ValueError, match=r"accelerate launch --config_file configs/1node.yaml your_script.py.*two GPUs"
    ):
        plan(alone)
    with pytest.raises(ValueError, match="two are needed"):
        plan(alone, ("0",))
    with pytest.raises(ValueError, match="lower vllm_reserved_gpus"):
        plan(alone, ("0", "1"), reserved=2)
    assert plan(alone, reserved=7).num_engines == 7  # asked for in so many words
    assert plan(alone, ()).num_engines == 1


# --- all nodes together


def job(gpus_per_node=(8, 8, 7, 8), ranks=6):
    world_size = ranks * len(gpus_per_node)
    return [
        plan(launch(rank, world_size, ranks), EIGHT[: gpus_per_node[rank // ranks]], host=f"h{rank // ranks}")
        for rank in range(world_size)
    ]


def test_nodes_may_reserve_different_numbers():
    topologies = job()
    assert [t.num_engines for t in topologies if t.is_local_main] == [2, 2, 1, 2]
    assert [t.reserved_devices for t in topologies if t.is_local_main][2] == ("6",)
    check_nodes(topologies)
    check_nodes([plan(read_launch({}), ())])


def test_two_nodes_on_one_host():
    check_nodes([plan(launch(rank, 4, 2), (), host="same") for rank in range(4)])


def test_ranks_per_node_differ():
    env = {"GROUP_WORLD_SIZE": 2, "WORLD_SIZE": 5}
    launches = [torchrun_env(r, 5, 3, **env) for r in range(3)] + [
        torchrun_env(r, 5, 2, **env, GROUP_RANK=1, LOCAL_RANK=r - 3) for r in (3, 4)
    ]
    topologies = [plan(read_launch(env), (), host="ab"[i > 2]) for i, env in enumerate(launches)]
    with pytest.raises(ValueError, match=r"training processes differs.*node 0 \(host a\): 3, node 1 \(host b\): 2:"):
        check_nodes(topologies)


def change(topologies, ranks, **fields):
    return [replace(t, **fields) if t.rank in ranks else t for t in topologies]


@pytest.mark.parametrize(
    ("ranks", "fields", "message"),
    [
        (range(2, 4), {"tensor_parallel_size": 2}, r"vllm_tensor_parallel_size differs.*\(host h1\): 2:"),
        (range(2, 4), {"num_nodes": 3}, r"num_machines differs.*node 0 \(host h0\): 2, node 1 \(host h1\): 3:"),
        (range(4), {"num_nodes": 3}, r"num_machines is 3 with 2 .*node 0 \(host h0\): 0\|1, node 1 \(host h1\): 0\|1:"),
        (range(2, 4), {"node": 0}, r"the host differs between ranks of one node: node 0 \(host h0\|h1\): h0\|h1:"),
        (range(2, 4), {"node": 0, "host": "h0"}, "num_machines is 2 with 2 .*--machine_rank"),
        ([3], {"local_rank": 0}, r"local ranks came: .*node 1 \(host h1\): 0:"),
        ([3], {"devices": ("7",)}, r"visible GPUs differs between ranks of one node: .*h1\): 0,1,2,3,4,5,6,7\|7:"),
        (range(2, 4), {"devices": ()}, r"some have none: .*node 1 \(host h1\): none:"),
        (
            range(4),
            lambda t: {"node": 1 - t.node, "host": f"h{1 - t.node}"},
            r"rank 0 is local rank 0 of node 1, but ranks must be numbered node by node, 2 on each",
        ),
        ([3], {"rank": 2}, "4 ranks answered, but number 3 on host h1 takes itself for rank 2 of 4"),
        ([3], {"world_size": 8}, "takes itself for rank 3 of 8"),
    ],
)
def test_nodes_that_make_no_job(ranks, fields, message):
    topologies = job((8, 8), ranks=2)
    check_nodes(topologies)
    with pytest.raises(ValueError, match=message):
        check_nodes([t for t in topologies for t in change([t], ranks, **(fields(t) if callable(fields) else fields))])


# --- accelerate's command line


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "nodes.yaml"
    path.write_text("distributed_type: DEEPSPEED\nnum_processes: 30\nnum_machines: 4\nmachine_rank: 0\nuse_cpu: true\n")
    return str(path)


@pytest.fixture(autouse=True)
def no_default_config(monkeypatch, tmp_path):
    import accelerate.commands.config as config_module
    import accelerate.commands.config.config_args as config_args
    import accelerate.commands.launch as launch_module

    for module in (config_module, config_args, launch_module):
        monkeypatch.setattr(module, "default_config_file", str(tmp_path / "default_config.yaml"))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--config_file", "CONFIG"], (30, 4)),
        (["--config_file", "CONFIG", "--num_processes", "28"], (28, 4)),
        (["--config-file=CONFIG", "--num-machines=2", "--machine_rank", "1"], (30, 2)),
        (["--num_processes", "3"], (3, None)),
        (["--num_processes", "6", "--num_machines", "2", "--cpu"], (6, 2)),
        (["--num_machines", "2"], (None, 2)),
    ],
)
def test_accelerate_request_is_what_accelerate_makes_of_it(options, expected, config):
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    arguments = [option.replace("CONFIG", config) for option in options]
    arguments += ["train.py", "--num_processes", "99", "--config_file", "mine"]
    assert accelerate_request(["/usr/bin/python3.12", "/venv/bin/accelerate", "launch", *arguments]) == expected
    theirs, _, _ = _validate_launch_command(launch_command_parser().parse_args(arguments))
    assert (expected[0] or theirs.num_processes, expected[1] or theirs.num_machines) == (
        theirs.num_processes,
        theirs.num_machines,
    )


@pytest.mark.parametrize(
    "command",
    [
        ["accelerate", "launch"],
        ["/venv/bin/accelerate-launch"],
        ["/venv/bin/python", "/venv/bin/accelerate-launch"],
        ["python", "-u", "-X", "dev", "-m", "accelerate.commands.launch"],
        ["python3", "-m", "accelerate.commands.accelerate_cli", "launch"],
    ],
)
def test_forms_of_the_accelerate_command(command):
    assert accelerate_request([*command, "--num_processes", "7", "--num_machines", "2", "train.py"]) == (7, 2)


@pytest.mark.parametrize(
    "command",
    [
        [],
        ["bash", "-c", "accelerate launch --num_processes 7 train.py"],
        ["/venv/bin/python", "/venv/bin/torchrun", "--nproc_per_node", "7", "train.py"],
        ["python", "train.py", "accelerate", "launch", "--num_processes", "7"],
        ["accelerate", "env"],
        ["python"],
        ["accelerate", "launch", "--num_processes", "seven", "train.py"],
    ],
)
def test_other_commands(command, capsys):
    assert accelerate_request(command) == (None, None)
    capsys.readouterr()


def test_default_config_and_lost_config(tmp_path, config):
    (tmp_path / "default_config.yaml").write_text(Path(config).read_text())
    assert accelerate_request(["accelerate", "launch", "train.py"]) == (30, 4)
    assert accelerate_request(["accelerate", "launch", "--cpu", "train.py"]) == (None, None)
    lost = str(tmp_path / "gone.yaml")
    assert accelerate_request(["accelerate", "launch", "--config_file", lost, "--num_machines", "4", "x.py"]) == (
        None,
        4,
    )


def test_floored_num_processes():
    with pytest.raises(ValueError, match=r"30 is no multiple of num_machines 4.*7 processes .* 28 in all.*: 28 or 32 "):
        check_accelerate_request(30, 4, launch(0, 28, 7))
    for request in [(28, 4), (7, 1), (None, None), (None, 4), (30, None)]:
        check_accelerate_request(*request, launch(0, 28, 7))


def test_parent_argv():
    argv = parent_argv()
    assert argv == Path(f"/proc/{os.getppid()}/cmdline").read_text().split("\0")[:-1]


def test_parent_argv_unreadable(monkeypatch):
    monkeypatch.setattr(os, "getppid", lambda: 2**30)
    assert parent_argv() == []


# --- put together


SETTINGS = {"reserved_gpus": None, "tensor_parallel_size": 1, "engines_per_node": None}


def test_read_topology(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    env = torchrun_env(3, 4, 2) | {"CUDA_VISIBLE_DEVICES": "6,MIG,7"}
    with pytest.raises(ValueError, match="sees 3 GPUs"):
        read_topology(use_cpu=False, env=env, **SETTINGS)
    node = read_topology(use_cpu=False, env=env | {"CUDA_VISIBLE_DEVICES": "6,4,7"}, **SETTINGS)
    assert (node.devices, node.engines, node.node, node.local_rank) == (("6", "4", "7"), (("7",),), 1, 1)
    assert node.host == os.uname().nodename
    assert read_topology(use_cpu=True, env=env, **SETTINGS).devices == ()


def test_read_topology_looks_at_accelerate(monkeypatch):
    import grpo.job.topology

    command = [
        sys.executable,
        "/venv/bin/accelerate",
        "launch",
        "--num_processes",
        "30",
        "--num_machines",
        "4",
        "train.py",
    ]
    monkeypatch.setattr(grpo.job.topology, "parent_argv", lambda: command)
    with pytest.raises(ValueError, match="28 or 32"):
        read_topology(use_cpu=True, env=torchrun_env(0, 28, 7), **SETTINGS)
    assert read_topology(use_cpu=True, env={}, **SETTINGS).num_engines == 1


def test_nodes_with_other_versions_or_variables_are_named():
    settings = (("NCCL_P2P_DISABLE", "1"), ("torch", "2.13.0"))
    topologies = change(job((8, 8), ranks=2), range(4), settings=settings)
    check_nodes(topologies)
    message = r"torch: 2\.13\.0 on node 0 \(host h0\); 2\.12\.1 on node 1 \(host h1\)"
    with pytest.raises(ValueError, match=message):
        check_nodes(change(topologies, range(2, 4), settings=(*settings[:1], ("torch", "2.12.1"))))
    with pytest.raises(ValueError, match=r"NCCL_NET: none on node 0 .*; IB on node 1"):
        check_nodes(change(topologies, range(2, 4), settings=(*settings, ("NCCL_NET", "IB"))))


def test_settings_that_are_a_nodes_own_matter_are_not_compared():
    own = {"NCCL_SOCKET_IFNAME": "eth0", "NCCL_DEBUG_FILE": "x", "GLOO_SOCKET_IFNAME": "eth1", "A": "b"}
    own |= {"NCCL_HOSTID": "n1", "NCCL_TOPO_FILE": "/etc/topo-n1.xml"}
    settings = dict(read_settings({**own, "NCCL_NET": "IB"}))
    assert settings["NCCL_NET"] == "IB"
    assert settings["torch"] == version("torch")
    assert not own.keys() & settings.keys()
