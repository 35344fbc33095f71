"""A run that is stopped, or killed, and resumed ends where an uninterrupted one does, bit for bit."""

import json
import shutil
from pathlib import Path

from tests.launching import ROOT, Job, start, torchrun_command

JOB_S = 240
RANDOM = ("run/", "profiling/", "step_time", "train_runtime", "train_s", "completions_per")  # not a matter of seeds


def run(
    model: Path, out: Path, *, num_prompts: int, attempt: int = 0, job: str = "77", config: dict | None = None, **hooks
) -> Job:
    """One attempt; it has ended."""
    out.mkdir(parents=True, exist_ok=True)
    settings = out / "settings.json"
    config = {"output_dir": str(out), "deepspeed": str(ROOT / "configs" / "zero3.json"), **(config or {})}
    settings.write_text(json.dumps({"model": str(model), "config": config, "num_prompts": num_prompts, **hooks}))
    script = [str(ROOT / "tests" / "jobs" / "resume_job.py"), str(settings)]
    env = {"GRPO_JOB": job, "GRPO_ATTEMPT": str(attempt)}
    started = start(lambda _: torchrun_command(script), out, env=env)
    try:
        started.codes = started.wait(JOB_S)  # type: ignore[attr-defined]
    finally:
        started.end()
    return started


def expect(job: Job, *, success: bool) -> str:
    assert (job.codes == [0]) is success, job.fail(f"launchers exited {job.codes}")  # type: ignore[attr-defined]
    return job.output()


def state(out: Path) -> dict:
    return json.loads((out / "run_state.json").read_text())


def steps(out: Path) -> dict[int, dict]:
    """What was logged for each training step, times aside; each step once."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "reward" in line]
    assert len({line["step"] for line in lines}) == len(lines), [line["step"] for line in lines]
    return {line["step"]: {k: v for k, v in line.items() if not any(part in k for part in RANDOM)} for line in lines}


def seen(out: Path, rank: int) -> list[dict]:
    return [json.loads(line) for line in (out / f"seen-{rank}.jsonl").read_text().splitlines()]


def test_three_and_three_steps_are_six(tiny_model: Path, tmp_path: Path) -> None:
    config = {"max_steps": 6, "save_strategy": "no"}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    expect(run(tiny_model, whole, num_prompts=40, config=config), success=True)
    assert state(whole)["state"] == "finished"
    assert (whole / "final" / "model.safetensors").exists()

    (parts).mkdir()
    (parts / "stop.77.7").touch()
    first = run(tiny_model, parts, num_prompts=40, config=config, stop_at=2)
    output = expect(first, success=True)
    assert "stop.77.7 was left for an earlier attempt" in output
    stopped = state(parts)
    assert (stopped["state"], stopped["step"], stopped["requeue"], stopped["job"]) == ("stopped", 3, True, "77")
    assert stopped["checkpoint"] == str(parts / "checkpoint-3")
    assert not (parts / "final").exists()  # nobody saved a half-trained model
    assert not (parts / "weights").exists()
    assert not list(parts.glob("stop*"))
    with (parts / "metrics.jsonl").open("a") as lines:
        lines.write('{"step": 4, "reward": 9.0}\n{"step": 5, "rew')  # as a kill after the checkpoint leaves it

    resume = {**config, "resume_from_checkpoint": "auto"}
    output = expect(run(tiny_model, parts, num_prompts=40, attempt=1, config=resume), success=True)
    assert "goes on after step 3" in output
    assert state(parts)["state"] == "finished"
    assert state(parts)["tracker_run"] == stopped["tracker_run"]
    assert steps(parts) == steps(whole)
    assert '"reward": 9.0' in (parts / "metrics.attempt-0.jsonl").read_text()
    for rank in (0, 1):
        assert seen(parts, rank) == seen(whole, rank)
    assert (parts / "weights").read_text() == (whole / "weights").read_text()


def test_over_an_epoch_and_in_the_middle_of_a_generation_batch(tiny_model: Path, tmp_path: Path) -> None:
    """10 prompts are 5 generation batches, each for two steps: 10 steps an epoch. A kill inside the last save."""
    config = {"max_steps": 17, "save_steps": 13, "num_iterations": 2}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    expect(run(tiny_model, whole, num_prompts=10, config=config), success=True)
    assert seen(whole, 0)[0]["prompts"] != seen(whole, 0)[5]["prompts"]  # another order in the second epoch

    shutil.copytree(whole / "checkpoint-13", parts / "checkpoint-13")
    for rank in (0, 1):
        (parts / f"seen-{rank}.jsonl").write_text((whole / f"seen-{rank}.jsonl").read_text())
    resume = {**config, "resume_from_checkpoint": "auto"}
    killed = run(tiny_model, parts, num_prompts=10, config=resume, kill_in_save=17)
    expect(killed, success=False)
    assert (parts / "checkpoint-17").exists()
    assert (parts / "checkpoint-13" / "complete.json").exists()

    last = {**resume, "save_total_limit": 1}
    output = expect(run(tiny_model, parts, num_prompts=10, attempt=1, config=last), success=True)
    assert [path.name for path in parts.glob("checkpoint-*")] == ["checkpoint-17"]  # the others went after it was whole
    assert f"passed over: {parts / 'checkpoint-17'} has no complete.json" in output
    assert {step: line for step, line in steps(parts).items() if step > 13} == {
        step: line for step, line in steps(whole).items() if step > 13
    }
    assert (parts / "weights").read_text() == (whole / "weights").read_text()
    assert [row for row in seen(parts, 1) if row["step"] >= 14][-2:] == [
        row for row in seen(whole, 1) if row["step"] >= 14
    ]
