"""Who reports a mistake, in which words, and what torchrun and the scheduler read; in processes of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from trl import TrlParser

from grpo import GRPOConfig
from grpo.faults.failure import FailureKind, FailureRecord, JobFailed
from grpo.ops.mistakes import MAX_LINES, message_of, reporting_mistakes
from grpo.record.files import read_failure_note, read_run_state
from tests.support.launching import ROOT

DEADLINE_S = 60
HEAD = "import sys\nfrom grpo.ops.mistakes import reporting_mistakes\n"


def program(folder: Path, body: str, *, rank: int = 0, **env: str) -> tuple[subprocess.Popen, Path]:
    """`body` as a rank's program, and where torchrun would look for its error."""
    script = folder / "script.py"
    script.write_text(HEAD + body)
    error_file = folder / "attempt_0" / str(rank) / "error.json"
    error_file.parent.mkdir(parents=True)
    ranks = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    process = subprocess.Popen(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TORCHELASTIC_ERROR_FILE": str(error_file), **ranks, **env},
        stderr=subprocess.PIPE,
        text=True,
    )
    return process, error_file


def run(folder: Path, body: str, **env: str) -> tuple[int, str, dict]:
    """Exit code, stderr, and what stands in torchrun's file; {} without one."""
    process, error_file = program(folder, body, **env)
    _, errors = process.communicate(timeout=DEADLINE_S)
    return process.returncode, errors, json.loads(error_file.read_text()) if error_file.exists() else {}


def test_report_of_user_error_prints_once(tmp_path: Path) -> None:
    body = (
        "with reporting_mistakes():\n"
        "    with reporting_mistakes(sys.path[0] + '/out'):\n"
        "        raise ValueError('beta is x: write a number')\n"
    )
    code, errors, record = run(tmp_path, body, GRPO_JOB="17")
    assert code == 1
    assert errors.splitlines() == [
        "[grpo] beta is x: write a number",
        f"  in {tmp_path}/script.py:5, in <module>: raise ValueError('beta is x: write a number')",
    ]
    extra = record["message"]["extraInfo"]
    assert extra["py_callstack"] == record["message"]["message"] == errors.removeprefix("[grpo] ").rstrip("\n")
    state = read_run_state(tmp_path / "out")
    assert state is not None
    assert (state.state, state.kind, state.job) == ("failed", "user", "17")


def test_report_with_traceback_variable_prints_traceback(tmp_path: Path) -> None:
    code, errors, record = run(tmp_path, "with reporting_mistakes():\n    raise ValueError('x')\n", GRPO_TRACEBACK="1")
    assert code == 1
    assert errors.startswith("[grpo] x\n")
    assert "Traceback (most recent call last)" in errors
    assert "Traceback (most recent call last)" in record["message"]["extraInfo"]["py_callstack"]


def test_report_of_out_of_memory_names_phase_and_settings(tmp_path: Path) -> None:
    """With the phase, what was asked for, who holds the rest, and two settings."""
    body = (
        "import torch\n"
        "def compute_loss():\n"
        "    raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity "
        "of 80.00 GiB of which 1.00 GiB is free. Including non-PyTorch memory, this process has 79.00 GiB memory')\n"
        "with reporting_mistakes(sys.path[0] + '/out'):\n"
        "    compute_loss()\n"
    )
    code, errors, record = run(tmp_path, body, GRPO_JOB="17")
    assert code == 1
    error, figures, advice, page, where = errors.splitlines()
    assert error == "[grpo] OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    assert figures.endswith("asked for 2.00, free 1.00 of 80.00, held by this process 79.00, by others 0.00")
    assert advice.startswith("in the forward pass [GRPO-631]: halve per_device_train_batch_size ")
    assert "docs/out_of_memory.md" in page
    assert "in compute_loss: " in where
    assert "Traceback" not in record["message"]["extraInfo"]["py_callstack"]
    state = read_run_state(tmp_path / "out")
    assert state is not None
    assert (state.state, state.kind) == ("failed", "memory")


def test_report_of_non_user_error_keeps_traceback(tmp_path: Path) -> None:
    code, errors, record = run(tmp_path, "with reporting_mistakes():\n    raise RuntimeError('CUDA error: ECC')\n")
    assert code == 1
    assert errors.startswith("Traceback (most recent call last)")
    assert record["message"]["message"] == "RuntimeError: CUDA error: ECC"
    extra = record["message"]["extraInfo"]
    assert extra["py_callstack"].startswith("Traceback")


@pytest.mark.parametrize(("ending", "code", "recorded"), [("2", 2, True), ("0", 0, False), ("", 0, False)])
def test_report_of_sys_exit_records_only_nonzero_code(ending: str, code: int, recorded: bool, tmp_path: Path) -> None:
    body = f"with reporting_mistakes(sys.path[0] + '/out'):\n    sys.exit({ending})\n"
    found_code, errors, record = run(tmp_path, body)
    assert (found_code, errors) == (code, ""), "argparse has said why"
    assert bool(record) == recorded, "a launcher leaves its own noise out"
    assert (read_run_state(tmp_path / "out") is not None) == recorded


def test_report_on_other_rank_is_silent_and_writes_error_file(tmp_path: Path) -> None:
    body = "with reporting_mistakes(sys.path[0] + '/out'):\n    raise ValueError('x')\n"
    other, error_file = program(tmp_path, body, rank=1)
    try:
        while not error_file.exists():
            assert other.poll() is None, "it ended before it wrote"
        first = run(tmp_path, body)
        _, errors = other.communicate(timeout=DEADLINE_S)
    finally:
        other.kill()
    assert (first[0], other.returncode, errors) == (1, 1, "")
    assert json.loads(error_file.read_text())["message"]["message"].startswith("x\n")


def test_report_of_error_in_user_code_names_its_line(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def reward(**kwargs):\n    return kwargs['answer']\n")
    code, errors, _ = run(tmp_path, "import mine\nwith reporting_mistakes():\n    mine.reward()\n")
    assert code == 1
    assert errors.splitlines() == [
        "[grpo] KeyError: 'answer'",
        f"  in {tmp_path}/mine.py:2, in reward: return kwargs['answer']",
    ]


def test_report_of_syntax_error_names_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def reward(:\n")
    _, errors, _ = run(tmp_path, "with reporting_mistakes():\n    import mine\n")
    assert errors.splitlines() == [f"[grpo] {tmp_path}/mine.py:1: invalid syntax: def reward(:"]


def test_message_of_long_error_is_cut() -> None:
    lines = message_of(ValueError("\n\n".join(f"line {index}" for index in range(50)))).splitlines()
    assert len(lines) == MAX_LINES
    assert (lines[0], lines[-1]) == ("line 0", "… (45 more lines)")


def test_message_of_other_rank_error_names_rank_and_host() -> None:
    record = FailureRecord(node=1, rank=5, host="b", phase="start", cause="ValueError: no data", kind=FailureKind.USER)
    assert message_of(JobFailed(record)) == "no data (rank 5 on b)"
    record = FailureRecord(node=1, rank=5, host="b", phase="train", cause="full\nadvice", kind=FailureKind.MEMORY)
    assert message_of(JobFailed(record)) == "full\nadvice (rank 5 on b)"


def test_report_of_job_failed_on_unnamed_rank_is_one_line(tmp_path: Path) -> None:
    """Its own traceback shows where it has waited; the rank that is named keeps its own."""
    body = (
        "from grpo.faults.failure import FailureRecord, JobFailed\n"
        "record = FailureRecord(node=0, rank=1, host='a', phase='train', cause='it died [GRPO-601]')\n"
        "with reporting_mistakes():\n"
        "    raise JobFailed(record) from ConnectionError('reset by peer')\n"
    )
    words = "the job failed on node 0 (a), rank 1, phase 'train': it died [GRPO-601]"
    code, errors, record = run(tmp_path, body)
    assert (code, errors) == (1, f"[grpo] rank 0 ends: {words}\n")
    assert record["message"]["extraInfo"]["py_callstack"] == f"JobFailed: {words}"
    for ranks, folder in (({"rank": 1}, "named"), ({"GRPO_TRACEBACK": "1"}, "asked")):
        (tmp_path / folder).mkdir()
        process, error_file = program(tmp_path / folder, body, **ranks)
        _, errors = process.communicate(timeout=DEADLINE_S)
        assert "Traceback (most recent call last)" in errors
        assert "reset by peer" in json.loads(error_file.read_text())["message"]["extraInfo"]["py_callstack"]


def test_report_of_error_shared_by_all_ranks_names_no_rank(capsys: pytest.CaptureFixture[str]) -> None:
    """Another rank was first to record it: rank 0 raises that record from its own error."""
    record = FailureRecord(node=0, rank=1, host="a", phase="start", cause="ValueError: no data", kind=FailureKind.USER)
    before = sys.excepthook
    try:
        with pytest.raises(JobFailed), reporting_mistakes():
            raise JobFailed(record) from ValueError("no data")
    finally:
        sys.excepthook = before
    assert capsys.readouterr().err == "[grpo] no data\n"


def test_report_behind_first_step_shows_traceback_of_trainer_errors_alone(tmp_path: Path) -> None:
    """One from the trainer under the script keeps it on the screen: the script's line explains nothing."""
    behind = "from grpo.faults.kinds import note_steps\nnote_steps(3)\nwith reporting_mistakes():\n"
    for folder in ("own", "trainers"):
        (tmp_path / folder).mkdir()
    process, _ = program(tmp_path / "own", f"{behind}    {{}}['answer']\n", rank=1)
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert errors == f"[grpo] KeyError: 'answer'\n  in {tmp_path}/own/script.py:6, in <module>: {{}}['answer']\n"
    body = f"{behind}    from grpo.place.spelling import did_you_mean\n    did_you_mean(3, [])\n"
    _, errors, _ = run(tmp_path / "trainers", body)
    assert "Traceback" in errors
    assert "AttributeError: 'int' object has no attribute 'lstrip'" in errors


def test_failure_note_behind_first_step_records_step(tmp_path: Path) -> None:
    """Its launcher would otherwise end the job: as a mistake that no start mends."""
    body = (
        "from grpo.faults.kinds import note_steps\nnote_steps(3)\nwith reporting_mistakes():\n    raise KeyError(1)\n"
    )
    run(tmp_path, body, GRPO_RUN_NOTE=str(tmp_path / "note"))
    noted = read_failure_note(tmp_path / "note")
    assert noted is not None
    assert (noted["kind"], noted["step"]) == ("user", 3)


def test_message_of_unknown_yaml_keys_names_file_and_suggestion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (file := tmp_path / "my.yaml").write_text("output_dir: out\nuse_cpu: true\nbf16: false\nsave_stepz: 5\n")
    monkeypatch.setattr(sys, "argv", ["train.py", "--config", str(file)])
    with pytest.raises(ValueError, match="Unknown arguments from config file") as raised:
        TrlParser([GRPOConfig]).parse_args_and_config()
    said = message_of(raised.value).splitlines()[0]
    assert said == f"unknown options in {file}: save_stepz (did you mean save_steps?)"


def test_message_of_unknown_flags_names_suggestions() -> None:
    """As a script of the user's own meets them, whose parser is TRL's."""
    raised = ValueError(
        "Some specified arguments are not used by the HfArgumentParser: ['--max_step', '5', '--learning_rat=1e-3']"
    )
    assert message_of(raised) == (
        "unknown options: --max_step (did you mean --max_steps?), --learning_rat=1e-3 (did you mean --learning_rate?)"
    )


def test_message_of_error_with_note_includes_note() -> None:
    error = ValueError("cannot score a nine")
    error.add_note("reward function reward raised ValueError")
    assert message_of(error) == "cannot score a nine\nreward function reward raised ValueError"
