"""What `grpo plan` says of a rank's memory, phase by phase, against torch's allocator: 1.5 B parameters, ZeRO-3."""

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gpu.jobs import JOB_S, by_torchrun, launch
from tests.gpu.requirements import rehearsed
from tests.support.launching import ROOT

COMPLETIONS, PROMPT_TOKENS, COMPLETION_TOKENS = (2, 8, 8) if rehearsed() else (8, 512, 512)
SHAPE = {  # Qwen2.5-1.5B's
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
SMALL = {"hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512}
TOO_LITTLE = 1.1  # held over planned, at most: what is more than planned runs out of memory


def planned(model: Path, data: Path) -> dict[str, int]:
    """Bytes of each phase, as `grpo plan --json` has them; without CUDA's context, which the allocator does not see."""
    from grpo.cli import main

    command = ["plan", "--config_file", str(ROOT / "configs" / "1node.yaml"), "--num_processes", "1"]
    command += ["--gpus-per-node", "2", "--json", "--", "--model_name_or_path", str(model), "--dataset_name", str(data)]
    command += ["--per_device_train_batch_size", str(COMPLETIONS), "--num_generations", str(COMPLETIONS)]
    command += ["--max_completion_length", str(COMPLETION_TOKENS), "--output_dir", str(model.parent / "out")]
    command += ["--vllm_max_model_length", str(PROMPT_TOKENS + COMPLETION_TOKENS), "--bf16", "true"]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        main(command)
    lines = json.loads(printed.getvalue())["estimates"]["training"]["lines"]
    phases: dict[str, int] = {}
    for line in lines:
        if line["counted"] and line["key"] != "context":
            phases[line["phase"]] = phases.get(line["phase"], 0) + line["num_bytes"]
    always = phases.pop("always")
    return {"always": always} | {phase: always + num_bytes for phase, num_bytes in phases.items()}


@pytest.mark.gpus(1)
@pytest.mark.requires("deepspeed", "transformers", "trl", "accelerate", "datasets", "rich", "psutil")
@pytest.mark.rehearsable
@pytest.mark.takes(180)
def test_plan_of_training_memory_matches_allocator(tmp_path: Path, figure: Callable[[str, float, str], None]) -> None:
    import torch
    from transformers import Qwen2Config

    config = Qwen2Config(**SHAPE | (SMALL if rehearsed() else {}))
    config.architectures = ["Qwen2ForCausalLM"]
    model, output = tmp_path / "model", tmp_path / "measured.json"
    config.save_pretrained(model)
    (tmp_path / "data.jsonl").write_text('{"prompt": "1+1=", "solution": "2"}\n')
    plan = planned(model, tmp_path / "data.jsonl")
    if not rehearsed():
        space, most = torch.cuda.get_device_properties(0).total_memory, max(plan.values())
        if space < most * TOO_LITTLE:
            pytest.skip(f"needs a GPU of {most * TOO_LITTLE / 2**30:.0f} GiB (this one has {space / 2**30:.0f})")
    numbers = [str(number) for number in (COMPLETIONS, PROMPT_TOKENS, COMPLETION_TOKENS)]
    script = [str(ROOT / "tests" / "jobs" / "memory_phases_job.py"), str(model), str(output)]
    script += ["cpu" if rehearsed() else "cuda", *numbers]
    job = launch(by_torchrun(script, gpus=1, reserved=0), tmp_path / "job")
    try:
        assert job.wait(JOB_S) == [0], job.fail("the engine did not finish its steps")
    finally:
        job.end()
    held = json.loads(output.read_text())
    assert held.keys() <= plan.keys()
    for phase, num_bytes in held.items():
        figure(f"{phase}: held", num_bytes / 2**30, "GiB")
        figure("planned", plan[phase] / 2**30, "GiB")
    if rehearsed():
        return
    assert held["always"] == pytest.approx(plan["always"], rel=0.1)
    for phase, num_bytes in held.items():
        assert num_bytes < TOO_LITTLE * plan[phase], f"{phase}: {num_bytes} B held, {plan[phase]} B planned"
