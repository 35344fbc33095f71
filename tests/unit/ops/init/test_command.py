"""`grpo init` in a checkout: what it writes, and what it refuses."""

import os
import re
import runpy
from pathlib import Path

import pytest
import yaml

from grpo import cli
from grpo.ops.init.command import init
from tests.support.launching import ROOT


def files(folder: Path) -> dict[str, Path]:
    return {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "deep" / "mine"
    init(folder)
    return folder


def test_init_copies_project_files(made: Path) -> None:
    found = files(made)
    for name, path in files(made / "configs").items() | files(made / "launch").items():
        original = ROOT / path.relative_to(made)
        assert path.read_bytes() == original.read_bytes(), name
        assert os.access(path, os.X_OK) == os.access(original, os.X_OK), name
    assert {f"configs/{path.name}" for path in (ROOT / "configs").iterdir() if path.is_file()} <= found.keys()
    scripts = {f"launch/{name}" for name in files(ROOT / "launch") if "__pycache__" not in name}
    assert scripts == {name for name in found if name.startswith("launch/")}
    assert found.keys() - scripts - {name for name in found if name.startswith("configs/")} == {"train.py"}
    assert not any(path.is_symlink() for path in made.rglob("*"))


def test_init_script_names_existing_launcher_files(made: Path) -> None:
    words = (made / "train.py").read_text().split()
    named = [words[index + 1] for index, word in enumerate(words) if word == "--config_file"]
    assert named
    for name in named:
        assert yaml.safe_load((made / name).read_text())["distributed_type"] == "DEEPSPEED"


def test_init_files_reference_only_existing_files(made: Path) -> None:
    """Configurations and scripts of ours; `my_run.yaml` and the like are the user's."""
    for name, path in files(made).items():
        for named in re.findall(r"\b(?:configs|launch|examples)/[\w./-]*\w\.\w+", path.read_text()):
            assert (made / named).exists(), f"{name} names {named}"


def test_init_command_prints_written_files_and_next_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert cli.main(["init", str(tmp_path / "empty")]) == 0
    said = capsys.readouterr().out
    assert f"{tmp_path}/empty: configs/, launch/, train.py\n" in said
    assert "\n  grpo launch train.py    " in said
    assert "\n  grpo launch --nodes a,b train.py    " in said


def test_init_in_nonempty_folder_fails_and_lists_contents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(7):
        (tmp_path / f"note-{number}").touch()
    before = files(tmp_path)
    assert cli.main(["init", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert f"{tmp_path} is not empty" in said
    assert "note-0, note-1, note-2, note-3, note-4 and 2 more" in said
    assert files(tmp_path) == before
    assert cli.main(["init", str(tmp_path / "note-3")]) == 1
    assert "note-3 is a file" in capsys.readouterr().err


def test_init_script_refuses_abbreviated_flag_and_prints_help(
    made: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, code in ((["--learning_rat", "3"], 1), (["--help"], 0)):
        monkeypatch.setattr("sys.argv", ["train.py", *words])
        with pytest.raises((SystemExit, ValueError)) as ended:
            runpy.run_path(str(made / "train.py"), run_name="__main__")
        assert getattr(ended.value, "code", 1) == code
    shown = capsys.readouterr().out.strip().splitlines()
    assert shown[0] == "usage: train.py [--config FILE.yaml] [--OPTION VALUE ...]"
    assert "--help | less" in " ".join(shown[-3:])
    assert "allow_abbrev=False" in (ROOT / "README.md").read_text()
