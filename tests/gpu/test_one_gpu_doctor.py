"""`grpo doctor` on a machine with GPUs: what it sees of them."""

import json
import sys
from pathlib import Path

import pytest

from tests.gpu.jobs import JOB_S, launch, on_gpus
from tests.gpu.requirements import num_gpus, rehearsed


@pytest.mark.gpus(1)
@pytest.mark.job
@pytest.mark.takes(60)
def test_doctor_on_gpu_machine_finds_all_gpus(tmp_path: Path) -> None:
    """Its verdict is the machine's; here it must have looked, and found every GPU."""
    found = num_gpus()
    command = [*on_gpus(0, found), sys.executable, "-m", "grpo", "doctor", "--json"]
    command += [] if rehearsed() else ["--gpus-per-node", str(found)]
    job = launch(lambda _: command, tmp_path / "out")
    try:
        codes = job.wait(JOB_S)
        output = job.output()
    finally:
        job.end()
    assert codes in ([0], [1]), output
    findings = json.loads(output[output.index("{") :])["findings"]
    of_gpus = [finding for finding in findings if finding["check"] == "gpus"]
    assert of_gpus, output
    if not rehearsed():
        assert not [finding for finding in of_gpus if finding["status"] == "FAIL"], of_gpus
