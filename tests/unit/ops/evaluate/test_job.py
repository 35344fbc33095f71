"""What `grpo eval` reads of a run, and what it refuses before an engine starts."""

import json
from pathlib import Path

import pytest

from grpo import cli
from grpo.ops.evaluate.job import read_job
from grpo.ops.train.demo import MODEL, demo_dataset
from grpo.record.files import HISTORY_FILE


def run_of(folder: Path, *command: str, ranks: int = 2) -> Path:
    """A checkpoint below a run that was started so."""
    attempt = {"command": [*command], "topology": {"world_size": ranks}}
    (folder / HISTORY_FILE).write_text(json.dumps({"attempts": [{"command": ["old.py"]}, attempt]}))
    checkpoint = folder / "checkpoint-30"
    checkpoint.mkdir()
    return checkpoint


def rows_in(folder: Path, name: str) -> str:
    (folder / name).write_text('{"prompt": "1+1=", "answer": "2"}\n')
    return str(folder / name)


def test_read_job_takes_task_from_run_command(tmp_path: Path) -> None:
    checkpoint = run_of(tmp_path, "train.py", "--bf16", "false", "--seed", "7", ranks=2)  # the demo
    job = read_job(checkpoint, ["--eval_temperature", "0"], [])
    assert (job.step, job.ranks, job.asked) == (30, 2, {None})
    assert len(job.sets[None]) == len(demo_dataset("test"))
    training = job.arguments.training
    assert (training.seed, training.eval_temperature, training.world_size) == (7, 0.0, 2)
    assert [func.__name__ for func in job.reward_funcs] == ["exact_match"]


def test_read_job_without_run_takes_task_from_flags(tmp_path: Path) -> None:
    sets = json.dumps({"a": rows_in(tmp_path, "a.jsonl"), "b": {"name": rows_in(tmp_path, "b.jsonl"), "split": "dev"}})
    data = ["--dataset_name", rows_in(tmp_path, "train.jsonl"), "--eval_datasets", sets]
    task = ["--model_name_or_path", str(MODEL), *data, "--reward_funcs", "exact_match", "--bf16", "false"]
    job = read_job(tmp_path, task, ["b"])
    assert (job.step, job.ranks, [*job.sets], job.asked) == (0, 1, ["a", "b"], {"b"})
    with pytest.raises(ValueError, match=r"--set c: the run has a, b"):
        read_job(tmp_path, task, ["c"])


def test_read_job_without_model_flag_uses_given_data_never_demo(tmp_path: Path) -> None:
    task = ["--reward_funcs", "exact_match", "--bf16", "false"]
    sets = json.dumps({"mine": rows_in(tmp_path, "a.jsonl")})
    job = read_job(tmp_path, [*task, "--eval_datasets", sets], [])
    assert ([*job.sets], len(job.sets["mine"])) == (["mine"], 1)
    job = read_job(
        tmp_path, [*task, "--dataset_name", rows_in(tmp_path, "b.jsonl"), "--dataset_test_split", "train"], []
    )
    assert len(job.sets[None]) == 1
    with pytest.raises(ValueError, match="no data to evaluate on: give --dataset_name or --eval_datasets"):
        read_job(tmp_path, task, [])


@pytest.mark.parametrize(
    ("command", "flags", "said"),
    [
        ((), [], "beside .* is no run.json, so nothing says what to evaluate"),
        (
            ("my_train.py", "--seed", "3"),
            [],
            "the run was started as my_train.py, whose data and rewards are its own",
        ),
        (
            ("train.py", "--data", "sums.jsonl"),
            [],
            "the run was started as train.py, whose data and rewards are its own",
        ),
        (("train.py", "--bf16", "false"), ["--eval_top_p", "7"], r"eval_top_p is 7.0; it is in \(0, 1\]"),
    ],
)
def test_read_job_with_unusable_run_or_flags_raises(
    command: tuple[str, ...], flags: list[str], said: str, tmp_path: Path
) -> None:
    checkpoint = run_of(tmp_path, *command)
    if not command:
        (tmp_path / HISTORY_FILE).unlink()
    with pytest.raises(ValueError, match=said):
        read_job(checkpoint, flags, [])


def test_eval_of_missing_folder_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["eval", str(tmp_path / "checkpoint-3")]) == 1
    assert "checkpoint-3 is no folder: give <output_dir>/checkpoint-<step>" in capsys.readouterr().err


def test_read_job_with_damaged_history_names_file(tmp_path: Path) -> None:
    checkpoint = run_of(tmp_path, "train.py")
    (tmp_path / HISTORY_FILE).write_text("{")
    with pytest.raises(ValueError, match=r"run\.json cannot be read: JSONDecodeError"):
        read_job(checkpoint, [], [])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("{", "eval_datasets is '{', which is no JSON object"),
        ('["a.jsonl"]', r"eval_datasets has \['a.jsonl'\] for eval_datasets: write a Hub id"),
        ('{"a": {"path": "x"}}', r"eval_datasets has {'path': 'x'} for a: write a Hub id, .* or an object of name"),
        ('{"a": "no.jsonl"}', r"eval_datasets\['a'\] is no.jsonl, but .* does not exist"),
    ],
)
def test_read_job_with_unreadable_eval_datasets_names_them(given: str, said: str, tmp_path: Path) -> None:
    data = ["--dataset_name", rows_in(tmp_path, "train.jsonl"), "--eval_datasets", given]
    task = ["--model_name_or_path", str(MODEL), *data, "--reward_funcs", "exact_match", "--bf16", "false"]
    with pytest.raises(ValueError, match=said):
        read_job(tmp_path, task, [])
