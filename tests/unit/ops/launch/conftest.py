"""The machine on which the scripts in launch/ are tested."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.machine import PROGRAMS, Machine


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, body in PROGRAMS.items():
        (programs / name).write_text("#!/usr/bin/env bash\n" + body)
        (programs / name).chmod(0o755)
    (tmp_path / "environment").write_text("")
    env = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "FAKE": str(tmp_path),
        "FAKE_GPUS": "8 8",
        "VIRTUAL_ENV": "one is active",
        "GRPO_ENVIRONMENT": str(tmp_path / "environment"),
        "GRPO_OUTPUT_DIR": str(tmp_path / "out"),
        "SLURM_JOB_ID": "123456",
        "SLURM_NNODES": "2",
        "SLURM_JOB_NODELIST": "n[0-1]",
        "SLURM_JOB_CPUS_PER_NODE": "192(x3),96,128",
    }
    machine = Machine(tmp_path, env)
    yield machine
    machine.end()
