"""The command around the checks: words that are none, checks that fail by themselves, the shared file, the table."""

import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from grpo.cli import main
from grpo.ops.doctor import report, shared_file, table
from grpo.ops.doctor.records import DoctorVerdict, Finding, Status
from grpo.ops.doctor.report import examine
from grpo.place.files import read_wishes
from tests.support.launching import ROOT

PASS, WARN, FAIL = Status.PASS, Status.WARN, Status.FAIL


def test_doctor_with_stray_word_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--nodes", "n1", "n2", "--node-name", "n1"]) == 2
    assert "grpo doctor: n2 is no option" in capsys.readouterr().err


def test_doctor_import_loads_no_engine_or_trainer() -> None:
    code = "import sys, grpo.ops.doctor.rounds, grpo.ops.doctor.bandwidth; print('\\n'.join(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"vllm", "deepspeed", "trl", "transformers"} & set(loaded)


def test_check_with_own_error_becomes_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def reported(error: Exception) -> Finding:
        def check() -> Finding:
            raise error

        found = report._with_deadline("disk", check)
        assert isinstance(found, Finding)
        return found

    hanging, broken = reported(TimeoutError("no answer within 20 s")), reported(PermissionError("not yours"))
    assert (hanging.status, hanging.message) == (FAIL, "no answer within 20 s")
    assert (broken.status, broken.message) == (WARN, "could not be checked: PermissionError: not yours")


def test_sees_file_in_missing_folder_is_false(tmp_path: Path) -> None:
    assert not shared_file.sees_file(tmp_path / "gone" / "file", "text")
    (tmp_path / "file").write_text("text")
    assert shared_file.sees_file(tmp_path / "file", "text")


def test_find_shared_file_on_hanging_mount_is_false(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(path: Path, text: str) -> bool:
        raise TimeoutError

    monkeypatch.setattr(shared_file, "sees_file", hang)
    assert not shared_file.find_shared_file(tmp_path / "file", "text")


def test_find_shared_file_waits_for_late_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_file.time, "sleep", lambda _: (tmp_path / "file").write_text("text"))
    assert shared_file.find_shared_file(tmp_path / "file", "text")


def test_doctor_table_merges_passes_into_one_row() -> None:
    findings = [
        Finding(check="disk", status=PASS, message="5 GiB", nodes=("a",)),
        Finding(check="disk", status=PASS, message="6 GiB", nodes=("b",)),
        Finding(check="disk", status=FAIL, message="0 GiB", fix="more", nodes=("c",)),
    ]
    assert [(row.status, row.message, row.nodes) for row in table.rows(findings)] == [
        (FAIL, "0 GiB", ("c",)),
        (PASS, "e.g. 5 GiB", ("a", "b")),
    ]


@pytest.mark.parametrize(("status", "is_reported"), [(Status.PASS, True), (Status.FAIL, False)])
def test_doctor_table_prints_next_step_unless_verdict_fails(
    status: Status, is_reported: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    verdict = DoctorVerdict(nodes=("a", "b"), findings=(Finding(check="disk", status=status, message="5 GiB"),))
    table.show(verdict, as_json=False, next_step="then start the second stage")
    assert ("then start the second stage" in capsys.readouterr().out) is is_reported


@pytest.mark.parametrize(
    ("flags", "launcher", "dtypes"),
    [
        ([], "4node.yaml", ["bfloat16"]),  # the demo has no format of its own: the launcher's counts
        ([], "cpu.yaml", []),
        (["--model_name_or_path", "m"], "cpu.yaml", ["bfloat16"]),  # TRL's default
        (["--model_name_or_path", "m", "--bf16", "false"], "cpu.yaml", []),
        (["--fp16"], "zero3.json", ["float16"]),
        (["--config", "configs/train/gsm8k_qwen2.5_7b.yaml"], None, ["bfloat16"]),
        (["--bf16", "--deepspeed", '{"communication_data_type": "fp16"}'], None, ["bfloat16", "float16"]),
        (["--deepspeed", '{"bf16": {"enabled": true}}'], None, ["bfloat16"]),
    ],
)
def test_read_wishes_finds_dtypes_of_job(flags: list[str], launcher: str | None, dtypes: list[str]) -> None:
    flags = [str(ROOT / flag) if flag.startswith("configs/") else flag for flag in flags]
    file = None if launcher is None else str(ROOT / "configs" / launcher)
    assert read_wishes(flags, config_file=file).dtypes == ("float32", *dtypes)


def test_read_wishes_of_file_without_settings_raises(tmp_path: Path) -> None:
    (tmp_path / "train.yaml").write_text("- 1\n")
    with pytest.raises(ValueError, match=r"train.yaml holds no settings, but \[1\]"):
        read_wishes(["--config", str(tmp_path / "train.yaml")])


def test_examine_checks_requested_model_and_dataset(tmp_path: Path) -> None:
    nothing = tmp_path / "model"
    nothing.mkdir()
    asked = Namespace(gpus_per_node=None, output_dir=None, model=str(nothing), dataset=str(tmp_path))
    found = {finding.check: finding.status for finding in examine("a", asked, None, {}, peers=()).findings}
    assert (found["model"], found["dataset"]) == (FAIL, PASS)
