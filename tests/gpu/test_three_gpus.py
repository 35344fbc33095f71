"""Two ranks with ZeRO-3 over NCCL and one engine: the smallest job in which ranks have to meet."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gpu.jobs import (
    benchmark,
    by_accelerate,
    by_torchrun,
    finish,
    first_step_s,
    largest_gap,
    launch,
    save_model,
    tiny_script,
)
from tests.support.launching import ROOT

pytestmark = [pytest.mark.gpus(3), pytest.mark.job, pytest.mark.takes(120)]

Figure = Callable[[str, float, str], None]
FIRST_STEP_S = 120  # from the launch: a group that hangs at its creation does so without a word


@pytest.mark.parametrize("launcher", ["accelerate", "torchrun", "torchrun-ddp"])
def test_job_on_three_gpus_logs_first_step_within_120_s(launcher: str, tmp_path: Path, figure: Figure) -> None:
    """DeepSpeed binds each rank's GPU to the default group; no group made after that may wait for a split of it."""
    model, out = save_model("qwen3-tied", tmp_path / "model"), tmp_path / "out"
    if launcher == "accelerate":
        command = by_accelerate(tiny_script(model, out, vllm_reserved_gpus=1), gpus_per_node=3, reserved=1)
    else:
        zero3 = {} if launcher == "torchrun-ddp" else {"deepspeed": str(ROOT / "configs" / "zero3.json")}
        command = by_torchrun(tiny_script(model, out, vllm_reserved_gpus=1, **zero3), gpus=3, reserved=1)
    job = launch(command, out)
    try:
        figure("launch to first step", first_step_s(job, FIRST_STEP_S), "s")
    except BaseException:
        job.end()
        raise
    steps = finish(job)
    figure("largest mean gap", largest_gap(steps), "nats")
    figure("sync", steps[-1]["weight_sync/total_s"], "s")


@pytest.mark.takes(300)
def test_sync_benchmark_reports_figures(tmp_path: Path, figure: Figure) -> None:
    benchmark("sync", tmp_path, figure, gpus=3)
