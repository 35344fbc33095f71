"""TensorBoard, W&B and Trackio see one run, whose second attempt goes on from a checkpoint of the first."""

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.launching import ROOT, Job, start, tiny_job_script, torchrun_command

JOB_S = 300
WANDB_BLOCK = 32 * 1024
CONFIG = {
    "report_to": ["tensorboard", "wandb", "trackio"],
    "deepspeed": str(ROOT / "configs" / "zero3.json"),
    "save_strategy": "steps",
    "save_steps": 2,
    "log_completions": True,
    "num_completions_to_print": 1,
}


def attempt(model: Path, run: Path, number: int, **config: object) -> Job:
    """One rank and its engine; it has ended well, and left no process, whatever the trackers started."""
    script = tiny_job_script(model, run, config={**CONFIG, **config})
    env = {
        "GRPO_JOB": "77",
        "GRPO_ATTEMPT": str(number),
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(run),
        "TRACKIO_DIR": str(run / "trackio"),
    }
    job = start(lambda _: torchrun_command(script, ranks=1), run, env=env)
    try:
        assert job.wait(JOB_S) == [0], job.fail("the job failed")
    finally:
        job.end()
    return job


def tracker_run(run: Path) -> str:
    return json.loads((run / "run_state.json").read_text())["tracker_run"]


@pytest.mark.long
def test_trackers_over_two_attempts_show_one_run(tiny_model: Path, tmp_path: Path) -> None:
    """The first logs step 3, but the second goes on from the checkpoint of step 2."""
    run = tmp_path / "run"
    attempt(tiny_model, run, 0, max_steps=3)
    name = tracker_run(run)
    job = attempt(tiny_model, run, 1, max_steps=4, resume_from_checkpoint=str(run / "checkpoint-2"))
    assert tracker_run(run) == name
    assert [line["step"] for line in job.metrics()] == [1, 2, 3, 4]

    rewards = {line["step"]: line["reward"] for line in job.metrics()}
    check_tensorboard(run / "tensorboard", name, rewards)
    check_wandb(run / "wandb", name, rewards)
    check_trackio(run / "trackio", f"run-{name}", rewards)


def check_tensorboard(folder: Path, name: str, rewards: dict[int, float]) -> None:
    """One folder is one run, in which each step stands once: what the first attempt wrote of step 3 is forgotten."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert [each.name for each in folder.iterdir()] == [name]
    events = EventAccumulator(str(folder / name))
    events.Reload()
    found = [(event.step, round(event.value, 5)) for event in events.Scalars("train/reward")]
    assert found == [(step, round(reward, 5)) for step, reward in rewards.items()]


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of W&B's file: LevelDB's log format behind 7 bytes. No Python of wandb reads it any more (0.31)."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, whole = path.read_bytes(), 7, b""
    assert content.startswith(b":W&B")
    while at < len(content):
        if (left := WANDB_BLOCK - at % WANDB_BLOCK) < 7:  # too short for a header: zeros
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", content[at : at + 7])
        whole += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record = Record()
            record.ParseFromString(whole)
            yield record
            whole = b""
    assert not whole


def check_wandb(folder: Path, name: str, rewards: dict[int, float]) -> None:
    """What `wandb sync` would send: a file for each attempt under the run's id; the last word on a step is right."""
    files = sorted(folder.glob("offline-run-*/run-*.wandb"))
    assert [path.name for path in files] == [f"run-{name}.wandb"] * 2
    logged: list[dict[int, float]] = []
    tables = []
    for path in files:
        logged.append({})
        for record in wandb_records(path):
            if record.WhichOneof("record_type") == "run":
                assert (record.run.run_id, record.run.display_name) == (name, f"run-{name}")
            row = {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
            if "train/reward" in row:
                logged[-1][json.loads(row["train/global_step"])] = json.loads(row["train/reward"])
            if "completions" in row or "completions._type" in row:
                tables.append(row)
    assert [list(steps) for steps in logged] == [[1, 2, 3], [3, 4]]
    assert {**logged[0], **logged[1]} == rewards
    media = [json.loads(path.read_text()) for path in folder.glob("offline-run-*/files/media/table/*.json")]
    assert len(tables) == len(media) > 0
    check_tables([[dict(zip(each["columns"], row, strict=True)) for row in each["data"]] for each in media])


def check_tables(tables: list[list[dict]]) -> None:
    """Those of every logged step, and once more at the end of each attempt, as TRL does (1.16)."""
    assert sorted(table[0]["step"] for table in tables) == [1, 2, 3, 3, 3, 4, 4]
    for table in tables:
        assert len(table) == 8
        assert all(row.keys() == {"step", "prompt", "completion", "reward", "advantage"} for row in table)
        assert all("+" in row["prompt"] and isinstance(row["reward"], float) for row in table)


TRACKIO_SAYS = """
import json
from trackio.sqlite_storage import SQLiteStorage
(project,) = SQLiteStorage.get_projects()
(run,) = SQLiteStorage.get_runs(project)
print("SAYS", json.dumps({"run": run, "rows": SQLiteStorage.get_logs(project, run)}))
"""


def check_trackio(folder: Path, name: str, rewards: dict[int, float]) -> None:
    env = {**os.environ, "TRACKIO_DIR": str(folder)}  # read at the import
    said = subprocess.run([sys.executable, "-c", TRACKIO_SAYS], env=env, capture_output=True, text=True, timeout=120)
    assert said.returncode == 0, said.stderr
    found = json.loads(said.stdout.partition("SAYS ")[2])
    assert found["run"] == name
    rows = [row for row in found["rows"] if "train/reward" in row]
    numbers = [row["step"] for row in rows]
    assert numbers == sorted(set(numbers)), "the second attempt counts on"
    assert [row["train/global_step"] for row in rows] == [1, 2, 3, 3, 4]
    assert {row["train/global_step"]: row["train/reward"] for row in rows} == rewards
    tables = [row["completions"] for row in found["rows"] if "completions" in row]
    assert all(table["_type"] == "trackio.table" for table in tables)
    check_tables([table["_value"] for table in tables])
