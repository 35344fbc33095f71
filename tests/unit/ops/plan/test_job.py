"""`grpo plan` of what its files and flags say of a job, and of what they cannot say."""

from typing import Any

import pytest
import torch

from tests.support.launching import ROOT
from tests.support.planned_cluster import TRAINING, Cluster, lines_of


def test_plan_with_indivisible_groups_suggests_working_numbers(cluster: Cluster) -> None:
    # 7 ranks x 5 x 1 = 35 completions; a group of 8 needs a multiple of 8 on each rank, or 35 in groups of 5 or 7
    training = cluster.training(per_device_train_batch_size=5, gradient_accumulation_steps=1)
    code, out = cluster.plan("--config_file", ROOT / "configs" / "1node.yaml", "--config", training, "--verbose")
    assert code == 1
    assert "generation_batch_size (35) must be divisible by num_generations (8)" in out
    assert "set per_device_train_batch_size to 8, or num_generations to 5 or 7" in out
    assert "│ engine 0 │" in out, "the placement works, so it is shown"
    for right in ({"per_device_train_batch_size": 8}, {"num_generations": 5}, {"num_generations": 7}):
        fixed = cluster.training(**{"per_device_train_batch_size": 5, "gradient_accumulation_steps": 1} | right)
        assert cluster.plan("--config_file", ROOT / "configs" / "1node.yaml", "--config", fixed)[0] == 0


def test_plan_without_training_file_takes_demo(cluster: Cluster) -> None:
    plan = cluster.read("--config_file", ROOT / "configs" / "4node.yaml")
    assert plan["batch"]["generation_completions"] == 28 * 8
    assert plan["model"]["num_parameters"] == 599_104
    states = lines_of(plan["estimates"]["training"])["states"]
    assert states == pytest.approx(16 * 599_104 / 28, rel=1e-2), "the launcher's bf16 counts where the demo has none"
    assert any("the demo" in line for line in plan["assumptions"])


def test_plan_of_torchrun_without_deepspeed_assumes_ddp(cluster: Cluster) -> None:
    plan = cluster.read("--num_processes", "7", "--config", cluster.training())
    assert lines_of(plan["estimates"]["training"])["states"] == 20 * 8_030_261_248
    assert any("under plain DDP" in error for error in plan["errors"])
    flags = ["--", "--deepspeed", str(ROOT / "configs" / "zero3.json")]
    sharded = cluster.read("--num_processes", "7", "--config", cluster.training(), *flags)
    assert lines_of(sharded["estimates"]["training"])["states"] == pytest.approx(16 * 8_030_261_248 / 7, rel=1e-6)


def test_plan_flags_override_files(cluster: Cluster) -> None:
    words = ["--config_file", ROOT / "configs" / "4node.yaml", "--num_machines", "2", "--num_processes", "14"]
    plan = cluster.read(*words, "--", "--num_generations", "4")
    assert (len(plan["nodes"]), plan["batch"]["num_generations"]) == (2, 4)


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
        (["--num_processes", "7", "--", "--vllm_gpus", "4"], "unknown arguments: --vllm_gpus (did you mean"),
        (["--num_processes", "7", "--", "--vllm_sync_backend", "ipc"], "vllm_sync_backend is 'ipc'"),
        (["--num_processes", "7", "--", "--vllm_mode", "colocate"], "only local mode is planned"),
        (["--num_processes", "7", "--", "--deepspeed", "no.json"], "no.json"),
    ],
)
def test_plan_of_unplannable_command_names_reason(cluster: Cluster, words: list[str], message: str) -> None:
    code, out = cluster.plan(*words)
    assert code == 1
    assert message in out


def test_plan_leaves_no_deepspeed_or_distributed_state(cluster: Cluster) -> None:
    from transformers.integrations import is_deepspeed_zero3_enabled

    cluster.plan("--num_processes", "7", "--", "--deepspeed", str(ROOT / "configs" / "zero3.json"))
    assert not is_deepspeed_zero3_enabled()
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"distributed_type": "FSDP"}, "has distributed_type: FSDP, but local mode trains with DeepSpeed, DDP or one"),
        (
            {"parallelism_config": {"parallelism_config_tp_size": 2}},
            "parallelism_config has tp_size 2: ranks that share",
        ),
        ({"num_machines": 0}, "leaves num_processes or num_machines open"),
        ({"deepspeed_config": {"deepspeed_config_file": "no.json"}}, "DeepSpeed configuration no.json cannot be read"),
    ],
)
def test_plan_of_unsupported_accelerate_file_names_reason(
    cluster: Cluster, settings: dict[str, Any], message: str
) -> None:
    settings = {"num_machines": 1, "num_processes": 7} | settings
    code, out = cluster.plan("--config_file", cluster.accelerate(**settings), "--config", cluster.training())
    assert code == 1
    assert message in out


def test_plan_with_missing_inputs_lists_assumptions(cluster: Cluster) -> None:
    """GPUs of a node and their kind, the prompt's length, another optimizer; and what is given is not."""
    training = cluster.training(vllm_max_model_length=None, vllm_reserved_gpus=2, optim="sgd")
    words = ["--num_processes", "6", "--config", training]
    assumed = cluster.read(*words)["assumptions"]
    of_gpus = ("8 GPUs per node (--gpus-per-node)", "GPUs of 80GiB as fast as an A100 (--gpu a100, h100, h200")
    for part in (*of_gpus, "(--prompt-tokens)", "optim is sgd"):
        assert any(part in line for line in assumed), assumed
    reported = cluster.read(*words, "--prompt-tokens", "100", "--gpus-per-node", "8", "--gpu", "a100")
    assert reported["batch"]["sequence_tokens"] == 100 + TRAINING["max_completion_length"]
    assert not any("(--" in line for line in reported["assumptions"])


@pytest.mark.parametrize(
    ("file", "reserved", "fix"),
    [("1node.yaml", 2, "write num_processes: 6"), ("4node.yaml", 3, "write num_processes: 20")],
)
def test_plan_without_gpu_count_assumes_8_per_node(cluster: Cluster, file: str, reserved: int, fix: str) -> None:
    """A node has 8 until somebody says otherwise, whatever ranks and inference GPUs add up to."""
    words = ["--config_file", ROOT / "configs" / file, "--config", cluster.training(vllm_reserved_gpus=reserved)]
    plan = cluster.read(*words)
    (error,) = plan["errors"]
    assert "[GRPO-103]" in error
    assert f"{fix} in the accelerate config" in error
    assert plan["gpus_per_node"] == [8] * (1 if file == "1node.yaml" else 4)
    assert cluster.read(*words, "--gpus-per-node", str(7 + reserved))["errors"] == []


def test_plan_with_use_cpu_places_no_devices(cluster: Cluster) -> None:
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
def test_plan_with_indivisible_generation_or_eval_batch_suggests_size(
    cluster: Cluster, settings: dict[str, Any], advice: str
) -> None:
    code, out = cluster.plan("--config_file", ROOT / "configs" / "1node.yaml", "--config", cluster.training(**settings))
    assert code == 1
    assert advice in out
