"""Which checkpoints are deleted, which are quarantined, and when there is no space for one more."""

import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from grpo.checkpoints.checkpoints import newest_complete, read_complete
from grpo.checkpoints.rotation import (
    begin_partial,
    bound_quarantine,
    check_free_space,
    damaged_in,
    delete_partial,
    kept_limit,
    quarantine,
    quarantine_damaged,
    rotate,
    to_rotate,
)
from tests.support.made_up_checkpoints import fill, make, names


def test_rotate_with_limit_1_keeps_two_complete_checkpoints(tmp_path: Path) -> None:
    for step in (3, 6, 9):
        make(tmp_path, step)
    make(tmp_path, 7, complete=False)
    make(tmp_path, 12, complete=False)  # is being written, for all that rotation knows
    rotate(tmp_path, limit=None, keep=set())
    assert len(names(tmp_path)) == 5
    assert [kept_limit(limit) for limit in (None, 0, 1, 2, 5)] == [None, None, 2, 2, 5]
    rotate(tmp_path, limit=1, keep={tmp_path / "checkpoint-3"})
    assert names(tmp_path) == {"checkpoint-3", "checkpoint-6", "checkpoint-9", "checkpoint-12"}  # the best one stays
    rotate(tmp_path, limit=1, keep=set())
    assert names(tmp_path) == {"checkpoint-6", "checkpoint-9", "checkpoint-12"}
    rotate(tmp_path, limit=1, keep=set())
    assert names(tmp_path) == {"checkpoint-6", "checkpoint-9", "checkpoint-12"}


def test_rotate_with_damaged_checkpoint_does_not_count_it(tmp_path: Path) -> None:
    """Else the only whole one would go on account of it."""
    for step in (3, 6, 9):
        make(tmp_path, step)
    (make(tmp_path, 12) / "latest").unlink()
    rotate(tmp_path, limit=2, keep=set())
    assert names(tmp_path) == {"checkpoint-6", "checkpoint-9", "checkpoint-12"}


def test_rotate_with_model_only_checkpoints_keeps_two_resumable(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        make(tmp_path, step)
    for step in (6, 9):
        make(tmp_path, step, resumable=False)
    rotate(tmp_path, limit=2, keep={tmp_path / "checkpoint-9"})
    assert names(tmp_path) == {"checkpoint-2", "checkpoint-3", "checkpoint-9"}


def test_rotate_without_complete_checkpoint_deletes_nothing(tmp_path: Path) -> None:
    make(tmp_path, 3, complete=False)
    rotate(tmp_path, limit=1, keep=set())
    assert names(tmp_path) == {"checkpoint-3"}


def test_delete_partial_after_crash_in_save_deletes_leftovers(tmp_path: Path) -> None:
    make(tmp_path, 3)
    make(tmp_path, 6, complete=False)
    fill(tmp_path / "checkpoint-7")  # of somebody else, who writes no complete.json
    assert delete_partial(tmp_path) == [tmp_path / "checkpoint-6"]
    assert names(tmp_path) == {"checkpoint-3", "checkpoint-7"}
    make(tmp_path, 8).rename(tmp_path / ".deleted-checkpoint-8")  # the process ended while it deleted
    assert delete_partial(tmp_path) == []
    assert names(tmp_path) == {"checkpoint-3", "checkpoint-7"}
    make(tmp_path, 9)
    (tmp_path / "checkpoint-9" / ".partial").touch()  # the end came between its last two acts
    assert delete_partial(tmp_path) == []
    assert newest_complete(tmp_path) == tmp_path / "checkpoint-9"


def test_begin_partial_on_complete_checkpoint_makes_it_incomplete(tmp_path: Path) -> None:
    folder = make(tmp_path, 3)
    begin_partial(folder)
    assert newest_complete(tmp_path) is None
    assert not list(folder.glob("files-*.json"))  # else the old ranks' word would count for the new files
    assert delete_partial(tmp_path) == [folder]


def test_quarantine_moves_later_checkpoints_of_other_branch(tmp_path: Path) -> None:
    """Else its later steps would count as the newest, and what the new branch writes would be deleted as old."""
    for step in (3, 480, 500):
        make(tmp_path, step)
    moved = quarantine(tmp_path, after_step=3, attempt=0)
    assert {path.name for path in moved} == {"checkpoint-480", "checkpoint-500"}
    assert names(tmp_path) == {"checkpoint-3", "abandoned.attempt-0"}
    read_complete(tmp_path / "abandoned.attempt-0" / "checkpoint-500")
    for step in (10, 11):
        make(tmp_path, step)
    rotate(tmp_path, limit=1, keep={tmp_path / "checkpoint-11"})
    assert newest_complete(tmp_path) == tmp_path / "checkpoint-11"
    assert quarantine(tmp_path, after_step=11, attempt=1) == []


def test_quarantine_under_same_name_replaces_older(tmp_path: Path) -> None:
    for text in ("old", "new"):
        (make(tmp_path, 5) / "note").write_text(text)
        (moved,) = quarantine(tmp_path, after_step=3, attempt=0)
    assert (moved / "note").read_text() == "new"
    for text in ("old", "new"):
        (make(tmp_path, 5) / "note").write_text(text)
        moved = quarantine_damaged(tmp_path / "checkpoint-5")
    assert damaged_in(tmp_path) == [moved] == [tmp_path / "damaged-checkpoint-5"]
    assert (moved / "note").read_text() == "new"


def test_bound_quarantine_deletes_oldest(tmp_path: Path) -> None:
    for number, step in enumerate((3, 6, 9, 12)):
        folder = make(tmp_path, step)
        os.utime(folder / "complete.json", (number, number))
    quarantine(tmp_path, after_step=9, attempt=5)
    quarantine_damaged(tmp_path / "checkpoint-9")
    quarantine(tmp_path, after_step=3, attempt=4)
    assert bound_quarantine(tmp_path) == [tmp_path / "abandoned.attempt-4" / "checkpoint-6"]
    assert names(tmp_path) == {"checkpoint-3", "damaged-checkpoint-9", "abandoned.attempt-5"}
    assert bound_quarantine(tmp_path) == []


Usage = namedtuple("Usage", "total used free")


def test_check_free_space_on_full_disk_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_free_space(tmp_path, 1, rotated=[])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(300 * 10**9, 0, 80 * 10**9))
    check_free_space(tmp_path, 80 * 10**9, rotated=[])
    with pytest.raises(OSError, match=r"106\.0 GB, .* 80\.0 GB free \[GRPO-701\]: free 26\.0 GB.*nothing was"):
        check_free_space(tmp_path, 106 * 10**9, rotated=[])
    for step in (3, 6, 9):
        make(tmp_path, step)
    with (tmp_path / "checkpoint-3" / "latest").open("ab") as file:
        file.truncate(105 * 10**9)
    (tmp_path / "checkpoint-3" / "complete.json").unlink()
    (tmp_path / "checkpoint-3" / ".partial").touch()
    rotated = to_rotate(tmp_path, limit=2, keep=set())
    with pytest.raises(
        OSError, match=r"free, and 105\.0 GB are freed only after it is complete \(checkpoint-3\) .*GRPO-701"
    ):
        check_free_space(tmp_path, 106 * 10**9, rotated=rotated)
