"""`grpo plan` against configurations worked out by hand; the cluster is made up, nothing is started."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from grpo.cli import main
from grpo.plan.memory_budget import GIB
from grpo.plan.view import _runs

ROOT = Path(__file__).parents[3]
LLAMA_8B = {  # meta-llama/Llama-3.1-8B: 8,030,261,248 parameters
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
TRAINING = {
    "output_dir": "out",
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 4,
    "num_generations": 8,
    "max_completion_length": 1024,
    "vllm_max_model_length": 1536,
    "report_to": "none",
}


class Cluster:
    """Files for a made-up cluster, and `grpo plan` on them."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.capsys = capsys

    def accelerate(self, num_machines: int, num_processes: int, **settings: Any) -> Path:
        file = self.folder / "accelerate.yaml"
        zero = {"zero_stage": 3, "deepspeed_multinode_launcher": "standard"}
        common = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "DEEPSPEED", "mixed_precision": "bf16"}
        numbers = {"num_machines": num_machines, "num_processes": num_processes}
        file.write_text(yaml.safe_dump({**common, **numbers, "deepspeed_config": zero, **settings}))
        return file

    def training(self, model: dict[str, Any] | None = None, **settings: Any) -> Path:
        folder = self.folder / "model"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(model or LLAMA_8B))
        file = self.folder / "training.yaml"
        file.write_text(yaml.safe_dump({"model_name_or_path": str(folder), **TRAINING, **settings}))
        return file

    def plan(self, *words: str | Path) -> tuple[int, str]:
        """Exit code and standard output."""
        code = main(["plan", *map(str, words)])
        return code, self.capsys.readouterr().out

    def read(self, *words: str | Path) -> dict[str, Any]:
        """The JSON output, whose `works` agrees with the exit code."""
        code, out = self.plan("--json", *words)
        plan = json.loads(out)
        assert plan["works"] == (code == 0)
        assert bool(plan["errors"]) == (code == 1)
        return plan


@pytest.fixture
def cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Cluster:
    return Cluster(tmp_path, capsys)


def lines_of(budget: dict[str, Any]) -> dict[str, int]:
    return {line["key"]: line["num_bytes"] for line in budget["lines"]}


# --- four that work


def test_one_node(cluster: Cluster) -> None:
    plan = cluster.read("--config_file", ROOT / "configs" / "1node.yaml", "--config", cluster.training())
    (node,) = plan["nodes"]
    assert (node["reserved_devices"], node["engines"]) == (["7"], [["7"]])
    assert plan["best_layout"] is None
    batch = plan["batch"]
    # 7 ranks x 8 x 4 accumulated = 224 completions of 28 prompts; 1536 tokens each
    assert (batch["completions_per_step"], batch["generation_completions"], batch["generation_prompts"]) == (
        224,
        224,
        28,
    )
    assert (batch["node_completions"], batch["groups_per_node"], batch["straddles"]) == (224, 28, False)
    assert (batch["steps_per_generation"], batch["optimizer_steps_per_generation"]) == (4, 1)
    assert batch["tokens_per_step"] == 224 * 1536
    assert batch["generated_tokens"] == 224 * 1024
    memory = lines_of(plan["estimates"]["training"])
    assert memory["states"] == pytest.approx(16 * 8_030_261_248 / 7, rel=1e-6)
    assert memory["reduce_bucket"] == 1_000_000_000
    assert memory["persistent"] == 2 * 65 * 4096  # two norms in each layer and the last one
    assert memory["largest_layer"] == 2 * 128256 * 4096  # the embedding; a decoder layer has 218 M
    assert memory["gather_buffers"] == 2 * (10**9 - 128256 * 4096)
    assert not plan["warnings"]


def test_four_nodes_with_an_engine_of_two_gpus(cluster: Cluster) -> None:
    flags = ["--config", cluster.training(), "--", "--vllm_tensor_parallel_size", "2"]
    plan = cluster.read("--config_file", ROOT / "configs" / "4node_tp2.yaml", *flags)
    assert [node["engines"] for node in plan["nodes"]] == [[["6", "7"]]] * 4
    assert [node["rank"] for node in plan["nodes"]] == [0, 6, 12, 18]
    engine = plan["estimates"]["engine"]
    assert engine["weights_bytes"] == 8_030_261_248
    assert engine["kv_bytes_per_token"] == 2 * 32 * 4 * 128 * 2  # 4 of the 8 key-value heads on each GPU
    left = int(80 * GIB * 0.9) - 8_030_261_248 - 3 * GIB
    assert engine["kv_cache_bytes"] == left
    assert engine["sequences_at_once"] == left // (1536 * 2 * 32 * 4 * 128 * 2)


def test_nodes_that_differ(cluster: Cluster) -> None:
    file = cluster.accelerate(4, 24)
    plan = cluster.read("--config_file", file, "--gpus-per-node", "8,8,7,8", "--config", cluster.training())
    assert [len(node["reserved_devices"]) for node in plan["nodes"]] == [2, 2, 1, 2]
    assert plan["best_layout"] == {
        "ranks_per_node": 6,
        "num_processes": 24,
        "vllm_reserved_gpus": None,
        "reserved": [2, 2, 1, 2],
        "idle": [0, 0, 0, 0],
    }
    assert plan["batch"]["engine_completions"] == [96, 96, 192, 96]
    assert any("node 2 has the fewest engines" in warning for warning in plan["warnings"])
    _, out = cluster.plan("--config_file", file, "--gpus-per-node", "8,8,7,8", "--config", cluster.training())
    assert "node 2 (1 of 4)" in out
    assert "node 0, 1, 3 (3 of 4)" in out
    assert "least waste: 6 ranks per node (num_processes: 24)" in out


def test_sixty_four_nodes(cluster: Cluster) -> None:
    plan = cluster.read(
        "--config_file", cluster.accelerate(64, 448), "--config", cluster.training(per_device_train_batch_size=9)
    )
    assert len(plan["nodes"]) == 64
    assert plan["nodes"][63]["rank"] == 441
    batch = plan["batch"]
    # a node has 7 x 9 x 4 = 252 completions: 31 groups of 8 and a half
    assert (batch["node_completions"], batch["groups_per_node"], batch["straddles"]) == (252, 31.5, True)
    memory = lines_of(plan["estimates"]["training"])
    assert memory["states"] == pytest.approx(16 * 8_030_261_248 / 448, rel=1e-4)
    assert [cost["num_nodes"] for cost in plan["estimates"]["push"]] == [1, 2, 4, 8, 16, 32, 64]
    _, out = cluster.plan("--config_file", cluster.accelerate(64, 448), "--config", cluster.training())
    assert "64 nodes: 512 GPUs = 448 ranks + 64 reserved; 64 engines of 1 GPU" in out
    assert len(out.splitlines()) < 100  # one picture, not 64


# --- four that cannot work


def test_processes_that_do_not_divide(cluster: Cluster) -> None:
    code, out = cluster.plan("--config_file", cluster.accelerate(4, 30), "--config", cluster.training())
    assert code == 1
    assert "num_processes 30 is no multiple of num_machines 4" in out
    assert "write num_processes: 28 or 32" in out
    assert "least waste: 7 ranks per node (num_processes: 28)" in out


def test_a_rank_on_every_gpu(cluster: Cluster) -> None:
    code, out = cluster.plan("--config_file", cluster.accelerate(4, 32), "--config", cluster.training())
    assert code == 1
    assert "4 nodes x 8 GPUs with 1 reserved leave 28 training processes, but num_processes is 32" in out
    assert "write num_processes: 28" in out


def test_groups_that_do_not_divide(cluster: Cluster) -> None:
    # 7 ranks x 5 x 1 = 35 completions; a group of 8 needs a multiple of 8 on each rank, or 35 in groups of 5 or 7
    training = cluster.training(per_device_train_batch_size=5, gradient_accumulation_steps=1)
    code, out = cluster.plan("--config_file", ROOT / "configs" / "1node.yaml", "--config", training)
    assert code == 1
    assert "generation_batch_size (35) must be divisible by num_generations (8)" in out
    assert "set per_device_train_batch_size to 8, or num_generations to 5 or 7" in out
    assert "│ engine 0 │" in out, "the placement works, so it is shown"
    for right in ({"per_device_train_batch_size": 8}, {"num_generations": 5}, {"num_generations": 7}):
        fixed = cluster.training(**{"per_device_train_batch_size": 5, "gradient_accumulation_steps": 1} | right)
        assert cluster.plan("--config_file", ROOT / "configs" / "1node.yaml", "--config", fixed)[0] == 0


def test_heads_that_do_not_divide(cluster: Cluster) -> None:
    training = cluster.training(vllm_tensor_parallel_size=3)
    code, out = cluster.plan("--config_file", cluster.accelerate(1, 5), "--config", training)
    assert code == 1
    assert "vllm_tensor_parallel_size 3 does not fit the model: it must divide the 32 attention heads" in out


# --- what an estimate refuses, and what it only warns of


def test_weights_that_no_engine_can_hold(cluster: Cluster) -> None:
    big = LLAMA_8B | {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    }
    training = cluster.training(big | {"num_attention_heads": 64})  # Llama 70B: 141 GB of weights in bfloat16
    plan = cluster.read("--config_file", cluster.accelerate(8, 56), "--config", training)
    (error,) = plan["errors"]
    assert "an engine's weights alone take 131 GiB of each of its 1 GPUs" in error
    assert "set vllm_tensor_parallel_size to 2 or 4" in error


def test_states_that_no_gpu_can_hold(cluster: Cluster) -> None:
    files = ["--config_file", ROOT / "configs" / "1node.yaml", "--config", cluster.training()]
    (error,) = cluster.read(*files, "--gpu-memory", "16GiB", "--", "--vllm_tensor_parallel_size", "1")["errors"][:1]
    assert "by estimate the states alone take 17.1 GiB" in error
    # 16 B x 8.03 B parameters over what a GPU has beside the bucket of 1 GB and the norms
    ranks = -(-16 * 8_030_261_248 // (16 * GIB - 10**9 - 2 * 65 * 4096))
    assert f"use {ranks} ranks at least, or set offload_optimizer_device: cpu" in error


def test_a_shortfall_of_the_estimate_is_a_warning(cluster: Cluster) -> None:
    training = cluster.training(per_device_train_batch_size=32, gradient_checkpointing=False)
    code, out = cluster.plan("--config_file", ROOT / "configs" / "1node.yaml", "--config", training)
    assert code == 0
    assert "WARNING: a training GPU has 80.0 GiB, and the estimate is" in out
    assert "set gradient_checkpointing: true" in out


def test_a_push_needs_room_beside_vllm(cluster: Cluster) -> None:
    training = cluster.training(vllm_gpu_memory_utilization=0.99)
    plan = cluster.read("--config_file", ROOT / "configs" / "1node.yaml", "--config", training)
    assert any("a push needs 1.96 GiB on an engine's GPU" in warning for warning in plan["warnings"])


def test_host_memory_with_offload_and_several_engines(cluster: Cluster) -> None:
    zero = {"zero_stage": 3, "offload_optimizer_device": "cpu", "offload_param_device": "none"}
    file = cluster.accelerate(1, 4, deepspeed_config=zero)
    plan = cluster.read("--config_file", file, "--config", cluster.training(), "--host-memory", "100GiB")
    host = lines_of(plan["estimates"]["host"])
    # bfloat16 gradient 2, master 4, Adam 8, float32 gradient 4: 18 B of each parameter, all of them on this node
    assert host["offload"] == pytest.approx(18 * 8_030_261_248, rel=1e-6)
    assert host["engines"] == 4 * 2 * 3 * GIB  # four engines, two processes each
    assert lines_of(plan["estimates"]["training"])["states"] == pytest.approx(2 * 8_030_261_248 / 4, rel=1e-6)
    assert any("of host memory" in warning for warning in plan["warnings"])


def test_reference_and_reward_models(cluster: Cluster) -> None:
    training = cluster.training(beta=0.04, reward_model_name_or_path=str(cluster.folder / "model"))
    plan = cluster.read("--config_file", ROOT / "configs" / "1node.yaml", "--config", training)
    memory = lines_of(plan["estimates"]["training"])
    assert memory["reference"] == -(-8_030_261_248 // 7) * 2
    scorer = 8_030_261_248 - 128256 * 4096 + 4096  # one label in place of the language head
    assert memory["reward"] == -(-scorer // 7) * 2


# --- files and flags


def test_without_a_training_file_it_is_the_demo(cluster: Cluster) -> None:
    plan = cluster.read("--config_file", ROOT / "configs" / "4node.yaml")
    assert plan["batch"]["generation_completions"] == 28 * 8
    assert plan["model"]["num_parameters"] == 599_104
    states = lines_of(plan["estimates"]["training"])["states"]
    assert states == pytest.approx(16 * 599_104 / 28, rel=1e-2), "the launcher's bf16 counts where the demo has none"
    assert any("train.py's demo" in line for line in plan["assumptions"])


def test_without_gpus(cluster: Cluster) -> None:
    plan = cluster.read("--config_file", ROOT / "configs" / "cpu.yaml")
    (node,) = plan["nodes"]
    assert (node["devices"], node["engines"], node["local_world_size"]) == ([], [[]], 2)
    assert plan["estimates"]["training"]["capacity_bytes"] is None
    assert plan["estimates"]["engine"]["kv_cache_bytes"] == GIB
    assert lines_of(plan["estimates"]["host"]).keys() >= {"cpu_ranks", "cpu_engines", "shared_buffer"}
    code, out = cluster.plan("--config_file", ROOT / "configs" / "cpu.yaml")
    assert code == 0
    assert "1 node without GPUs: 2 ranks, 1 engine on each" in out


def test_torchrun_without_deepspeed_is_ddp(cluster: Cluster) -> None:
    plan = cluster.read("--num_processes", "7", "--config", cluster.training())
    assert lines_of(plan["estimates"]["training"])["states"] == 16 * 8_030_261_248
    assert any("under plain DDP" in warning for warning in plan["warnings"])
    flags = ["--", "--deepspeed", str(ROOT / "configs" / "zero3.json")]
    sharded = cluster.read("--num_processes", "7", "--config", cluster.training(), *flags)
    assert lines_of(sharded["estimates"]["training"])["states"] == pytest.approx(16 * 8_030_261_248 / 7, rel=1e-6)


def test_flags_go_before_the_file(cluster: Cluster) -> None:
    words = ["--config_file", ROOT / "configs" / "4node.yaml", "--num_machines", "2", "--num_processes", "14"]
    plan = cluster.read(*words, "--", "--num_generations", "4")
    assert (len(plan["nodes"]), plan["batch"]["num_generations"]) == (2, 4)


def test_a_model_that_cannot_be_reached(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    training = cluster.training(model_name_or_path="nobody/no-such-model")
    code, out = cluster.plan("--config_file", ROOT / "configs" / "4node.yaml", "--config", training)
    assert code == 1
    assert "model_name_or_path is 'nobody/no-such-model', whose configuration cannot be read" in out
    assert "give a local folder" in out
    assert "4 nodes: 32 GPUs = 28 ranks + 4 reserved" in out
    assert "on each node: 224 completions" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "there is nothing to plan: give --config_file FILE"),
        (["--config_file", "no.yaml"], "--config_file no.yaml cannot be read"),
        (["--num_processes", "7", "--config", "no.yaml"], "--config no.yaml cannot be read"),
        (
            ["--num_processes", "7", "--gpus-per-node", "8,8"],
            "names 2 nodes, but num_machines is 1",
        ),
        (["--num_processes", "7", "--", "--vllm_gpus", "4"], "'--vllm_gpus', '4'"),
        (["--num_processes", "7", "--", "--vllm_sync_backend", "ipc"], "vllm_sync_backend is 'ipc'"),
        (["--num_processes", "7", "--", "--vllm_mode", "colocate"], "only local mode is planned"),
        (["--num_processes", "7", "--", "--deepspeed", "no.json"], "no.json"),
    ],
)
def test_what_cannot_be_planned_says_why(cluster: Cluster, words: list[str], message: str) -> None:
    code, out = cluster.plan(*words)
    assert code == 1
    assert message in out


@pytest.mark.parametrize(
    "words", [["--gpu-memory", "80"], ["--gpus-per-node", "8,x"], ["--network-gbps", "-1"], ["--network-gbps", "x"]]
)
def test_a_command_line_that_cannot_be_read_is_exit_code_2(cluster: Cluster, words: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cluster.plan("--num_processes", "7", *words)
    assert caught.value.code == 2


def test_planning_leaves_the_process_as_it_was(cluster: Cluster) -> None:
    from transformers.integrations import is_deepspeed_zero3_enabled

    cluster.plan("--num_processes", "7", "--", "--deepspeed", str(ROOT / "configs" / "zero3.json"))
    assert not is_deepspeed_zero3_enabled()
    assert not torch.distributed.is_initialized()


def test_the_command_line_is_light() -> None:
    code = (
        "import sys, torch, time; begun = time.perf_counter(); import grpo.plan.command; "
        "print(time.perf_counter() - begun, 'vllm' in sys.modules, 'deepspeed' in sys.modules, 'trl' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    seconds, *loaded = result.stdout.split()
    assert float(seconds) < 3
    assert loaded == ["False"] * 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"distributed_type": "FSDP"}, "has distributed_type: FSDP, but local mode trains with DeepSpeed, DDP or one"),
        ({"num_machines": 0}, "leaves num_processes or num_machines open"),
        ({"deepspeed_config": {"deepspeed_config_file": "no.json"}}, "DeepSpeed configuration no.json cannot be read"),
    ],
)
def test_an_accelerate_file_that_cannot_be_planned(cluster: Cluster, settings: dict[str, Any], message: str) -> None:
    settings = {"num_machines": 1, "num_processes": 7} | settings
    code, out = cluster.plan("--config_file", cluster.accelerate(**settings), "--config", cluster.training())
    assert code == 1
    assert message in out


def test_what_is_not_told_is_assumed_aloud(cluster: Cluster) -> None:
    """GPUs from the reserved ones, the prompt's length, another optimizer; and what is told is not."""
    training = cluster.training(vllm_max_model_length=None, vllm_reserved_gpus=2, optim="sgd")
    words = ["--num_processes", "6", "--config", training]
    assumed = cluster.read(*words)["assumptions"]
    for part in ("8 GPUs per node: the ranks and vllm_reserved_gpus", "(--prompt-tokens)", "optim is sgd"):
        assert any(part in line for line in assumed), assumed
    told = cluster.read(*words, "--prompt-tokens", "100", "--gpus-per-node", "8", "--network-gbps", "400")
    assert told["batch"]["sequence_tokens"] == 100 + TRAINING["max_completion_length"]
    assert not any("--prompt-tokens" in line or "--gpus-per-node" in line for line in told["assumptions"])


def test_the_training_file_may_ask_for_cpus(cluster: Cluster) -> None:
    plan = cluster.read("--num_processes", "2", "--", "--use_cpu", "--bf16", "False")
    assert plan["nodes"][0]["devices"] == []


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({"generation_batch_size": 60}, "set generation_batch_size to 56 or 112"),
        (
            {"eval_strategy": "steps", "eval_steps": 5, "per_device_eval_batch_size": 3},
            "set per_device_eval_batch_size to 8",
        ),
    ],
)
def test_other_batches_that_do_not_divide(cluster: Cluster, settings: dict[str, Any], advice: str) -> None:
    code, out = cluster.plan("--config_file", ROOT / "configs" / "1node.yaml", "--config", cluster.training(**settings))
    assert code == 1
    assert advice in out


def test_many_equal_engines_are_shown_once() -> None:
    assert _runs((1,) * 64) == "1 x 64"
    assert _runs((2, 2, 1, 2)) == "2, 2, 1, 2"
