"""The line that `grpo launch` becomes, as its launcher reads it."""

import os
from pathlib import Path

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser
from torch.distributed.run import parse_args

from grpo.ops.launch.line import (
    Rendezvous,
    Script,
    accelerate_line,
    check_file,
    in_place_of,
    own_file,
    replaced,
    torchrun_line,
)
from grpo.place.launch import accelerate_request
from tests.support.launching import ROOT

SCRIPT = Script(name="my script.py", arguments=("--learning_rate", "1e-6", "--num_processes", "3"))
FOUR_NODES = ROOT / "configs" / "4node.yaml"


def at(node: int, nodes: int = 2) -> Rendezvous:
    return Rendezvous(ranks_by_node=(6,) * nodes, node_rank=node, head_address="n1", port=12345)


def test_accelerate_line_parses_in_accelerate() -> None:
    line = accelerate_line(SCRIPT, at(1), config_file=str(FOUR_NODES))
    assert line[:2] == ["accelerate", "launch"]
    args = launch_command_parser().parse_args(line[2:])
    assert (args.num_machines, args.num_processes, args.machine_rank) == (2, 12, 1)
    assert (args.main_process_ip, args.main_process_port) == ("n1", 12345)
    assert args.deepspeed_multinode_launcher == "standard"
    assert (args.module, args.training_script) == (True, "grpo.ops.launch.script")
    assert args.training_script_args == ["my script.py", *SCRIPT.arguments]
    assert accelerate_request(line) == (12, 2)


@pytest.mark.parametrize(("on_gpus", "name"), [(True, "1node.yaml"), (False, "cpu.yaml")])
def test_own_file_selects_bundled_config_by_gpus(on_gpus: bool, name: str) -> None:
    """And never the default one that accelerate would find in the home."""
    file = own_file(on_gpus=on_gpus)
    args = launch_command_parser().parse_args(accelerate_line(SCRIPT, at(0, 1), config_file=file)[2:])
    assert Path(args.config_file).resolve() == ROOT / "configs" / name
    assert args.main_process_ip is None


def test_torchrun_line_parses_in_torchrun() -> None:
    module = Script(name="my.package", arguments=("x",), is_module=True)
    args = parse_args(torchrun_line(module, at(1))[1:])
    assert (args.nnodes, args.nproc_per_node, args.node_rank) == ("2", "6", 1)
    assert (args.master_addr, args.master_port) == ("n1", 12345)
    assert (args.module, args.training_script) == (True, "grpo.ops.launch.script")
    assert args.training_script_args == ["-m", "my.package", "x"]


def test_in_place_of_with_uneven_nodes_runs_torchrun_with_accelerate_env(monkeypatch: pytest.MonkeyPatch) -> None:
    """13 is no multiple of 2, and accelerate would start 6 on each."""
    lines = [Rendezvous(ranks_by_node=(7, 6), node_rank=node, head_address="n1", port=12345) for node in (0, 1)]
    assert (lines[0].processes, [each.ranks for each in lines], lines[0].nodes_differ) == (13, [7, 6], True)
    found = [parse_args(torchrun_line(SCRIPT, each)[1:]) for each in lines]
    assert [(args.nnodes, args.nproc_per_node, args.node_rank) for args in found] == [("2", "7", 0), ("2", "6", 1)]
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        monkeypatch.delenv(name)
    for file, precision in (("cpu.yaml", "no"), ("4node.yaml", "bf16")):
        words = accelerate_line(SCRIPT, lines[1], config_file=str(ROOT / "configs" / file))
        line, variables = in_place_of(words, SCRIPT, lines[1])
        assert line == torchrun_line(SCRIPT, lines[1])
        assert {name: value for name, value in variables.items() if name.startswith("ACCELERATE_")} == {
            "ACCELERATE_MIXED_PRECISION": precision,
            "ACCELERATE_CONFIG_DS_FIELDS": "deepspeed_multinode_launcher,zero_stage,zero3_init_flag,"
            "zero3_save_16bit_model,mixed_precision",
            "ACCELERATE_USE_DEEPSPEED": "true",
            "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
            "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true",
            "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true",
        }, file


def test_replaced_lists_overridden_config_values() -> None:
    file = yaml.safe_load(FOUR_NODES.read_text())
    assert replaced(file, at(1)) == ["num_machines: 4", "num_processes: 28"], "and not the hint in the rank's place"
    assert replaced({**file, "main_process_ip": "old-head"}, at(1))[-1] == "main_process_ip: old-head"
    assert replaced({"num_machines": 2, "num_processes": 12}, at(1)) == []


@pytest.mark.parametrize(
    ("file", "launcher", "said"),
    [
        ({"distributed_type": "DEEPSPEED"}, "torchrun", "is a file of accelerate's; torchrun takes DeepSpeed's"),
        ({"zero_optimization": {"stage": 3}}, "accelerate", "has no distributed_type: .* --launcher torchrun"),
        ({"distributed_type": False}, "accelerate", "has distributed_type: False"),
        (
            {"distributed_type": "NO"},
            "accelerate",
            "knows no others and hears no signals; this job has 4: write DEEPSPEED",
        ),
    ],
)
def test_check_file_with_wrong_launcher_config_raises(file: dict, launcher: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_file(file, "x.yaml", launcher=launcher, processes=4)


@pytest.mark.parametrize("name", ["1node.yaml", "4node.yaml", "4node_tp2.yaml", "cpu.yaml"])
def test_check_file_accepts_bundled_configs(name: str) -> None:
    settings = yaml.safe_load(Path(ROOT / "configs" / name).read_text())
    assert check_file(settings, name, launcher="accelerate", processes=28) is None
