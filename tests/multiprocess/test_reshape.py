"""`grpo reshape`: what two ranks have written, one and three go on from as the two would have."""

import json
from pathlib import Path

import pytest
import torch

from grpo import cli
from grpo.checkpoints.checkpoints import read_complete
from tests.support.launching import ROOT, Job, start, torchrun_command
from tests.support.made_up_checkpoints import make_reshapable

JOB_S = 240
CONFIG = {
    "deepspeed": str(ROOT / "configs" / "zero3.json"),
    "lr_scheduler_type": "constant",
    "weight_decay": 0.1,  # of some parameters; others have none
    "beta": 0.1,
    "sync_ref_model": True,
    "ref_model_sync_steps": 1,
    "ref_model_mixup_alpha": 0.5,
}
ENGINES: dict = {"use_vllm": True, "check_rewards": False, "vllm_max_model_length": 64, "generation_lookahead": 1}
ENGINES |= {"vllm_engine_kwargs": {"enforce_eager": True}}
NUM_PROMPTS = 30


def train(model: Path, out: Path, *, ranks: int, config: dict, code: int = 0) -> Job:
    """Has ended with that exit code; `out/states.pt` holds master weights and moments if it is 0."""
    out.mkdir(parents=True, exist_ok=True)
    config = {**CONFIG, "output_dir": str(out), **config}
    settings = {"model": str(model), "config": config, "num_prompts": NUM_PROMPTS, "states": True, "noise": False}
    (out / "settings.json").write_text(json.dumps(settings))
    script = [str(ROOT / "tests" / "jobs" / "resume_job.py"), str(out / "settings.json")]
    job = start(lambda _: torchrun_command(script, ranks=ranks), out)
    try:
        assert job.wait(JOB_S) == [code], job.fail("ended otherwise")
    finally:
        job.end()
    return job


def rows(out: Path, ranks: int) -> list[list[tuple[str, list[int]]]]:
    """Of each step's generation batch, over all ranks in order: prompts and completions."""
    seen = [[json.loads(line) for line in (out / f"seen-{r}.jsonl").read_text().splitlines()] for r in range(ranks)]
    return [
        [row for part in batch for row in zip(part["prompts"], part["completions"], strict=True)]
        for batch in zip(*seen, strict=True)
    ]


@pytest.mark.long
def test_reshape_to_one_or_three_ranks_continues_run_of_two(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the rows that were sampled ahead; each one later has the seed that it would have had."""
    more = {"max_steps": 4, **ENGINES}
    two = tmp_path / "run"
    train(tiny_model, two, ranks=2, config={**more, "save_steps": 2, "gradient_accumulation_steps": 3})
    checkpoint, end_of_two = two / "checkpoint-2", torch.load(two / "states.pt")
    for ranks, accumulation in ((1, 6), (3, 2)):
        assert cli.main(["reshape", str(checkpoint), "--ranks", str(ranks)]) == 0
        out = checkpoint.parent.with_name(f"run-ranks-{ranks}")
        settings = f"steps_per_generation: {accumulation}, gradient_accumulation_steps: {accumulation}"
        assert f"Go on with per_device_train_batch_size: 4, {settings}" in capsys.readouterr().out
        record = read_complete(out / "checkpoint-2")
        assert (record.world_size, record.reshaped_from, record.step) == (ranks, 2, 2)
        auto = {"gradient_accumulation_steps": accumulation, "resume_from_checkpoint": "auto"}
        job = train(tiny_model, out, ranks=ranks, config={**more, **auto})
        assert "was written by 2 training processes and made for" in job.output()
        assert "others are sampled" not in job.output()
        assert rows(out, ranks) == rows(two, 2)[2:]
        states = torch.load(out / "states.pt")
        assert states.keys() == end_of_two.keys()
        for name, of_two in end_of_two.items():
            for mine, theirs in zip(states[name], of_two, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_resume_of_reshaped_checkpoint_refuses_other_batch_size(tiny_model: Path, tmp_path: Path) -> None:
    """Of a checkpoint that none could load: its weights are seven letters."""
    checkpoint = make_reshapable(tmp_path / "two" / "checkpoint-2", step=6)
    out = tmp_path / "run" / "checkpoint-2"
    assert cli.main(["reshape", str(checkpoint), "--ranks", "1", "--out", str(out)]) == 0
    config = {"max_steps": 3, "gradient_accumulation_steps": 3, "resume_from_checkpoint": "auto"}
    job = train(tiny_model, tmp_path / "run", ranks=1, config=config, code=1)
    assert "generation_batch_size is 12, not 24" in job.output()
    assert "x 1 training processes x steps_per_generation has to be 24" in job.output()
    assert not list((tmp_path / "run").glob("seen-*"))
