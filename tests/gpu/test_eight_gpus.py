"""Two nodes of four GPUs on one machine: three ranks and an engine each, groups that straddle both."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gpu.jobs import by_accelerate, finish, largest_gap, launch, save_model, tiny_script


@pytest.mark.gpus(8)
@pytest.mark.job
@pytest.mark.takes(150)
def test_job_on_two_nodes_of_four_gpus_finishes_on_policy(
    tmp_path: Path, figure: Callable[[str, float, str], None]
) -> None:

    model, out = save_model("llama-untied", tmp_path / "model"), tmp_path / "out"
    script = tiny_script(model, out, vllm_reserved_gpus=1)
    steps = finish(launch(by_accelerate(script, gpus_per_node=4, reserved=1, nodes=2), out, nodes=2))
    figure("largest mean gap", largest_gap(steps), "nats")
    figure("sync", steps[-1]["weight_sync/total_s"], "s")
    figure("gather", steps[-1]["weight_sync/gather_s"], "s")
