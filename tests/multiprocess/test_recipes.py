"""Recipes through `train.py` on real ranks with a real engine: two steps, then the same line goes on for a third.

The others run in one process (`tests/unit/ops/train/test_recipes.py`): a start of the whole stack takes a minute.
"""

from pathlib import Path

import pytest

from tests.support.launching import ROOT, Job, accelerate_command, free_port, start
from tests.support.made_up_data import RECIPES, save_small_model, write_rows

JOB_S = 420
SMALLER = {
    "vllm_reserved_gpus": 0,
    "completions_per_step": 32,
    "per_device_train_batch_size": 8,
    "max_completion_length": 8,
    "vllm_max_model_length": 1024,
    "attn_implementation": "sdpa",
    "bf16": False,
    "gradient_checkpointing": False,
    "save_steps": 2,
    "eval_strategy": "no",
}


def attempt(recipe: str, model: Path, data: Path, out: Path, max_steps: int) -> Job:
    """`train.py` with the recipe as it stands, but for what two CPU cores cannot do; it has ended."""
    chosen = {**SMALLER, "model_name_or_path": model, "dataset_name": data, "output_dir": out, "max_steps": max_steps}
    flags = [str(word) for name, value in chosen.items() for word in (f"--{name}", value)]
    script = [str(ROOT / "train.py"), "--config", str(ROOT / "configs" / "train" / f"{recipe}.yaml"), *flags]
    script += ["--dataset_config", "", "--resume", "auto"]
    job = start(accelerate_command(script, port=free_port()), out)
    try:
        assert job.wait(JOB_S) == [0], job.fail("the job failed")
    finally:
        job.end()
    return job


@pytest.mark.long
def test_code_recipe_after_two_steps_resumes_at_third(tmp_path: Path) -> None:
    """Its reward runs programs beside engines and ranks."""
    recipe = "code_qwen2.5_7b"
    model = save_small_model(tmp_path / "model")
    data = write_rows(tmp_path / "rows.jsonl", RECIPES[recipe][1])
    out = tmp_path / "out"
    first = attempt(recipe, model, data, out, 2)
    assert [line["step"] for line in first.metrics()] == [1, 2]
    second = attempt(recipe, model, data, out, 3)
    assert "goes on after step 2" in second.output()
    assert [line["step"] for line in second.metrics()] == [1, 2, 3]
    assert (out / "model.safetensors").exists()
