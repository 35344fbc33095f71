"""`grpo plan` against configurations worked out by hand; the cluster is made up, nothing is started."""

import subprocess
import sys

import pytest

from grpo.ops.plan.memory_budget import GIB
from tests.support.launching import ROOT
from tests.support.planned_cluster import Cluster, lines_of


def test_plan_of_one_node_matches_hand_calculation(cluster: Cluster) -> None:
    plan = cluster.read("--config_file", ROOT / "configs" / "1node.yaml", "--config", cluster.training())
    (node,) = plan["nodes"]
    assert (node["reserved_devices"], node["engines"]) == (["7"], [["7"]])
    batch = plan["batch"]
    # 7 ranks x 8 x 4 accumulated = 224 completions of 28 prompts; 1536 tokens each
    assert (batch["completions_per_step"], batch["generation_completions"], batch["generation_prompts"]) == (
        224,
        224,
        28,
    )
    assert (batch["node_completions"], batch["straddles"]) == ([224], False)
    assert (batch["steps_per_generation"], batch["optimizer_steps_per_generation"]) == (4, 1)
    assert batch["tokens_per_step"] == 224 * 1536
    memory = lines_of(plan["estimates"]["training"])
    assert memory["states"] == pytest.approx(16 * 8_030_261_248 / 7, rel=1e-6)
    assert memory["reduce_bucket"] == 1_000_000_000
    assert memory["persistent"] == 2 * 65 * 4096  # two norms in each layer and the last one
    assert memory["largest_layer"] == 2 * 128256 * 4096  # the embedding; a decoder layer has 218 M
    assert memory["gather_buffers"] == 2 * (10**9 - 128256 * 4096)
    assert not plan["warnings"]


def test_plan_of_four_nodes_with_tp2_engines_matches_hand_calculation(cluster: Cluster) -> None:
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


def test_plan_with_uneven_gpus_balances_engines(cluster: Cluster) -> None:
    file = cluster.accelerate(4, 24)
    plan = cluster.read("--config_file", file, "--gpus-per-node", "8,8,7,8", "--config", cluster.training())
    assert [len(node["reserved_devices"]) for node in plan["nodes"]] == [2, 2, 1, 2]
    assert plan["batch"]["node_samples"] == [192] * 4
    assert plan["batch"]["engine_completions"] == [110] * 4, "768 for seven engines"
    assert not plan["warnings"]
    stay = ["--config", cluster.training(vllm_balance_nodes=False)]
    stayed = cluster.read("--config_file", file, "--gpus-per-node", "8,8,7,8", *stay)
    assert stayed["batch"]["engine_completions"] == [96, 96, 192, 96]
    assert any("vllm_balance_nodes is False: the others wait" in warning for warning in stayed["warnings"])
    files = ["--config_file", file, "--config", cluster.training()]
    _, out = cluster.plan(*files, "--gpus-per-node", "8,8,7,8", "--verbose")
    assert "node 2 (1 of 4)" in out
    assert "node 0, 1, 3 (3 of 4)" in out


def test_plan_with_uneven_ranks_per_node_matches_hand_calculation(cluster: Cluster) -> None:
    """7 + 7 + 6 + 7 ranks x 8 x 4 accumulated are 864 completions; four engines sample 216 each."""
    words = ["--config_file", cluster.accelerate(4, 28), "--gpus-per-node", "8,8,7,8", "--config", cluster.training()]
    broken = cluster.read(*words)
    assert any("GRPO-103" in error for error in broken["errors"]), "28 ranks are seven on each"
    plan = cluster.read(*words, "--ranks-per-node", "7,7,6,7")
    assert [node["rank"] for node in plan["nodes"]] == [0, 7, 14, 20]
    assert [node["local_world_size"] for node in plan["nodes"]] == [7, 7, 6, 7]
    assert [node["engines"] for node in plan["nodes"]] == [[["7"]], [["7"]], [["6"]], [["7"]]]
    batch = plan["batch"]
    assert (batch["generation_completions"], batch["node_completions"]) == (864, [224, 224, 192, 224])
    assert (batch["engine_completions"], batch["straddles"]) == ([216] * 4, False)
    assert lines_of(plan["estimates"]["training"])["states"] == pytest.approx(16 * 8_030_261_248 / 27, rel=1e-4)
    assert plan["advice"] is None
    _, out = cluster.plan(*words, "--ranks-per-node", "7,7,6,7", "--verbose")
    assert "on each node: 224 + 224 + 192 + 224 completions = 28 + 28 + 24 + 28 groups of 8" in out
    assert "4 nodes: 31 GPUs = 27 ranks + 4 reserved; 4 engines" in out
    assert cluster.read(*words, "--ranks-per-node", "6")["batch"]["node_completions"] == [192] * 4
    # a model alone is sized as `grpo launch` would place it
    alone = cluster.read("--model", cluster.folder / "model", "--gpus-per-node", "8,7")
    assert [node["local_world_size"] for node in alone["nodes"]] == [7, 6]
    assert any("7,6 ranks on each node" in assumed for assumed in alone["assumptions"])
    more = ["--num_machines", "4", "--ranks-per-node"]
    for wrong in ([*more, "7,6"], [*more, "7", "--num_processes", "28"]):
        assert any("num_machines is 4: give one number" in error for error in cluster.read(*words, *wrong)["errors"])


def test_plan_with_uneven_ranks_and_indivisible_batch_suggests_size(cluster: Cluster) -> None:
    words = ["--config_file", cluster.accelerate(2, 14), "--ranks-per-node", "7,6", "--gpus-per-node", "8,7"]
    settings = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    (error,) = cluster.read(*words, "--config", cluster.training(**settings))["errors"]
    assert "set per_device_train_batch_size to 8" in error


def test_plan_of_demo_with_dtype_auto_estimates_states(cluster: Cluster) -> None:
    """Its model is made when it starts: nothing can be asked by its name."""
    plan = cluster.read("--num_processes", "1", "--gpus-per-node", "2", "--", "--dtype", "auto", "--bf16", "False")
    assert lines_of(plan["estimates"]["training"])["states"] > 0
    assert not plan.get("errors")


def test_plan_of_64_nodes_matches_hand_calculation(cluster: Cluster) -> None:
    plan = cluster.read(
        "--config_file", cluster.accelerate(64, 448), "--config", cluster.training(per_device_train_batch_size=9)
    )
    assert len(plan["nodes"]) == 64
    assert plan["nodes"][63]["rank"] == 441
    batch = plan["batch"]
    # a node has 7 x 9 x 4 = 252 completions: 31 groups of 8 and a half
    assert (batch["node_completions"], batch["straddles"]) == ([252] * 64, True)
    memory = lines_of(plan["estimates"]["training"])
    assert memory["states"] == pytest.approx(16 * 8_030_261_248 / 448, rel=1e-4)
    sync = plan["estimates"]["sync"]
    assert sync["gathered_bytes_per_node"] == sync["engine_bytes"] == 2 * 8_030_261_248
    assert sync["network_bytes_per_node"] == 2 * 8_030_261_248 * 63 // 64
    _, out = cluster.plan("--config_file", cluster.accelerate(64, 448), "--config", cluster.training(), "--verbose")
    assert "64 nodes: 512 GPUs = 448 ranks + 64 reserved; 64 engines of 1 GPU" in out
    assert (
        "a weight sync: 15.0 GiB gathered in each node, 14.7 GiB into each node over the network, 15.0 GiB to " in out
    )
    assert len(out.splitlines()) < 100  # one picture, not 64


def test_plan_with_indivisible_num_processes_suggests_numbers(cluster: Cluster) -> None:
    code, out = cluster.plan("--config_file", cluster.accelerate(4, 30), "--config", cluster.training())
    assert code == 1
    assert "[GRPO-104]" in out
    assert "write num_processes: 28 or 32" in out


def test_plan_with_rank_on_every_gpu_fails(cluster: Cluster) -> None:
    code, out = cluster.plan("--config_file", cluster.accelerate(4, 32), "--config", cluster.training())
    assert code == 1
    assert "[GRPO-103]" in out
    assert "write num_processes: 28" in out


def test_plan_with_indivisible_attention_heads_fails(cluster: Cluster) -> None:
    training = cluster.training(vllm_tensor_parallel_size=3)
    code, out = cluster.plan("--config_file", cluster.accelerate(1, 5), "--config", training)
    assert code == 1
    assert "[GRPO-105]" in out
    assert "the 32 attention heads" in out


def test_plan_with_reference_and_reward_model_counts_their_shards(cluster: Cluster) -> None:
    training = cluster.training(beta=0.04, reward_model_name_or_path=str(cluster.folder / "model"))
    plan = cluster.read("--config_file", ROOT / "configs" / "1node.yaml", "--config", training)
    memory = lines_of(plan["estimates"]["training"])
    assert memory["reference"] == -(-8_030_261_248 // 7) * 2
    scorer = 8_030_261_248 - 128256 * 4096 + 4096  # one label in place of the language head
    assert memory["reward"] == -(-scorer // 7) * 2


def test_plan_without_gpus_places_ranks_on_cpu(cluster: Cluster) -> None:
    plan = cluster.read("--config_file", ROOT / "configs" / "cpu.yaml")
    (node,) = plan["nodes"]
    assert (node["devices"], node["engines"], node["local_world_size"]) == ([], [[]], 2)
    assert plan["estimates"]["training"]["capacity_bytes"] is None
    assert plan["estimates"]["engine"]["kv_cache_bytes"] == GIB
    code, out = cluster.plan("--config_file", ROOT / "configs" / "cpu.yaml", "--verbose")
    assert code == 0
    assert "1 node without GPUs: 2 ranks, 1 engine on each" in out


def test_plan_of_unreachable_model_reports_unknown_memory(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    training = cluster.training(model_name_or_path="nobody/no-such-model")
    code, out = cluster.plan("--config_file", ROOT / "configs" / "4node.yaml", "--config", training, "--verbose")
    assert code == 1, "what is not known is no yes"
    assert out.startswith("unknown: memory is not estimated\n")
    assert "UNKNOWN: model_name_or_path is 'nobody/no-such-model', whose configuration cannot be read" in out
    assert "give a local folder" in out
    assert "4 nodes: 32 GPUs = 28 ranks + 4 reserved" in out
    assert "on each node: 224 completions" in out


@pytest.mark.parametrize(
    "words",
    [["--gpu-memory", "80"], ["--gpu", "h999"], ["--gpus-per-node", "8,x"], ["--gpu-tbps", "-1"], ["--gpu-tbps", "x"]],
)
def test_plan_with_invalid_option_value_exits_2(cluster: Cluster, words: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cluster.plan("--num_processes", "7", *words)
    assert caught.value.code == 2


def test_plan_command_import_is_fast_and_loads_no_engine() -> None:
    code = (
        "import sys, torch, time; begun = time.perf_counter(); import grpo.ops.plan.command; "
        "print(time.perf_counter() - begun, 'vllm' in sys.modules, 'deepspeed' in sys.modules, 'trl' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    seconds, *loaded = result.stdout.split()
    assert float(seconds) < 3
    assert loaded == ["False"] * 3


@pytest.mark.parametrize("word", ["--gpu-memry=40GiB", "--gpu-mem"])
def test_plan_with_unknown_option_exits_2_and_suggests_name(
    word: str, cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cluster.plan("--num_processes", "7", word)
    assert caught.value.code == 2
    assert f"unrecognized arguments: {word} (did you mean --gpu-memory?)" in capsys.readouterr().err
