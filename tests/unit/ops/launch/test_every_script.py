"""What is said of all scripts in launch/."""

import re
import subprocess

import pytest

from tests.support.machine import LAUNCH

SCRIPTS = ("train.sbatch", "train_torchrun.sbatch", "slurm_job.sh", "local_2node.sh")


def test_launch_scripts_are_all_covered() -> None:
    files = {str(path.relative_to(LAUNCH)) for path in LAUNCH.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert files == {*SCRIPTS, "k8s/job.yaml"}


@pytest.mark.parametrize("name", SCRIPTS)
def test_launch_script_parses_in_bash(name: str) -> None:
    done = subprocess.run(["bash", "-n", str(LAUNCH / name)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", ["train.sbatch", "train_torchrun.sbatch", "local_2node.sh", "k8s/job.yaml"])
def test_launch_script_header_explains_start_follow_and_stop(name: str) -> None:
    comment = re.split(r"^(?:[^#\n]|#SBATCH|$)", (LAUNCH / name).read_text(), maxsplit=1, flags=re.MULTILINE)[0]
    assert re.findall(r"^# (start|follow|stop) ", comment, re.MULTILINE) == ["start", "follow", "stop"]
    assert name in comment, "how to start it names the file"
