"""A save's way to the disk beside training: what completes it, and how its failure is heard."""

import errno
import threading
from pathlib import Path

import pytest

from grpo.checkpoints import background
from grpo.checkpoints.background import BackgroundSave
from grpo.checkpoints.checkpoints import newest_complete, read_complete, verify, write_complete
from tests.support.made_up_checkpoints import FILES, fill

DEADLINE_S = 60.0


def save(folder: Path, rank: int, *, deadline_s: float = DEADLINE_S) -> BackgroundSave:
    def complete(sums: dict) -> None:
        write_complete(folder, step=3, world_size=2, sampling={}, sums=sums)

    return BackgroundSave(folder, rank=rank, world_size=2, complete=complete, deadline_s=deadline_s)


def test_background_save_after_flush_of_all_ranks_is_complete(tmp_path: Path) -> None:
    folder = fill(tmp_path / "checkpoint-3")
    first = save(folder, 0)
    assert newest_complete(tmp_path) is None
    assert not first.is_done
    save(folder, 1).wait()
    first.wait()
    record = read_complete(folder)
    verify(folder, record, record.files)
    assert sorted(record.files) == sorted([*FILES, "files-0.json", "files-1.json"])


def test_background_save_past_deadline_names_missing_rank(tmp_path: Path) -> None:
    folder = fill(tmp_path / "checkpoint-3")
    with pytest.raises(TimeoutError, match=r"checkpoint-3 is not complete: ranks \[1\] have not flushed their files"):
        save(folder, 0, deadline_s=0).wait()
    assert newest_complete(tmp_path) is None


def test_background_save_on_full_disk_raises_on_each_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel took the bytes, and finds no place for them later: only then does anybody hear of it."""
    called = threading.Event()

    def full(*_: object) -> None:
        called.set()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(background, "write_rank_record", full)
    folder = fill(tmp_path / "checkpoint-3")
    saving = save(folder, 1)
    assert called.wait(DEADLINE_S)
    for _ in range(2):
        with pytest.raises(OSError, match=r"checkpoint-3 did not reach the disk: .*No space left") as reported:
            saving.wait()
        assert reported.value.errno == errno.ENOSPC
