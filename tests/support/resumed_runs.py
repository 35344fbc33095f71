"""Attempts of one run without engines, and what they leave: metrics, prompts seen, weights."""

import json
from pathlib import Path
from typing import Any

from tests.support.launching import ROOT, Job, start, torchrun_command

JOB_S = 240
OF_THE_START = ("time", "attempt", "by_node", "rollout/slowest_node")
RANDOM = ("run/", "profiling/", "step_time", "train_runtime", "train_s", "completions_per")  # not a matter of seeds


def run(
    model: Path,
    out: Path,
    *,
    num_prompts: int,
    attempt: int = 0,
    job: str = "77",
    config: dict | None = None,
    env: dict[str, str] | None = None,
    **hooks: Any,
) -> Job:
    """One attempt; it has ended."""
    out.mkdir(parents=True, exist_ok=True)
    settings = out / "settings.json"
    config = {"output_dir": str(out), "deepspeed": str(ROOT / "configs" / "zero3.json"), **(config or {})}
    settings.write_text(json.dumps({"model": str(model), "config": config, "num_prompts": num_prompts, **hooks}))
    script = [str(ROOT / "tests" / "jobs" / "resume_job.py"), str(settings)]
    env = {"GRPO_JOB": job, "GRPO_ATTEMPT": str(attempt), **(env or {})}
    started = start(lambda _: torchrun_command(script), out, env=env)
    try:
        started.codes = started.wait(JOB_S)  # type: ignore[attr-defined]
    finally:
        started.end()
    return started


def expect(job: Job, *, success: bool) -> str:
    assert (job.codes == [0]) is success, job.fail(f"launchers exited {job.codes}")  # type: ignore[attr-defined]
    return job.output()


def steps(out: Path) -> dict[int, dict]:
    """What was logged for each training step, times aside; each step once."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "reward" in line]
    assert len({line["step"] for line in lines}) == len(lines), [line["step"] for line in lines]
    return {
        line["step"]: {k: v for k, v in line.items() if k not in OF_THE_START and not any(part in k for part in RANDOM)}
        for line in lines
    }


def seen(out: Path, rank: int) -> list[dict]:
    return [json.loads(line) for line in (out / f"seen-{rank}.jsonl").read_text().splitlines()]
