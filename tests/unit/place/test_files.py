"""What a job's files and flags ask for, with flags and files of which not all are ours."""

from pathlib import Path

import pytest

from grpo.place.files import read_settings, read_wishes, settings_of

TABS = '{\n\t"fp16": {\n\t\t"enabled": true\n\t}\n}\n'


def test_read_wishes_with_bare_flag_of_script_ignores_it(capsys: pytest.CaptureFixture[str]) -> None:
    """A bare `--deepspeed`, say, with which a script of one's own takes a file that it knows."""
    for flag in ("--deepspeed", "--config", "--vllm_reserved_gpus"):
        wishes = read_wishes([flag, "--use_cpu", "--vllm_tensor_parallel_size", "2"])
        assert (wishes.use_cpu, wishes.tensor_parallel_size, wishes.reserved_gpus) == (True, 2, None)
        assert read_wishes(["--use_cpu", flag]).use_cpu
    assert capsys.readouterr().err == ""


def test_read_settings_of_json_accepts_tabs(tmp_path: Path) -> None:
    file = tmp_path / "zero3.json"
    file.write_text(TABS)
    assert read_settings(str(file)) == {"fp16": {"enabled": True}}
    assert "float16" in read_wishes(["--deepspeed", str(file)]).dtypes
    assert "float16" in read_wishes([], config_file=str(file)).dtypes
    file.write_text(TABS.replace("true", "true,,"))
    with pytest.raises(ValueError, match=r"zero3\.json cannot be read: line 3, column 19: Expecting property name"):
        read_settings(str(file))


def test_settings_of_json_named_file_refuses_tabs_as_yaml(tmp_path: Path) -> None:
    """As YAML, whatever its name."""
    (tmp_path / "train.json").write_text(TABS)
    with pytest.raises(ValueError, match=r"train\.json cannot be read: line 2, column 1: .* not with tabs"):
        settings_of(["--config", str(tmp_path / "train.json")])


def test_read_wishes_without_reading_files_accepts_foreign_ones(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("[model]\nname = 'm'\n")
    arguments = ["--config", str(tmp_path / "mine.toml"), "--deepspeed", "stage3", "--use_cpu"]
    with pytest.raises(ValueError, match=r"mine\.toml"):
        read_wishes(arguments)
    assert read_wishes(arguments, reads_files=False).use_cpu


def test_settings_of_swapped_files_raise_with_right_option(tmp_path: Path) -> None:
    accelerates, training = tmp_path / "1node.yaml", tmp_path / "mine.yaml"
    accelerates.write_text("distributed_type: DEEPSPEED\nnum_processes: 7\n")
    training.write_text("learning_rate: 1.0e-6\nmax_steps: 3\n")
    with pytest.raises(
        ValueError,
        match=rf"is accelerate's file \(distributed_type\): the launcher takes it, as --config_file {accelerates}",
    ):
        settings_of(["--config", str(accelerates)])
    for read in (lambda file: read_settings(file, "--config_file"), lambda file: read_wishes([], config_file=file)):
        with pytest.raises(ValueError, match=rf"is a training file \(learning_rate\): write --config {training}"):
            read(str(training))
    assert read_wishes(["--config", str(training)], config_file=str(accelerates)).has_engines
