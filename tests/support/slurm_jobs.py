"""Jobs on a real Slurm cluster: submitted through the templates in launch/, with a launcher that plays its part."""

import sys
from pathlib import Path

from tests import slurm
from tests.support.launching import ROOT

STUB = f'#!/bin/sh\nexec {sys.executable} -m tests.jobs.stub_launcher "$@"\n'


def submit(
    cluster: slurm.Slurm,
    template: str,
    output_dir: Path,
    path: list[Path],
    *arguments: str,
    options: list[str],
    **env: str,
) -> str:
    """The job's id; its own log is `output_dir/slurm.log`."""
    output_dir.mkdir(parents=True, exist_ok=True)
    environment = output_dir / "environment"
    environment.write_text(f"PATH={':'.join(map(str, path))}:$PATH\n")
    log = f"--output={output_dir}/slurm.log"
    command = [log, f"--chdir={ROOT}", *options, str(ROOT / "launch" / template), *arguments]
    return cluster.submit(
        *command, env={"GRPO_ENVIRONMENT": str(environment), "GRPO_OUTPUT_DIR": str(output_dir), **env}
    )


def everything_said(output_dir: Path) -> str:
    logs = [output_dir / "slurm.log", *sorted(output_dir.glob("logs/*.log"))]
    return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-5000:]}" for log in logs if log.exists())
