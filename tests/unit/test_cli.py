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


def test_the_recipe_is_a_module_too() -> None:
    command = [sys.executable, "-m", "grpo.train", "--reward_funcs", "accuracy_reward", "--no_such_flag"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1
    assert "no_such_flag" in result.stderr
    assert "Traceback" not in result.stderr
