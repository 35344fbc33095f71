"""What `grpo plan` says first: a verdict; of a model alone, of GPUs by name; and no yes where memory is unknown."""

import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo.ops.plan.gpus import GPUS
from grpo.ops.plan.memory_budget import GIB
from grpo.ops.plan.speed import MEAN_LENGTH, length
from tests.support.launching import ROOT
from tests.support.planned_cluster import LLAMA_8B, Cluster

ONE_NODE = ROOT / "configs" / "1node.yaml"
MOST_LINES = 15
QWEN_30B_A3B = {  # Qwen/Qwen3-30B-A3B: 30.5 B parameters, of which a token passes 3.3 B
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "max_position_embeddings": 40960,
}


def model_folder(cluster: Cluster, model: dict[str, Any]) -> Path:
    return cluster.training(model).parent / "model"


def test_plan_output_starts_with_verdict(cluster: Cluster) -> None:
    long = {"max_completion_length": 7168, "vllm_max_model_length": 8192, "attn_implementation": "flash_attention_2"}
    words = ["--config_file", ONE_NODE, "--config", cluster.training(**long)]
    plan = cluster.read(*words)
    memory, engine, advice = plan["estimates"]["training"], plan["estimates"]["engine"], plan["advice"]
    now = advice["generate_s"] + advice["train_s"]
    then = advice["reserve_generate_s"] + advice["reserve_train_s"]
    expected = (
        f"fits: {memory['peak_bytes'] / GIB:.1f} of 80 GiB on a training GPU, {engine['sequences_at_once']} sequences "
        f"at once on an engine, about {length(now)} a step; reserve {advice['reserve']} instead of 1 would be "
        f"{length(then)}"
    )
    code, out = cluster.plan(*words)
    assert (code, out.splitlines()[0], plan["verdict"]) == (0, expected, expected)
    assert len(out.splitlines()) <= MOST_LINES
    assert "│" not in out
    _, verbose = cluster.plan(*words, "--verbose")
    assert verbose.splitlines()[0] == expected
    assert "│ engine 0 │" in verbose
    assert "one training GPU" in verbose


def test_verdict_with_several_steps_per_generation_divides_seconds(cluster: Cluster) -> None:
    training = cluster.training(steps_per_generation=8)  # 4 micro-batches a step: two steps to a generation
    plan = cluster.read("--config_file", ONE_NODE, "--config", training)
    advice = plan["advice"]
    assert f", about {length((advice['generate_s'] + advice['train_s']) / 2)} a step" in plan["verdict"]


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.001, "less than 0.1 s"), (2.34, "2.3 s"), (599, "599 s"), (900, "15 min")]
)
def test_length_formats_seconds(seconds: float, shown: str) -> None:
    assert length(seconds) == shown


def test_verdict_with_mistake_names_it_before_memory(cluster: Cluster) -> None:
    _, out = cluster.plan("--config_file", ONE_NODE, "--config", cluster.training(reward_funcs=["nowhere.score"]))
    assert out.startswith("cannot work: 1 mistake; by its memory it fits: ")


def test_verdict_with_tiny_step_omits_advice(cluster: Cluster) -> None:
    _, out = cluster.plan("--config_file", ROOT / "configs" / "4node.yaml")  # the demo
    assert out.splitlines()[0].endswith(" sequences at once on an engine, less than 0.1 s a step")
    assert "advice" not in out


def test_verdict_without_gpus_names_host_memory(cluster: Cluster) -> None:
    _, out = cluster.plan("--config_file", ROOT / "configs" / "cpu.yaml")
    assert re.match(r"fits: [\d.]+ GiB of the host's memory in a rank, 256 sequences at once on an engine\n", out), out


# -- a model alone -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["--model", "--model_name_or_path"])
def test_plan_of_model_alone_assumes_zero3_job(cluster: Cluster, option: str) -> None:
    folder = model_folder(cluster, LLAMA_8B)
    plan = cluster.read(option, folder, "--num_machines", "2")
    assert (plan["errors"], plan["memory"]) == ([], "fits")
    assert (plan["launcher"]["num_processes"], plan["estimates"]["sharding"]["stage"]) == (14, 3)
    assert plan["model"]["name"] == str(folder)
    assumed = "; ".join(plan["assumptions"])
    for part in ("no data set, no reward: the model is sized alone", "ZeRO-3 in bfloat16 with 7 ranks on each node"):
        assert part in assumed
    assert cluster.plan(option, folder)[0] == 0


def test_plan_of_model_alone_subtracts_inference_gpus_from_ranks(cluster: Cluster) -> None:
    folder = model_folder(cluster, LLAMA_8B)
    flags = ["--", "--vllm_tensor_parallel_size", "2"]
    assert cluster.read("--model", folder, *flags)["launcher"]["num_processes"] == 6
    plan = cluster.read("--model", folder, "--gpus-per-node", "4", "--", "--vllm_reserved_gpus", "1")
    assert plan["launcher"]["num_processes"] == 3


def test_model_option_overrides_training_file(cluster: Cluster) -> None:
    folder = cluster.folder / "other"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN_30B_A3B))
    plan = cluster.read("--config_file", ONE_NODE, "--config", cluster.training(), "--model", folder)
    assert plan["model"]["num_parameters"] == 30_532_122_624


def test_plan_of_training_file_without_data_fails(cluster: Cluster) -> None:
    (error,) = cluster.read("--config_file", ONE_NODE, "--config", cluster.training(dataset_name=None))["errors"]
    assert "there is no data to train on" in error


# -- GPUs by name ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GPUS)
def test_gpu_option_matches_its_numbers(cluster: Cluster, name: str) -> None:
    words = ["--config_file", ONE_NODE, "--config", cluster.training()]
    gpu, plan = GPUS[name], cluster.read(*words, "--gpu", name)
    assert plan["estimates"]["training"]["capacity_bytes"] == gpu.gib * GIB
    numbers = ["--gpu-memory", f"{gpu.gib}GiB", "--gpu-tflops", gpu.tflops, "--gpu-tbps", gpu.tbps]
    by_numbers = cluster.read(*words, *map(str, numbers))
    assert plan["advice"] == by_numbers["advice"]
    for each in (plan, by_numbers):
        assert not any("--gpu " in line for line in each["assumptions"])
    assert plan["estimates"]["engine"]["max_num_seqs"] == (256 if name in ("a100", "l40s") else 1024)


def test_gpu_numbers_override_gpu_name(cluster: Cluster) -> None:
    words = ["--config_file", ONE_NODE, "--config", cluster.training(), "--gpu", "h100"]
    named, slow = (cluster.read(*words, *more)["advice"] for more in ([], ["--gpu-tflops", "494.5"]))
    assert slow["train_s"] == pytest.approx(2 * named["train_s"])
    assert cluster.read(*words, "--gpu-memory", "40GiB")["estimates"]["training"]["capacity_bytes"] == 40 * GIB


# -- experts -----------------------------------------------------------------------------------------------------------


def test_advice_for_mixture_of_experts_counts_routed_parameters(cluster: Cluster) -> None:
    training = cluster.training(QWEN_30B_A3B, vllm_tensor_parallel_size=2)
    plan = cluster.read("--config_file", cluster.accelerate(4, 24), "--config", training, "--gpu", "h200")
    advice, model = plan["advice"], plan["model"]
    experts = 48 * 128 * 3 * 2048 * 768
    assert (model["expert_parameters"], model["routed_share"]) == (experts, 1 / 16)
    routed = model["num_parameters"] - experts * 15 / 16  # what a token passes
    assert routed == pytest.approx(3.35e9, rel=0.01)
    tokens, passes = 512 + MEAN_LENGTH * 1024, 5
    attention = 2 * 48 * 32 * 128 * tokens
    operations = 6 * 8 * 4 * tokens * passes * (2 * routed + attention)
    assert advice["train_s"] == pytest.approx(operations / (6 * 989e12 * 0.35))
    assert " a step" in plan["verdict"]


# -- the hub -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def silent_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A hub that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr("grpo.ops.plan.hub.HUB_S", 0.5)
        yield


@pytest.mark.usefixtures("silent_hub")
def test_plan_with_silent_hub_waits_once_and_reports_unknown(cluster: Cluster) -> None:
    files = ["--config_file", ONE_NODE, "--config", cluster.training()]
    cluster.read(*files)  # loads what is loaded once
    began = time.monotonic()
    plan = cluster.read(*files, "--model", "nobody/no-such-model")
    assert time.monotonic() - began < 10
    (reason,) = plan["unknown"]
    assert "does not answer within 0.5 s" in reason
    assert (plan["errors"], plan["works"], plan["verdict"]) == ([], False, "unknown: memory is not estimated")


# -- a file that is missing --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["--config", "--config_file"])
def test_plan_with_missing_file_fails_before_loading_trl(option: str) -> None:
    code = (
        "import sys; from grpo.cli import main; code = main(['plan', '--num_processes', '7', *sys.argv[1:]]); "
        "print(code, [name for name in ('trl', 'torch', 'transformers', 'accelerate') if name in sys.modules])"
    )
    command = [sys.executable, "-c", code, option, "nope.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.splitlines() == [
        "cannot work: 1 mistake",
        f"CANNOT WORK: {option} nope.yaml cannot be read: there is no such file in {ROOT}",
        "1 []",
    ]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True, cwd=ROOT)
    plan = json.loads(done.stdout.rpartition("}")[0] + "}")
    assert (plan["works"], plan["verdict"]) == (False, "cannot work: 1 mistake")
