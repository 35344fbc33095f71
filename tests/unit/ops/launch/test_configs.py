"""Every file in configs/ is read by the code that users run it with."""

import copy
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from accelerate.commands import launch
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_deepspeed_cmd_env
from transformers.integrations import unset_hf_deepspeed_config
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

from grpo import GRPOConfig
from grpo.ops.launch import line
from grpo.ops.launch.line import Rendezvous
from grpo.ops.plan.job import read_launcher
from grpo.ops.train.arguments import DEMO_COMPLETIONS, DEMO_DEFAULTS, demo_defaults, parse_arguments
from grpo.place.launch import Launch
from grpo.place.topology import plan_node
from tests.support.launching import BIN, free_port
from tests.support.made_up_data import RECIPES

ROOT = Path(__file__).parents[4]
CONFIGS = ROOT / "configs"

# file: machines, GPUs of each, reserved of each, tensor parallel, processes
LAYOUTS = {
    "cpu.yaml": (1, 0, 0, 1, 2),
    "2gpus.yaml": (1, 2, 1, 1, 1),
    "1node.yaml": (1, 8, 1, 1, 7),
    "4node.yaml": (4, 8, 1, 1, 28),
    "4node_offload.yaml": (4, 8, 1, 1, 28),
    "4node_tp2.yaml": (4, 8, 2, 2, 24),
}


@pytest.fixture
def no_deepspeed_left(monkeypatch: pytest.MonkeyPatch):
    """Undoes what a DeepSpeed config leaves in transformers and the environment."""
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "false")
    yield
    unset_hf_deepspeed_config()
    AcceleratorState._reset_state(reset_partial_state=True)


def launch_environment(file: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment that `accelerate launch --config_file FILE` gives its ranks."""
    environments = []
    monkeypatch.setattr(
        launch, "deepspeed_launcher", lambda args: environments.append(prepare_deepspeed_cmd_env(args)[1])
    )
    options = ["--config_file", str(file), "--machine_rank", "0", "--main_process_ip", "127.0.0.1"]
    options += ["--main_process_port", str(free_port()), "train.py"]  # its default may be another job's
    launch.launch_command(launch.launch_command_parser().parse_args(options))
    return environments[0]


def test_config_files_are_all_covered():
    assert {file.name for file in CONFIGS.glob("*.yaml")} == set(LAYOUTS)
    assert {file.stem for file in (CONFIGS / "train").iterdir()} == {"chain_sum", "demo", "gsm8k_qwen2.5_7b", *RECIPES}
    assert {file.name for file in CONFIGS.iterdir()} == {*LAYOUTS, "zero3.json", "train"}


@pytest.mark.parametrize("name", LAYOUTS)
def test_launcher_config_matches_layout_in_accelerate(name: str):
    machines, gpus, reserved, _, processes = LAYOUTS[name]
    config = load_config_from_file(str(CONFIGS / name))
    assert isinstance(config, ClusterConfig)
    assert (config.num_machines, config.num_processes) == (machines, processes)
    assert config.num_processes % config.num_machines == 0, "accelerate would floor it without a word"
    assert config.use_cpu == (gpus == 0)
    assert config.mixed_precision == ("bf16" if gpus else "no")
    assert config.distributed_type == DistributedType.DEEPSPEED
    assert config.deepspeed_config == {
        "deepspeed_multinode_launcher": "standard",
        "zero_stage": 3,
        "zero3_init_flag": True,
        "zero3_save_16bit_model": True,
    } | ({"offload_optimizer_device": "cpu"} if "offload" in name else {})
    if gpus:
        assert processes == machines * (gpus - reserved)


@pytest.mark.parametrize("name", [name for name, layout in LAYOUTS.items() if layout[1]])
def test_launcher_config_layout_passes_plan_node(name: str):
    machines, gpus, reserved, tensor_parallel_size, processes = LAYOUTS[name]
    reported = Launch(
        rank=0,
        world_size=processes,
        local_rank=0,
        local_world_size=processes // machines,
        node=0,
        num_nodes=machines,
    )
    topology = plan_node(
        reported,
        host="n0",
        devices=tuple(str(i) for i in range(gpus)),
        reserved_gpus=None,
        tensor_parallel_size=tensor_parallel_size,
        engines_per_node=None,
    )
    assert topology.reserved_devices == tuple(str(i) for i in range(gpus - reserved, gpus))
    assert topology.num_engines == 1


MULTI_NODE = [name for name, layout in LAYOUTS.items() if layout[0] > 1]
WHAT_TO_DO = "--machine_rank K --main_process_ip HEAD [GRPO-301]"


def accelerate_launch(*words: str) -> subprocess.CompletedProcess[str]:
    command = [str(BIN / "accelerate-launch"), *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("name", MULTI_NODE)
def test_multinode_config_without_machine_rank_raises_with_hint(name: str):
    arguments = launch.launch_command_parser().parse_args(["--config_file", str(CONFIGS / name), "train.py"])
    with pytest.raises(ValueError, match=re.escape(WHAT_TO_DO)):
        launch.launch_command(arguments)


def test_accelerate_launch_without_machine_rank_ends_with_hint():
    done = accelerate_launch("--config_file", f"configs/{MULTI_NODE[0]}", "train.py")
    assert done.returncode != 0
    assert WHAT_TO_DO in done.stderr.splitlines()[-1], done.stderr


def test_accelerate_launch_flags_override_hint_in_config(tmp_path: Path):
    script = tmp_path / "show.py"
    script.write_text("import os; print(*(os.environ[n] for n in ('RANK', 'MASTER_ADDR', 'WORLD_SIZE')), flush=True)")
    flags = ["--machine_rank", "0", "--main_process_ip", "127.0.0.1", "--main_process_port", str(free_port())]
    alone = ["--num_machines", "1", "--num_processes", "1"]
    done = accelerate_launch("--config_file", "configs/4node.yaml", *flags, *alone, str(script))
    assert (done.returncode, done.stdout.split()[-3:]) == (0, ["0", "127.0.0.1", "1"]), done.stderr


@pytest.mark.parametrize("name", MULTI_NODE)
def test_replaced_ignores_hint_in_multinode_config(name: str):
    machines, gpus, reserved, *_ = LAYOUTS[name]
    at = Rendezvous(ranks_by_node=(gpus - reserved,) * machines, node_rank=1, head_address="n1", port=29500)
    assert line.replaced(yaml.safe_load((CONFIGS / name).read_text()), at) == []


@pytest.mark.parametrize("name", MULTI_NODE)
def test_read_launcher_reads_multinode_config(name: str):
    machines, *_, processes = LAYOUTS[name]
    planned = read_launcher(str(CONFIGS / name), None, None)
    assert (planned.num_machines, planned.num_processes) == (machines, processes)


@pytest.mark.usefixtures("no_deepspeed_left")
def test_zero3_json_matches_yaml_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    settings = {"output_dir": str(tmp_path), "bf16": True, "use_cpu": True, "report_to": "none"}
    from_json = GRPOConfig(deepspeed=str(CONFIGS / "zero3.json"), **settings)
    json_config = copy.deepcopy(from_json.deepspeed_plugin.deepspeed_config)
    unset_hf_deepspeed_config()

    for key, value in launch_environment(CONFIGS / "4node.yaml", monkeypatch).items():
        if key.startswith("ACCELERATE_"):
            monkeypatch.setenv(key, value)
    from_yaml = GRPOConfig(**settings)
    plugin = from_yaml.deepspeed_plugin
    assert plugin.zero3_init_flag is from_json.deepspeed_plugin.zero3_init_flag is True
    # transformers' Trainer fills an accelerate plugin from the arguments in just this way.
    filled = HfTrainerDeepSpeedConfig(plugin.deepspeed_config)
    filled.trainer_config_process(from_yaml)

    assert json_config["zero_optimization"]["stage"] == 3
    assert json_config["bf16"] == {"enabled": True}
    assert json_config == filled.config


def test_demo_yaml_matches_demo_defaults():
    assert yaml.safe_load((CONFIGS / "train" / "demo.yaml").read_text()) == DEMO_DEFAULTS
    arguments = parse_arguments(["--config", str(CONFIGS / "train" / "demo.yaml")])
    assert arguments.is_demo
    assert arguments.training.learning_rate == DEMO_DEFAULTS["learning_rate"]


@pytest.mark.parametrize(("world_size", "per_rank"), [(1, 256), (2, 128), (7, 32), (24, 8), (28, 8), (64, 8)])
def test_demo_batch_holds_whole_groups_for_any_world_size(world_size: int, per_rank: int):
    defaults = demo_defaults(world_size=world_size)
    assert defaults["per_device_train_batch_size"] == defaults["per_device_eval_batch_size"] == per_rank
    assert per_rank % DEMO_DEFAULTS["num_generations"] == 0
    assert world_size * per_rank <= max(DEMO_COMPLETIONS, 8 * world_size)


@pytest.mark.parametrize("world_size", [7, 28, 24])
def test_gsm8k_recipe_parses_with_valid_batches(world_size: int):
    arguments = parse_arguments(["--config", str(CONFIGS / "train" / "gsm8k_qwen2.5_7b.yaml"), "--use_cpu"])
    training, script = arguments.training, arguments.script
    assert not arguments.is_demo
    assert arguments.model.model_name_or_path == "Qwen/Qwen2.5-7B-Instruct"
    assert script.dataset_columns == {"question": "prompt", "answer": "solution"}
    assert script.system_prompt.endswith(r"\boxed{}.")
    assert (training.use_vllm, training.vllm_mode, training.bf16) == (True, "local", True)
    assert training.completions_per_step % (world_size * training.per_device_train_batch_size) == 0
    assert training.steps_per_generation == training.gradient_accumulation_steps
    assert training.learning_rate == 1e-6
    assert training.completions_per_step % training.num_generations == 0
    assert world_size * training.per_device_eval_batch_size % training.num_generations == 0
    assert training.max_completion_length < training.vllm_max_model_length
