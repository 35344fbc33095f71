"""Training jobs on a machine's first GPUs, started as users start them.

`GRPO_REHEARSE=1 make test-gpu` runs the same jobs with the same checks on CPU, by configs/cpu.yaml: for whoever writes
such a test and has no GPU. The report calls it a rehearsal.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.gpu.requirements import rehearsed
from tests.support.launching import ROOT, Job, free_port, start, tiny_job_script

JOB_S = 600
BENCHMARK_S = 1200
MAX_GAP_BF16 = 0.15  # grpo.weights.verifier's limit of the mean
MAX_SAMPLED_BF16 = 0.05  # mean of sampled tokens, which are likelier than the proof's; others report 0.01 to 0.03


def on_gpus(first: int, count: int) -> list[str]:
    """A command's prefix that shows it `count` of this machine's GPUs, from the `first` on."""
    from grpo.place.devices import visible_devices  # imports yaml

    tokens = visible_devices(os.environ)[first : first + count]
    assert len(tokens) == count or rehearsed(), f"{count} GPUs from {first} on are not there"
    return ["env", f"CUDA_VISIBLE_DEVICES={','.join(tokens)}"]


def by_accelerate(
    script: list[str], *, gpus_per_node: int, reserved: int, nodes: int = 1
) -> Callable[[int], list[str]]:
    """`accelerate launch --config_file configs/1node.yaml …`, or 4node.yaml for more nodes, each on its own GPUs."""
    port, ranks = free_port(), gpus_per_node - reserved
    config = "cpu.yaml" if rehearsed() else "1node.yaml" if nodes == 1 else "4node.yaml"

    def command(node: int) -> list[str]:
        launcher = [*on_gpus(node * gpus_per_node, gpus_per_node), sys.executable, "-m", "accelerate.commands.launch"]
        launcher += ["--config_file", str(ROOT / "configs" / config), "--main_process_port", str(port)]
        launcher += ["--num_processes", str(ranks * nodes)]
        if nodes > 1:
            launcher += ["--num_machines", str(nodes), "--machine_rank", str(node), "--main_process_ip", "127.0.0.1"]
            launcher += ["--deepspeed_multinode_launcher", "standard"]
        return [*launcher, *script]

    return command


def by_torchrun(script: list[str], *, gpus: int, reserved: int) -> Callable[[int], list[str]]:
    """One node; DeepSpeed where the script's own settings ask for it."""
    launcher = [*on_gpus(0, gpus), sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={gpus - reserved}"]
    return lambda _: [*launcher, "--master_addr=127.0.0.1", f"--master_port={free_port()}", *script]


def tiny_script(
    model: Path, out: Path, *, hold: str = "", lora: dict[str, Any] | None = None, **config: Any
) -> list[str]:
    """`tests/jobs/tiny_job.py` with these settings: three steps in bf16, several buckets a weight sync."""
    settings = {"use_cpu": False, "bf16": True, "vllm_gpu_memory_utilization": 0.2, **config}
    if rehearsed():
        reserved = settings.pop("vllm_reserved_gpus")
        del settings["vllm_gpu_memory_utilization"]
        settings |= {"use_cpu": True, "bf16": False, "vllm_sync_backend": "shm"}
        settings["vllm_engines_per_node"] = reserved // settings.get("vllm_tensor_parallel_size", 1)
    return tiny_job_script(model, out, config=settings, hold=hold, **({} if lora is None else {"lora": lora}))


def save_model(family: str, folder: Path) -> Path:
    from tests.support.tiny_models import save_tiny_model  # imports transformers

    return save_tiny_model(family, folder)


def launch(command: Callable[[int], list[str]], out: Path, *, nodes: int = 1, env: dict[str, str] | None = None) -> Job:
    return start(command, out, nodes=nodes, env=env)


def finish(job: Job, *, num_steps: int = 3, stale: Sequence[int] = ()) -> list[dict]:
    """Wait for the end; the metrics of the steps. Gaps of weight syncs, and of what was sampled in each step, are in
    limits.

    Args:
        stale: steps whose samples are by other weights, on purpose.
    """
    try:
        codes = job.wait(JOB_S)
        assert codes == [0] * len(codes), job.fail(f"launchers exited {codes}")
        steps = job.metrics()
    finally:
        job.end()
    assert [line["step"] for line in steps] == [*range(1, num_steps + 1)], job.fail("not every step was logged")
    assert largest_gap(steps) < MAX_GAP_BF16, job.fail(f"gap of {largest_gap(steps)} nats")
    sampled = {line["step"]: line["sampling/sampling_logp_difference/mean"] for line in steps}
    wrong = {step: gap for step, gap in sampled.items() if step not in stale and not gap < MAX_GAP_BF16}
    assert not wrong, job.fail(f"sampled with other weights than the trainer's: mean differences by step {wrong}")
    return steps


def largest_gap(steps: list[dict]) -> float:
    """The largest mean gap of a weight sync's proof, in nats."""
    return max(line["weight_sync/logprob_gap_mean"] for line in steps if "weight_sync/logprob_gap_mean" in line)


def first_step_s(job: Job, timeout_s: float) -> float:
    """Seconds from the launch to the first logged step; fails when the job ends first or the time is up."""
    path = job.output_dir / "metrics.jsonl"  # the run's folder makes it before there is a step
    while not (path.exists() and job.metrics()):
        if any(launcher.poll() is not None for launcher in job.launchers):
            raise job.fail("the job ended before its first step")
        if time.monotonic() - job.started > timeout_s:
            raise job.fail(f"no step after {timeout_s} s")
        time.sleep(0.05)
    return time.monotonic() - job.started


def samples(out: Path, rank: int = 0) -> list[dict]:
    """What the reward of a rank saw: `step`, `prompts`, `completion_ids`."""
    return [json.loads(line) for line in (out / "ranks" / f"samples-{rank}.jsonl").read_text().splitlines()]


def benchmark(name: str, folder: Path, figure: Callable[[str, float, str], None], *, gpus: int) -> None:
    """`python -m bench.<name> --device cuda` on the first GPUs; medians of its figures go to the report."""
    output = folder / f"{name}.json"
    command = [*on_gpus(0, gpus), sys.executable, "-m", f"bench.{name}", "--output", str(output)]
    command += ["--device", "cpu", "--short"] if rehearsed() else ["--device", "cuda"]
    job = launch(lambda _: command, folder / "job", env={"PYTHONPATH": str(ROOT)})
    try:
        assert job.wait(BENCHMARK_S) == [0], job.fail(f"bench.{name} failed")
    finally:
        job.end()
    result = json.loads(output.read_text())
    for part in (*result["ratios"], *result["figures"]):
        figure(part["name"].strip(), statistics.median(part["values"]), part.get("unit", "x"))
