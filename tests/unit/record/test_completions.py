"""Samples of completions: which prompts, which rows, and a folder that stays bounded and readable."""

import hashlib
import json
import math
import threading
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from trl.trainer import grpo_trainer

from grpo.place.patches.trl import SAMPLE_PRINTER
from grpo.record import completions
from grpo.record.completions import (
    CompletionSamples,
    choose_prompts,
    plain_tool_calls,
    print_printable,
    printable,
    prompt_id,
    sampled_rows,
    text_of,
    weighted,
)


def logs(prompts: list[Any], completions: list[Any], **rewards: list[float]) -> dict[str, Any]:
    advantages = [float(index) for index in range(len(prompts))]
    return {"prompt": prompts, "completion": completions, "rewards": rewards, "advantages": advantages}


def facts(*rows: list[int]) -> list[list[int] | None]:
    return [*rows]


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ("plain", "plain"),
        ([{"role": "user", "content": "2+2?"}], "2+2?"),
        (
            [{"role": "system", "content": "Be short."}, {"role": "user", "content": "2+2?"}],
            "system: Be short.\n\nuser: 2+2?",
        ),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}], "a[image]"),
        ([{"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}], '[{"name": "add"}]'),
        ("half \ud83d", "half ?"),
        ([], ""),
    ],
)
def test_text_of_flattens_messages(messages: Any, text: str) -> None:
    assert text_of(messages) == text


def test_choose_prompts_picks_smallest_ids() -> None:
    assert prompt_id("2+2?") == hashlib.sha256(b"2+2?").hexdigest()[:8]
    ids = [prompt_id(f"{number}+1") for number in range(64)]
    chosen = choose_prompts([*ids, *ids], 8)
    assert chosen == set(sorted(ids)[:8])
    assert chosen & set(ids[:32]) <= choose_prompts(ids[:32], 8)  # whatever else is in the batch
    assert choose_prompts(ids[:2], 8) == set(ids[:2])
    assert choose_prompts(ids, 0) == set()


def test_sampled_rows_hold_logs_and_facts() -> None:
    batch = logs(
        [[{"role": "user", "content": "a"}]] * 2 + ["b"] * 2,
        [[{"role": "assistant", "content": "one"}], [{"role": "assistant", "content": "two"}], "three", "four"],
        right=[1.0, 0.0, math.nan, 0.5],
        short=[0.5, math.nan, math.nan, 1.0],
    )
    known = facts([0, 0, 3, 7, 2, 0], [0, 1, 3, 7, 9, 1], [1, 0, -1, 5, 1, 2], [1, 0, 3, 5, 4, 0])
    rows = sampled_rows(batch, known, num_prompts=8, reward_weights=[2.0, 1.0])
    assert [row["completion"] for row in rows] == ["one", "two", "three", "four"]
    assert rows[1] == {
        "prompt_id": prompt_id("a"),
        "prompt": "a",
        "completion": "two",
        "reward": 0.0,
        "rewards/right": 0.0,
        "rewards/short": None,
        "advantage": 1.0,
        "node": 0,
        "engine": 1,
        "policy_version": 3,
        "prompt_tokens": 7,
        "completion_tokens": 9,
        "stop_reason": "length",
    }
    assert [row["reward"] for row in rows] == [2.5, 0.0, None, 2.0]
    assert [row["stop_reason"] for row in rows] == ["stop", "length", "refused", "stop"]
    (smaller,) = choose_prompts([prompt_id("a"), prompt_id("b")], 1)
    rows = sampled_rows(batch, known, num_prompts=1, reward_weights=[2.0, 1.0])
    assert [row["prompt_id"] for row in rows] == [smaller] * 2  # every completion of it


def test_sampled_rows_with_duplicate_function_name_have_no_reward() -> None:
    (row,) = sampled_rows(logs(["a"], ["b"], both=[1.0]), facts([0] * 6), num_prompts=1, reward_weights=[1.0, 1.0])
    assert (row["reward"], row["rewards/both"]) == (None, 1.0)


def test_sampled_rows_skip_evaluation_rows() -> None:
    """TRL keeps both in the same place."""
    kept = [[0, 0, 0, 1, 2, 0], None, None]
    batch = logs(["a", "b", "c"], ["x", "y", "z"], right=[1.0, 1.0, 1.0])
    (row,) = sampled_rows(batch, kept, num_prompts=8, reward_weights=[1.0])
    assert (row["prompt"], row["completion_tokens"]) == ("a", 2)


@pytest.mark.parametrize(
    ("rewards", "weights", "total"),
    [([1.0, 0.5], [1.0, 2.0], 2.0), ([math.nan, 0.5], [1.0, 2.0], 1.0), ([math.nan], [1.0], None), ([], [], None)],
)
def test_weighted_sums_rewards_without_nan(rewards: list[float], weights: list[float], total: float | None) -> None:
    assert weighted(rewards, weights) == total


# -- files ------------------------------------------------------------------------------------------------------------


def row(text: str = "x", **changes: Any) -> dict[str, Any]:
    return {"prompt_id": "00ff", "prompt": "p", "completion": text, "reward": 1.0, "rewards/right": None} | changes


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def steps(folder: Path) -> list[int]:
    return [int(name[5:13]) for name in names(folder) if "/" not in name]


def test_samples_write_stores_all_columns(tmp_path: Path) -> None:
    samples = CompletionSamples(tmp_path / "completions")
    samples.write(10, 1, 7.5, [row(), row(reward=None, **{"rewards/right": 0.5})])
    samples.write(11, 1, 8.5, [])
    assert names(tmp_path) == ["completions/step-00000010.parquet"]
    table = pq.read_table(tmp_path / "completions" / "step-00000010.parquet")
    assert table.column_names[:3] == ["time", "attempt", "step"]
    assert table.to_pylist()[1] == {
        "time": 7.5,
        "attempt": 1,
        "step": 10,
        **row(reward=None, **{"rewards/right": 0.5}),
    }
    assert str(table.schema.field("rewards/right").type) == "double"
    samples.write(10, 1, 9.5, [row("again")])  # transformers logs once more at the end of training
    assert pq.read_table(tmp_path / "completions" / "step-00000010.parquet")["completion"].to_pylist() == ["again"]


def noise(number: int) -> str:
    """5 kB that do not compress to much less."""
    return np.random.default_rng(number).bytes(2500).hex()


def test_samples_folder_stays_below_max_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "completions_00001.parquet").write_bytes(b"x" * 10**6)  # TRL's: neither counted nor removed
    monkeypatch.setattr(completions, "MAX_BYTES", 60_000)
    samples = CompletionSamples(tmp_path)
    for step in range(1, 101):
        samples.write(step, 0, 1.0, [row(noise(step))])
    (tmp_path / "completions_00001.parquet").unlink()
    kept = steps(tmp_path)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 60_000
    assert (kept[0], kept[-1]) == (1, 100)
    assert len(kept) > 5
    assert kept[-3:] == [98, 99, 100]  # the newer, the denser


@pytest.mark.parametrize(("before", "after"), [(1, [1]), (2, [1, 2]), (3, [1, 3]), (4, [1, 4])])
def test_samples_over_max_bytes_keep_first_and_newest(
    tmp_path: Path, before: int, after: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completions, "MAX_BYTES", 10)
    samples = CompletionSamples(tmp_path)
    for step in range(1, before + 1):
        samples.write(step, 0, 1.0, [row()])
    assert steps(tmp_path) == after


def test_samples_over_max_bytes_thin_out_older_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(1, 9):
        CompletionSamples(tmp_path).write(step, 0, 1.0, [row(noise(step))])
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    monkeypatch.setattr(completions, "MAX_BYTES", size + 100)
    CompletionSamples(tmp_path).write(9, 0, 1.0, [row(noise(9))])
    assert steps(tmp_path) == [1, 3, 5, 6, 7, 8, 9]


def test_samples_cut_quarantines_later_steps(tmp_path: Path) -> None:
    folder = tmp_path / "completions"
    samples = CompletionSamples(folder)
    samples.cut(3, 0)
    assert not folder.exists()
    for step in (2, 3, 4, 6):
        samples.write(step, 0, 1.0, [row()])
    (folder / ".step-00000007.parquet.17.4").write_bytes(b"of a process that was killed")
    (folder / "completions_00006.parquet").touch()  # TRL's
    samples.cut(3, 0)
    assert names(folder) == [
        "attempt-0/step-00000004.parquet",
        "attempt-0/step-00000006.parquet",
        "completions_00006.parquet",
        "step-00000002.parquet",
        "step-00000003.parquet",
    ]
    CompletionSamples(folder).cut(0, 1)  # a fresh start in a used folder
    assert [name for name in names(folder) if "step" in name] == [
        "attempt-0/step-00000004.parquet",
        "attempt-0/step-00000006.parquet",
        "attempt-1/step-00000002.parquet",
        "attempt-1/step-00000003.parquet",
    ]


def test_samples_over_max_bytes_remove_quarantined_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = CompletionSamples(tmp_path)
    for attempt in (9, 10):
        samples.write(attempt, attempt, 1.0, [row(noise(attempt))])
        samples.cut(0, attempt)
    size = sum(path.stat().st_size for path in tmp_path.rglob("*.parquet"))
    monkeypatch.setattr(completions, "MAX_BYTES", size + 100)
    CompletionSamples(tmp_path).write(1, 11, 1.0, [row(noise(1))])
    assert names(tmp_path) == ["attempt-10/step-00000010.parquet", "step-00000001.parquet"]
    monkeypatch.setattr(completions, "MAX_BYTES", 10)
    CompletionSamples(tmp_path).write(2, 11, 1.0, [row()])
    assert names(tmp_path) == ["step-00000001.parquet", "step-00000002.parquet"]


def test_samples_write_during_reads_is_atomic(tmp_path: Path) -> None:
    samples, path = CompletionSamples(tmp_path), tmp_path / "step-00000001.parquet"
    samples.write(1, 0, 0.0, [row(noise(0))])
    is_over = threading.Event()

    def write() -> None:
        for number in range(100):
            samples.write(1, 0, float(number), [row(noise(number))] * (number + 1))
        is_over.set()

    thread = threading.Thread(target=write)
    thread.start()
    reads = 0
    while not is_over.is_set():
        with path.open("rb") as file:  # once: by its path pyarrow opens a file twice
            table = pq.read_table(file)
        assert table.num_rows == table["time"][0].as_py() + 1
        reads += 1
    thread.join()
    assert reads > 1
    assert names(tmp_path) == [path.name]


def test_samples_write_error_warns_once(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    (tmp_path / "completions").write_text("a file")
    samples = CompletionSamples(tmp_path / "completions")
    for step in (1, 2):
        samples.write(step, 0, 1.0, [row()])
    (reported,) = [str(warning.message) for warning in recwarn]
    assert reported.startswith(f"cannot write completions to {tmp_path / 'completions'}: ")


def test_plain_tool_calls_fit_into_parquet(tmp_path: Path) -> None:
    """In which a struct without fields, and numbers beside text, are errors (pyarrow 26)."""

    def said(*calls: Any) -> list[dict[str, Any]]:
        return [
            {"role": "assistant", "content": "", "tool_calls": [*calls]},
            {"role": "tool", "name": "a", "content": "b"},
            {"role": "assistant", "content": "c"},
        ]

    def call(**arguments: Any) -> dict[str, Any]:
        return {"type": "function", "function": {"name": "a", "arguments": arguments}}

    kept = deque([said(call()), said(call(a=1), call(a="x")), "text", said()], maxlen=4)
    logs = {"completion": kept}
    with plain_tool_calls(logs):
        pd.DataFrame({"completion": [*logs["completion"]][:2]}).to_parquet(tmp_path / "completions.parquet")
        first, second = logs["completion"][1][0]["tool_calls"]
        assert json.loads(second["function"]["arguments"]) == {"a": "x"}
        assert logs["completion"][2] == "text"
        assert logs["completion"].maxlen == 4
    assert logs["completion"] is kept
    assert kept[0][0]["tool_calls"] == [call()]
    assert first["function"]["name"] == "a"


def test_samples_write_with_space_left_does_not_rescan_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Path] = []
    iterdir = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda path: looked.append(path) or iterdir(path))
    samples = CompletionSamples(tmp_path)
    for step in range(1, 9):
        samples.write(step, 0, 1.0, [row(noise(step))])
        if step == 1:
            looked.clear()
    assert not looked


def test_printable_escapes_control_characters(capsys: pytest.CaptureFixture) -> None:
    text = "a\x1b[2J\x1b]52;c;aGk=\x07b\tc\nd\x9b31m\x7f é"
    messages = [{"role": "assistant", "content": text}]
    assert printable(messages) == [
        {
            "role": "assistant",
            "content": "a\\x1b[2J\\x1b]52;c;aGk=\\x07b\tc\nd\\x9b31m\\x7f é",
        }
    ]
    with SAMPLE_PRINTER.applied(print_printable):
        grpo_trainer.print_prompt_completions_sample([text], [messages], {"r": [1.0]}, [0.0], 1, extra={"more": [text]})
    printed = capsys.readouterr().out
    assert "x1b" in printed
    assert not set(printed) & {"\x1b", "\x07", "\x9b", "\x7f"}
