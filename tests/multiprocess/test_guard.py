"""Two nodes, one of whose engines keeps an old layer: what the tokens that are trained on say of it."""

from pathlib import Path

import pytest

from tests.support.finished import MAX_GAP, finish
from tests.support.launching import ROOT, accelerate_command, free_port, start, tiny_job_script
from tests.support.tiny_models import save_tiny_model

STALE_FROM = 10
STEPS = 45


@pytest.mark.long
def test_guard_with_stale_engine_names_node_and_restores_it(tmp_path: Path) -> None:
    """At the demo's learning rate; the full weight sync behind the warning brings the layer."""
    model = save_tiny_model("qwen3-tied", tmp_path / "model")
    schedule = {"learning_rate": 4e-4, "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 10}
    script = tiny_job_script(
        model,
        tmp_path / "run",
        config={**schedule, "max_steps": STEPS, "max_completion_length": 8},
        stale=[".layers.1.", STALE_FROM],
    )
    script[0] = str(ROOT / "tests" / "jobs" / "stale_job.py")
    job = start(accelerate_command(script, nodes=2, ranks_per_node=1, port=free_port()), tmp_path / "run", nodes=2)
    steps = finish(job)
    assert len(steps) == STEPS, job.fail("not every step was logged")
    noticed = next(line["step"] for line in steps if line["sampling/gap_alarms"])
    assert STALE_FROM < noticed <= STALE_FROM + 20, job.fail(f"noticed in step {noticed}")
    (warning,) = [line for line in job.output().splitlines() if "GRPO-413" in line]
    assert "node 1 (" in warning
    gaps = [line["by_node"]["sampling/logprob_gap"] for line in steps]
    assert max(of_0 for of_0, _ in gaps) < MAX_GAP, job.fail(str(gaps))
    assert gaps[noticed - 1][1] > 0.01, job.fail(str(gaps))
    assert max(of_1 for _, of_1 in gaps[noticed:]) < MAX_GAP, job.fail(str(gaps))
