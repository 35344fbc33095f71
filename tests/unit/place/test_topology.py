"""Placement: made-up nodes, no process and no GPU."""

import os
import pickle
import sys
import warnings

import pytest

from grpo.place.launch import read_launch
from grpo.place.topology import read_topology
from tests.support.made_up_jobs import EIGHT, launch, plan, torchrun_env


def test_topology_reserves_last_devices():
    node = plan(launch(rank=8, world_size=14))
    assert node.devices == EIGHT
    assert node.reserved_devices == ("7",)
    assert node.engines == (("7",),)
    assert (node.node, node.local_rank, node.is_local_main, node.num_engines) == (1, 1, False, 1)
    assert plan(launch(rank=7, world_size=14)).is_local_main
    assert pickle.loads(pickle.dumps(node)) == node


def test_topology_with_tensor_parallel_groups_engine_devices():
    devices = tuple(f"GPU-{c}" for c in "abcdefgh")
    node = plan(launch(0, 4, 4), devices, reserved=4, size=2, engines=2, num_attention_heads=8, num_key_value_heads=1)
    assert node.engines == (("GPU-e", "GPU-f"), ("GPU-g", "GPU-h"))
    assert plan(launch(0, 6, 6), size=2).engines == (("6", "7"),)
    assert plan(launch(0, 4, 4), size=4).engines == (("4", "5", "6", "7"),)


def test_topology_without_gpus_has_engines_without_devices():
    node = plan(launch(0, 2, 2), ())
    assert (node.devices, node.reserved_devices, node.engines) == ((), (), ((),))
    assert plan(launch(0, 2, 2), (), engines=3, size=2, reserved=0).engines == ((), (), ())
    with pytest.raises(ValueError, match="vllm_reserved_gpus is 1, but n0 has no visible GPU"):
        plan(launch(0, 2, 2), (), reserved=1)


def test_topology_with_wrong_process_count_names_right_one():
    with pytest.raises(ValueError, match=r"4 nodes x 8 GPUs with 1 reserved leave 28 .*GRPO-103") as error:
        plan(launch(0, 32, 8))
    assert "num_processes is 32" in str(error.value)
    assert "write num_processes: 28 in the accelerate config (with torchrun: --nproc_per_node 7)" in str(error.value)


@pytest.mark.parametrize(
    ("ranks", "nodes", "gpus", "kwargs", "message"),
    [
        (8, 1, 8, {"reserved": 2}, "1 node x 8 GPUs with 2 reserved leave 6 .* num_processes: 6 .*--nproc_per_node 6"),
        (7, 2, 8, {"reserved": 2}, "leave 12 training .*--nproc_per_node 6.*, or set vllm_reserved_gpus to 1$"),
        (9, 1, 8, {}, "leave 7 .* num_processes is 9 .*GRPO-103"),
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
        (1, 1, 1, {}, "GRPO-102"),
    ],
)
def test_topology_of_impossible_placement_raises(ranks, nodes, gpus, kwargs, message):
    with pytest.raises(ValueError, match=message):
        plan(launch(0, ranks * nodes, ranks), EIGHT[:gpus], **kwargs)


@pytest.mark.parametrize(
    ("heads", "kv", "sizes"), [(14, 2, "1 or 2 or 14"), (14, None, "1 or 2 or 7 or 14"), (6, 3, "1 or 3 or 6")]
)
def test_topology_with_indivisible_heads_names_valid_sizes(heads, kv, sizes):
    with pytest.raises(ValueError, match=f"GRPO-105.*to {sizes}$"):
        plan(launch(0, 4, 4), size=4, num_attention_heads=heads, num_key_value_heads=kv)


def test_topology_with_few_key_value_heads_splits_or_copies_them():
    for kv in (1, 2, 4, 8):
        assert plan(launch(0, 4, 4), size=4, num_attention_heads=32, num_key_value_heads=kv).num_engines == 1
    with pytest.raises(ValueError, match="6 key-value heads"):
        plan(launch(0, 4, 4), size=4, num_attention_heads=12, num_key_value_heads=6)


def test_topology_with_idle_gpus_warns_once_per_node():
    with pytest.warns(UserWarning, match="3 of the 8 GPUs of n0 stay idle: 4 train and 1 are reserved"):
        node = plan(launch(0, 4, 4), reserved=1)
    assert node.engines == (("7",),)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan(launch(1, 4, 4), reserved=1)
        plan(launch(0, 7, 7))


def test_topology_without_launcher_takes_two_gpus_or_raises():
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


# --- put together


SETTINGS = {"reserved_gpus": None, "tensor_parallel_size": 1, "engines_per_node": None}


def test_read_topology_matches_visible_devices_and_rank(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    env = torchrun_env(3, 4, 2) | {"CUDA_VISIBLE_DEVICES": "6,MIG,7"}
    with pytest.raises(ValueError, match="sees 3 GPUs"):
        read_topology(use_cpu=False, env=env, **SETTINGS)
    node = read_topology(use_cpu=False, env=env | {"CUDA_VISIBLE_DEVICES": "6,4,7"}, **SETTINGS)
    assert (node.devices, node.engines, node.node, node.local_rank) == (("6", "4", "7"), (("7",),), 1, 1)
    assert node.host == os.uname().nodename
    assert read_topology(use_cpu=True, env=env, **SETTINGS).devices == ()


def test_read_topology_with_floored_accelerate_request_raises(monkeypatch):
    import grpo.place.topology

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
    monkeypatch.setattr(grpo.place.topology, "parent_argv", lambda: command)
    with pytest.raises(ValueError, match="28 or 32"):
        read_topology(use_cpu=True, env=torchrun_env(0, 28, 7), **SETTINGS)
    assert read_topology(use_cpu=True, env={}, **SETTINGS).num_engines == 1
