"""What a launcher says: its variables, and accelerate's command line."""

import os
from pathlib import Path

import pytest

from grpo.place.launch import Launch, accelerate_request, check_accelerate_request, parent_argv, read_launch
from tests.support.made_up_jobs import launch, torchrun_env

# --- the launcher's variables


def test_read_launch_without_launcher_is_one_process():
    assert read_launch({"PATH": "/bin", "RANK": ""}) == Launch(
        rank=0, world_size=1, local_rank=0, local_world_size=1, node=0, num_nodes=1, launched=False
    )


@pytest.mark.parametrize("group", [{}, {"GROUP_RANK": None, "GROUP_WORLD_SIZE": None}, {"GROUP_WORLD_SIZE": None}])
def test_read_launch_of_torchrun_variables_gives_ranks_and_nodes(group):
    assert read_launch(torchrun_env(9, 28, 7, **group)) == Launch(
        rank=9, world_size=28, local_rank=2, local_world_size=7, node=1, num_nodes=4, launched=True
    )


def test_read_launch_with_uneven_nodes_accepts_them():
    result = read_launch(torchrun_env(9, 15, 7, GROUP_RANK=1, GROUP_WORLD_SIZE=2, LOCAL_RANK=1, LOCAL_WORLD_SIZE=8))
    assert (result.node, result.num_nodes, result.local_world_size) == (1, 2, 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"LOCAL_RANK": None}, r"not LOCAL_RANK \[GRPO-107\]"),
        ({"RANK": None, "WORLD_SIZE": None}, "not RANK, WORLD_SIZE .*GRPO-107.*deepspeed_multinode_launcher: standard"),
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
def test_read_launch_with_bad_variables_raises(changes, message):
    with pytest.raises(ValueError, match=message):
        read_launch(torchrun_env(9, 14, 7, **changes))


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
def test_accelerate_request_matches_accelerate(options, expected, config):
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
def test_accelerate_request_reads_all_command_forms(command):
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
def test_accelerate_request_of_other_commands_is_none(command, capsys):
    assert accelerate_request(command) == (None, None)
    capsys.readouterr()


def test_accelerate_request_reads_default_config_and_skips_lost_one(tmp_path, config):
    (tmp_path / "default_config.yaml").write_text(Path(config).read_text())
    assert accelerate_request(["accelerate", "launch", "train.py"]) == (30, 4)
    assert accelerate_request(["accelerate", "launch", "--cpu", "train.py"]) == (None, None)
    lost = str(tmp_path / "gone.yaml")
    assert accelerate_request(["accelerate", "launch", "--config_file", lost, "--num_machines", "4", "x.py"]) == (
        None,
        4,
    )


def test_check_accelerate_request_with_floored_processes_raises():
    with pytest.raises(ValueError, match=r"7 processes .* 28 in all \[GRPO-104\].*: 28 or 32 "):
        check_accelerate_request(30, 4, launch(0, 28, 7))
    for request in [(28, 4), (7, 1), (None, None), (None, 4), (30, None)]:
        check_accelerate_request(*request, launch(0, 28, 7))


def test_parent_argv_matches_proc_cmdline():
    argv = parent_argv()
    assert argv == Path(f"/proc/{os.getppid()}/cmdline").read_text().split("\0")[:-1]


def test_parent_argv_when_unreadable_is_empty(monkeypatch):
    monkeypatch.setattr(os, "getppid", lambda: 2**30)
    assert parent_argv() == []
