"""A job whose engine is alive and ends no step any more: it goes on with another one, as if nothing had been."""

import json
from pathlib import Path

import pytest

from tests.support.contract import STARTUP_S
from tests.support.finished import finish
from tests.support.launching import start_tiny_job_by_torchrun
from tests.support.stuck_engine import FOR_EVER, NextStep


@pytest.mark.long  # an engine alone: `tests/engine/test_stalls.py`
def test_stuck_engine_restarts_and_resamples_its_requests(tiny_model: Path, tmp_path: Path) -> None:
    (folder := tmp_path / "slow").mkdir()
    next_step = NextStep(folder)
    config = {"vllm_stall_timeout": 5.0}
    job = start_tiny_job_by_torchrun(
        tiny_model, tmp_path / "out", config=config, hold="generation-1", zero3=False, env=next_step.variables
    )
    try:
        job.wait_for("at-generation-1", STARTUP_S)
        next_step.takes(FOR_EVER)
    except BaseException:
        job.end()
        raise
    (job.output_dir / "go-on").touch()
    steps = finish(job)
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert [line["engine/restarts"] for line in steps] == [0, 1, 1], job.fail(str(steps))
    assert [line["engine/requests_reissued"] for line in steps] == [0, 16, 0]
    (reported,) = json.loads((job.output_dir / "run_state.json").read_text())["restarts"]
    for part in ("died in phase 'generate' (engine 0 of node 0 is stuck: ", "(vllm_stall_timeout)", "16 requests"):
        assert part in reported
    assert reported.endswith("[GRPO-407]")
    assert "[GRPO-415]" in reported
    log = (job.output_dir / "logs" / "engine-node0-0.attempt-0.log").read_text()
    assert "in take_long" in log.partition("where its processes are")[2]
