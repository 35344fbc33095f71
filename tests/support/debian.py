"""Debian packages that tests need: installed only where somebody has asked for it."""

import os
import shlex
import subprocess
from collections.abc import Sequence


def is_promised(variable: str) -> bool:
    """Whether `variable` (GRPO_TEST_SLURM, say) asks for an installation."""
    return os.environ.get(variable) == "install"


def install(packages: Sequence[str]) -> None:
    """Install them, as root."""
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in ("apt-get update", f"apt-get install --yes --no-install-recommends {' '.join(packages)}"):
        print(command, flush=True)
        subprocess.run(shlex.split(command), env=env, stdout=subprocess.DEVNULL, check=True)
