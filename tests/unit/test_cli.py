"""The command `grpo`, also as `python -m grpo`."""

import subprocess
import sys
from importlib import metadata

import pytest

import grpo
from grpo import cli
from grpo.place.same_everywhere import DISTRIBUTION


def test_its_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"grpo {grpo.__version__}\n"
    assert metadata.version(DISTRIBUTION) == grpo.__version__


def test_it_runs_as_a_module() -> None:
    result = subprocess.run([sys.executable, "-m", "grpo", "--help"], capture_output=True, text=True)
    assert result.returncode == 0
    assert result.stdout.startswith("usage: grpo ")
    assert all(name in result.stdout for name in cli.COMMANDS)
