"""What counts as a complete checkpoint, who answers for which file, and what a damaged one says."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo.checkpoints import checkpoints
from grpo.checkpoints.checkpoints import (
    CompleteRecord,
    Damaged,
    check_reshaped,
    check_world_size,
    newest_complete,
    read_complete,
    read_rank_records,
    shares,
    verify,
    write_complete,
    write_rank_record,
    writer_of,
)
from grpo.record.durable import sum_of
from tests.support.made_up_checkpoints import FILES, SAMPLING, fill, make, names

RECORDS = ["files-0.json", "files-1.json"]


def test_complete_record_lists_files_checksums_and_versions(tmp_path: Path) -> None:
    record = read_complete(make(tmp_path, 3))
    assert (record.step, record.world_size) == (3, 2)
    assert sorted(record.files) == sorted([*FILES, *RECORDS])
    assert record.checksums.keys() == record.files.keys()
    assert record.files["latest"] == 10
    assert record.checksums["latest"] == 0xA684C7C6  # CRC-32 of 0123456789
    assert record.versions["torch"]
    assert not list(tmp_path.glob("**/.*"))  # no draft is left, and nothing says that it is partial


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("model.safetensors", 0),
        ("global_step3/zero_pp_rank_1_mp_rank_00_model_states.pt", 1),
        ("global_step3/bf16_zero_pp_rank_12_mp_rank_00_optim_states.pt", 12),
        ("global_step3/mp_rank_00_model_states.pt", 0),
        ("rng_state_3.pth", 3),
        ("rng_state.pth", 0),
        ("rollout_state_15.pt", 15),
        ("rollout_state_16.pt", 0),  # of no rank of this job: rank 0 has found it
        ("global_step3/offloaded_tensors/rank02/7.swp", 2),
    ],
)
def test_writer_of_file_name_returns_rank(name: str, rank: int) -> None:
    assert writer_of(name, 16) == rank


def test_read_rank_records_returns_own_files_and_missing_ranks(tmp_path: Path) -> None:
    folder = fill(tmp_path / "checkpoint-3")
    write_rank_record(folder, 1, 2)
    sums, missing = read_rank_records(folder, range(2))
    assert missing == [0]
    assert sorted(sums) == [
        "files-1.json",
        "global_step3/bf16_zero_pp_rank_1_mp_rank_00_optim_states.bin",
        "rollout_state_1.bin",
    ]
    write_rank_record(folder, 0, 2)
    sums, missing = read_rank_records(folder, range(2))
    assert missing == []
    assert sorted(sums) == sorted([*FILES, *RECORDS])


@pytest.mark.parametrize("name", [*FILES, *RECORDS])
def test_read_complete_with_missing_file_raises_damaged(name: str, tmp_path: Path) -> None:
    make(tmp_path, 3)
    folder = make(tmp_path, 6)
    (folder / name).unlink()
    assert newest_complete(tmp_path) == tmp_path / "checkpoint-3"
    with pytest.raises(Damaged) as reported:
        read_complete(folder)
    assert str(reported.value) == f"{folder} lacks {name}"


@pytest.mark.parametrize("name", FILES)
def test_read_complete_with_truncated_file_raises_damaged(name: str, tmp_path: Path) -> None:
    make(tmp_path, 3)
    folder = make(tmp_path, 6)
    (folder / name).write_bytes(b"012345678")
    assert newest_complete(tmp_path) == tmp_path / "checkpoint-3"
    with pytest.raises(Damaged) as reported:
        read_complete(folder)
    assert str(reported.value) == f"{folder / name} has 9 bytes, not the 10 that were written"


@pytest.mark.parametrize("name", FILES)
def test_verify_with_flipped_bit_raises_damaged(name: str, tmp_path: Path) -> None:
    folder = make(tmp_path, 6)
    record = read_complete(folder)
    verify(folder, record, record.files)
    (folder / name).write_bytes(b"0123456799")
    assert read_complete(folder) == record
    with pytest.raises(Damaged, match=rf"{name} .*: 10 bytes with the checksum \w{{8}}, not 10 .*GRPO-703"):
        verify(folder, record, record.files)
    verify(folder, record, [other for other in record.files if other != name])
    (folder / name).unlink()
    with pytest.raises(ValueError, match=rf"{name} is not there on .*look whether this node has it mounted") as found:
        verify(folder, record, [name])
    assert not isinstance(found.value, Damaged), "rank 0 has seen it: it is this node's fault"


@pytest.mark.parametrize(
    ("number", "times", "raised"),
    [(errno.ESTALE, 1, None), (errno.ESTALE, 2, OSError), (errno.EIO, 1, None), (errno.EIO, 2, Damaged)],
)
def test_verify_on_read_error_retries_once_and_raises_by_errno(
    number: int, times: int, raised: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make(tmp_path, 6)
    record, left = read_complete(folder), [times]

    def sum_or_not(path: Path) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(number, os.strerror(number))
        return sum_of(path)

    monkeypatch.setattr(checkpoints, "sum_of", sum_or_not)
    monkeypatch.setattr(checkpoints, "AGAIN_S", 0.0)
    if raised is None:
        verify(folder, record, [FILES[0]])
        return
    with pytest.raises(raised) as found:
        verify(folder, record, [FILES[0]])
    assert isinstance(found.value, Damaged) == (raised is Damaged)


def test_write_rank_record_stats_only_own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are thousands of a large job's, on a file system that is being written."""
    folder = make(tmp_path, 6)
    seen: list[str] = []
    is_file = Path.is_file
    monkeypatch.setattr(Path, "is_file", lambda path: seen.append(path.name) or is_file(path))
    write_rank_record(folder, 1, 2)
    assert seen
    assert all("_1" in name for name in seen), seen


def test_verify_without_checksums_compares_sizes_only(tmp_path: Path) -> None:
    folder = make(tmp_path, 6)
    content = json.loads((folder / "complete.json").read_text())
    del content["checksums"], content["reshaped_from"]  # as it was written before there were any
    (folder / "complete.json").write_text(json.dumps(content))
    (folder / FILES[0]).write_bytes(b"0123456799")
    record = read_complete(folder)
    assert verify(folder, record, record.files) is None, "another content of the same size is not seen"
    (folder / FILES[0]).write_bytes(b"01234567")
    with pytest.raises(Damaged, match="has 8 bytes, not the 10"):
        read_complete(folder)


def spoil_json(folder: Path) -> None:
    (folder / "complete.json").write_text('{"step": 6')


def spoil_fields(folder: Path) -> None:
    (folder / "complete.json").write_text(json.dumps({"step": 6}))


def spoil_kind(folder: Path) -> None:
    (folder / "complete.json").write_text("[]")


def remove(folder: Path) -> None:
    (folder / "complete.json").unlink()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (spoil_json, "cannot be read"),
        (spoil_fields, "cannot be read"),
        (spoil_kind, "cannot be read"),
        (remove, "was not written to its end"),
    ],
)
def test_read_complete_without_valid_record_raises(spoil: Callable[[Path], None], words: str, tmp_path: Path) -> None:
    make(tmp_path, 3)
    folder = make(tmp_path, 6)
    spoil(folder)
    assert newest_complete(tmp_path) == tmp_path / "checkpoint-3"
    with pytest.raises(ValueError, match=words) as reported:
        read_complete(folder)
    assert str(folder) in str(reported.value)


def test_write_complete_by_one_process_records_all_checksums(tmp_path: Path) -> None:
    folder = fill(tmp_path / "checkpoint-3")
    write_complete(folder, step=3, world_size=1, sampling={})
    record = read_complete(folder)
    assert sorted(record.checksums) == sorted(FILES)
    verify(folder, record, record.files)


def test_shares_by_rank_hold_own_files_and_part_of_rest() -> None:
    files = {
        "model-1.safetensors": 50,
        "model-2.safetensors": 50,
        "zero_pp_rank_0_x_optim_states.pt": 40,
        "zero_pp_rank_1_x_optim_states.pt": 40,
        "rng_state_1.pth": 10,
        "config.json": 1,
    }
    assert shares(files, 2) == [
        ["zero_pp_rank_0_x_optim_states.pt", "model-1.safetensors", "config.json"],
        ["zero_pp_rank_1_x_optim_states.pt", "rng_state_1.pth", "model-2.safetensors"],
    ]
    assert shares(files, 1) == [[*shares(files, 1)[0]]]
    assert sorted(shares(files, 1)[0]) == sorted(files)


def test_check_world_size_with_other_rank_count_suggests_reshape(tmp_path: Path) -> None:
    folder = make(tmp_path, 3)
    check_world_size(folder, read_complete(folder), 2)
    with pytest.raises(ValueError, match=r"for 2 .* has 4 \[GRPO-706\].*grpo reshape .*/checkpoint-3 --ranks 4"):
        check_world_size(folder, read_complete(folder), 4)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"steps_per_generation": 6, "gradient_accumulation_steps": 6}, None),
        ({"generation_batch_size": 36}, r"generation_batch_size is 36, not 24.*x 3 training .* has to be 24"),
        ({"seed": 43}, r"seed is 43, not 42"),
        ({"spare_groups": 2}, r"spare_groups is 2, not 0"),
        ({"steps_per_generation": 6}, r"steps_per_generation / gradient.* is 6 / 3, not in the proportion 3 / 3"),
    ],
)
def test_check_reshaped_refuses_other_batches(changes: dict, problem: str | None, tmp_path: Path) -> None:
    before = {name: value for name, value in SAMPLING.items() if name != "spare_groups"}  # of an older version
    record = CompleteRecord(step=3, world_size=3, files={}, versions={}, sampling=before, reshaped_from=2)
    if problem is None:
        check_reshaped(tmp_path, record, {**SAMPLING, **changes})
        return
    with pytest.raises(ValueError, match=problem):
        check_reshaped(tmp_path, record, {**SAMPLING, **changes})


def test_checkpoints_listing_ignores_other_folders(tmp_path: Path) -> None:
    make(tmp_path, 3)
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "checkpoint-9-ranks").mkdir()
    assert checkpoints.checkpoints(tmp_path) == [newest_complete(tmp_path)] == [tmp_path / "checkpoint-3"]
    assert names(tmp_path) == {"checkpoint-3", "checkpoint-best", "checkpoint-9-ranks"}
