"""The layouts: an engine that spans two GPUs, two engines, two nodes, and training without NCCL."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gpu.jobs import by_accelerate, finish, largest_gap, launch, save_model, tiny_script

pytestmark = [pytest.mark.gpus(4), pytest.mark.job, pytest.mark.takes(120)]

LAYOUTS = {
    # name: model, nodes, GPUs of each, reserved of each, settings
    "tensor-parallel-2": ("phi3-fused", 1, 4, 2, {"vllm_tensor_parallel_size": 2}),
    "two-engines": ("llama-untied", 1, 4, 2, {}),
    "two-nodes-of-two": ("qwen3-tied", 2, 2, 1, {}),
    # whether gloo serves ZeRO-3's collectives on CUDA tensors; one GPU is left over
    "gloo-and-shared-memory": ("qwen3-tied", 1, 3, 1, {"ddp_backend": "gloo", "vllm_sync_backend": "shm"}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_job_in_each_layout_finishes_on_policy(
    layout: str, tmp_path: Path, figure: Callable[[str, float, str], None]
) -> None:

    family, nodes, gpus, reserved, config = LAYOUTS[layout]
    model, out = save_model(family, tmp_path / "model"), tmp_path / "out"
    script = tiny_script(model, out, vllm_reserved_gpus=reserved, **config)
    job = launch(by_accelerate(script, gpus_per_node=gpus, reserved=reserved, nodes=nodes), out, nodes=nodes)
    steps = finish(job)
    if "ddp_backend" in config:
        assert job.rank(0)["backend"] == config["ddp_backend"]
    figure("largest mean gap", largest_gap(steps), "nats")
    figure("sync", steps[-1]["weight_sync/total_s"], "s")
    figure("launch to first step", steps[0]["startup/launch_to_first_step_s"], "s")
