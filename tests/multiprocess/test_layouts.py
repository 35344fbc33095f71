"""The ways to start: torchrun with DeepSpeed's JSON, ZeRO-2, DDP, one process; and the script of the README."""

import json
import re
import sys
from pathlib import Path

import pytest

from tests.support.finished import finish, lines_of
from tests.support.launching import (
    ROOT,
    TINY_JOB,
    Job,
    accelerate_command,
    free_port,
    metrics_in,
    start,
    start_tiny_job,
    tiny_job_script,
    torchrun_command,
)
from tests.support.tiny_models import save_tiny_model


@pytest.mark.long
def test_demo_by_torchrun_with_deepspeed_json_evaluates_and_finishes(tmp_path: Path) -> None:
    """The demo of the README, cut to a few steps."""
    flags = ["--deepspeed", str(ROOT / "configs" / "zero3.json"), "--output_dir", str(tmp_path / "out")]
    flags += ["--max_steps", "4", "--logging_steps", "2", "--eval_strategy", "steps", "--eval_steps", "4"]
    flags += ["--num_generations_eval", "4", "--per_device_eval_batch_size", "256"]
    flags += ["--vllm_engine_kwargs", '{"enforce_eager": true}']
    job = start(lambda _: torchrun_command([str(ROOT / "train.py"), *flags]), tmp_path / "out")
    steps = finish(job)
    assert [line["step"] for line in steps] == [2, 4]
    assert 0.3 < steps[0]["reward"] < 0.55, job.fail("the demo's model is off")
    evaluated = [line for line in map(json.loads, (tmp_path / "out/metrics.jsonl").open()) if "eval_reward" in line]
    assert len(evaluated) == 1
    assert evaluated[0]["eval_rollout/generate_s"] > 0
    summary = [line for line in job.output().splitlines() if line.startswith("demo: reward")]
    assert len(summary) == 1
    assert "4 steps in" in summary[0]


@pytest.mark.long
def test_gsm8k_example_with_zero2_saves_model(tmp_path: Path) -> None:
    """A user's own script, reward and data mapping; episodes through a chat template; the model is saved."""
    model, data = save_tiny_model("qwen2-tied", tmp_path / "model", chat=True), write_questions(tmp_path / "data.jsonl")
    flags = ["--model", str(model), "--data", str(data), "--output_dir", str(tmp_path / "out"), "--max_steps", "1"]
    zero2 = tmp_path / "zero2.json"
    zero2.write_text(
        json.dumps(
            {
                "train_micro_batch_size_per_gpu": "auto",
                "gradient_accumulation_steps": "auto",
                "zero_optimization": {"stage": 2},
            }
        )
    )
    script = [str(ROOT / "examples/gsm8k.py"), *flags, "--max_completion_length", "8", "--no-bf16"]
    job = start(lambda _: torchrun_command([*script, "--deepspeed", str(zero2)]), tmp_path / "out")
    assert len(finish(job)) == 1
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_readme_listing_trains_and_saves_model(tmp_path: Path) -> None:
    """But for its model and data, which are the hub's."""
    model, data = save_tiny_model("qwen3-tied", tmp_path / "model", chat=True), write_questions(tmp_path / "data.jsonl")
    (listing,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    local = {
        '"Qwen/Qwen2.5-0.5B-Instruct"': repr(str(model)),
        '"openai/gsm8k", "main"': f'"json", data_files={str(data)!r}',
    }
    for name, here in local.items():
        assert listing.count(name) == 1
        listing = listing.replace(name, here)
    script, out = tmp_path / "listing.py", tmp_path / "out"
    script.write_text(listing)
    flags = ["--output_dir", str(out), "--max_steps", "1", "--bf16", "false", "--max_completion_length", "8"]
    flags += ["--logging_steps", "1", "--report_to", "none", "--vllm_engine_kwargs", '{"enforce_eager": true}']
    job = start(accelerate_command([str(script), *flags], ranks_per_node=1, port=free_port()), out)
    (step,) = finish(job)
    assert step["reward"] == step["rewards/reward/mean"]
    assert (out / "model.safetensors").exists()


def write_questions(path: Path) -> Path:
    """Rows in the form of GSM8K."""
    rows = [{"question": f"{n} and {n}?", "answer": f"so\n#### {2 * n}"} for n in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_of(job: Job, ranks: int) -> list[list[tuple[str, tuple[int, ...]]]]:
    """Of each generation batch the prompts and completions, row by row over all ranks."""
    of_ranks = [lines_of(job, f"samples-{rank}.jsonl") for rank in range(ranks)]
    return [
        [
            (prompt, tuple(ids))
            for part in parts
            for prompt, ids in zip(part["prompts"], part["completion_ids"], strict=True)
        ]
        for parts in zip(*of_ranks, strict=True)
    ]


@pytest.mark.long
def test_sampled_rows_in_any_layout_and_lookahead_are_equal(tiny_model: Path, tmp_path: Path) -> None:
    """Seeds follow from batch and row; with a learning rate of 0 the weights are the same throughout."""
    found = []
    for nodes, ranks, ahead in ((1, 2, 0), (2, 1, 2), (2, 2, 3)):
        config = {"learning_rate": 0.0, "max_steps": 4, "completions_per_step": 16, "generation_lookahead": ahead}
        config["per_device_train_batch_size"] = 16 // (nodes * ranks)
        out = tmp_path / f"{nodes}x{ranks}"
        job = start_tiny_job(tiny_model, out, config=config, nodes=nodes, ranks_per_node=ranks)
        assert len(finish(job)) == 4
        found.append(rows_of(job, nodes * ranks))
    assert [len(batch) for batch in found[0]] == [16] * 4
    assert found[0] == found[1] == found[2]


ONE_AFTER_THE_OTHER = """
import runpy, sys
job, *settings = sys.argv[1:]
for each in settings:
    sys.argv = [job, each]
    runpy.run_path(job, run_name="__main__")
"""


@pytest.mark.long
def test_single_process_without_group_matches_trl(tiny_model: Path, tmp_path: Path) -> None:
    """The same script, with TRL's own generation and with ours; sampling is left no choice, so both see the same.

    Ours gets the model as an object, whose engine then builds it from a private folder.
    """
    greedy = {"temperature": 1.0, "top_k": 1, "max_steps": 2, "vllm_engine_kwargs": None}
    settings = []
    for name, mode in {"trl": {"use_vllm": False, "vllm_sync_bucket_mb": 512}, "ours": {}}.items():
        config = {**greedy, **mode, "vllm_importance_sampling_correction": False}
        script = tiny_job_script(tiny_model, tmp_path / name, config=config, as_object=name == "ours")
        settings.append(script[1])
    job = start(lambda _: [sys.executable, "-c", ONE_AFTER_THE_OTHER, str(TINY_JOB), *settings], tmp_path / "ours")
    metrics = {"ours": finish(job), "trl": metrics_in(tmp_path / "trl")}
    for ours, trl in zip(metrics["ours"], metrics["trl"], strict=True):
        for key in ("reward", "completions/mean_length", "learning_rate", "num_tokens"):
            assert ours[key] == pytest.approx(trl[key], abs=1e-6), key
    assert not (tmp_path / "ours" / "engine" / "node0").exists()
    assert "weight_sync/total_s" in metrics["ours"][0]
    assert "weight_sync/total_s" not in metrics["trl"][0]


# -- mistakes that end within seconds, on every rank -----------------------------------------------------------------

# name -> settings, the message; accelerate starts 3 // 2 = 1 rank on each of 2 nodes and says nothing
MISTAKES: dict[str, tuple[dict, str]] = {
    "silent-floor": ({}, "[GRPO-104]"),
    "tensor-parallel-and-heads": ({"vllm_tensor_parallel_size": 3}, "[GRPO-105]"),
    "nccl-without-gpus": ({"vllm_sync_backend": "nccl"}, "vllm_sync_backend is 'nccl', but this node has no GPUs"),
}


def test_placement_errors_are_reported_on_every_rank(tiny_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    config = {"output_dir": str(out), "use_cpu": True, "bf16": False, "vllm_max_model_length": 64, "report_to": "none"}
    mistakes = {name: mistake for name, (mistake, _) in MISTAKES.items()}
    settings = out / "settings.json"
    settings.write_text(json.dumps({"model": str(tiny_model), "config": config, "mistakes": mistakes}))
    script = [str(ROOT / "tests" / "jobs" / "refusals_job.py"), str(settings)]
    command = accelerate_command(script, nodes=2, port=free_port())

    def three(node: int) -> list[str]:
        words = command(node)
        words[words.index("--num_processes") + 1] = "3"
        return words

    job = start(three, out, nodes=2)
    try:
        codes = job.wait(300)
    finally:
        job.end()
    assert 0 not in codes
    for rank in (0, 1):
        refused = json.loads((out / f"refused-{rank}.json").read_text())
        if "nccl-without-gpus" not in refused:  # the other rank was first: its failure has ended this one
            reported = [line for line in job.output().splitlines() if f"rank {rank} ends: the job failed on" in line]
            refused["nccl-without-gpus"] = "".join(reported)
        assert list(refused) == list(MISTAKES), job.fail(f"rank {rank} went on")
        for name, (_, message) in MISTAKES.items():
            assert message in refused[name], job.fail(f"{name}: no such message")
        assert "2 or 4" in refused["silent-floor"], "the two nearest values are not there"
    assert MISTAKES["nccl-without-gpus"][1] in job.output()
    assert not [*(out / "logs").glob("engine*")], "before any engine"
