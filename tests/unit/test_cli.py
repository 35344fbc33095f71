"""The command `grpo`, also as `python -m grpo`."""

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import grpo
from grpo import cli
from grpo.place.same_everywhere import DISTRIBUTION


def test_version_option_prints_package_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"grpo {grpo.__version__}\n"
    assert metadata.version(DISTRIBUTION) == grpo.__version__


def test_python_m_grpo_help_lists_commands() -> None:
    result = subprocess.run([sys.executable, "-m", "grpo", "--help"], capture_output=True, text=True)
    assert result.returncode == 0
    assert result.stdout.startswith("usage: grpo ")
    assert all(name in result.stdout for name in cli.COMMANDS)


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_constraints_command_prints_constraints_file(backend: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["constraints", backend]) == 0
    root = Path(__file__).resolve().parents[2]
    assert capsys.readouterr().out == (root / "constraints" / f"{backend}.txt").read_text()


def test_train_module_with_unknown_flag_fails_without_traceback() -> None:
    command = [sys.executable, "-m", "grpo.train", "--reward_funcs", "accuracy_reward", "--no_such_flag"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1
    assert "no_such_flag" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "words", [["export", "{}", "out"], ["reshape", "{}", "--ranks", "3"]], ids=lambda words: words[0]
)
@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("run", r"output folder of a run.*: \S+/checkpoint-10, \S+/checkpoint-3$"),
        ("run/checkpoint-4", r"checkpoint-4 does not exist; the newest there are: checkpoint-10, checkpoint-3$"),
        ("nope", r"nope does not exist$"),
    ],
)
def test_export_and_reshape_with_wrong_path_explain_error(
    words: list[str], named: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (3, 10):
        (tmp_path / "run" / f"checkpoint-{step}").mkdir(parents=True)
    assert cli.main([word.format(tmp_path / named) for word in words]) == 1
    assert re.search(said, capsys.readouterr().err.strip())


@pytest.mark.parametrize("option", ["--main_process_port", "--main-process-port"])
def test_launch_option_with_dash_or_underscore_is_parsed(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ports: list[int] = []
    monkeypatch.setattr("grpo.ops.launch.command.run", lambda args: ports.append(args.main_process_port) or 0)
    assert cli.main(["launch", option, "5", "--output_dir", "out", "train.py", "--its_own", "--and-this"]) == 0
    assert ports == [5]


def test_plan_with_training_flag_hints_at_double_dash(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["plan", "--num_processes", "7", "--learning_rate", "1"])
    assert "unrecognized arguments: --learning_rate; flags of train.py follow behind ` -- `" in capsys.readouterr().err
