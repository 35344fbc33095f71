"""Files that are on the disk, and known again."""

import errno
import os
from pathlib import Path

import pytest

from grpo.record.durable import CHUNK_BYTES, FileSum, make_durable, sum_of, sync_folder, write_atomically


def test_sum_of_large_file_covers_all_chunks(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_bytes(b"a" * CHUNK_BYTES + b"b")
    whole = make_durable(path)
    assert whole == sum_of(path)
    assert whole.size_bytes == CHUNK_BYTES + 1
    path.write_bytes(b"a" * (CHUNK_BYTES - 1) + b"ba")
    assert sum_of(path) != whole
    path.write_bytes(b"")
    assert make_durable(path) == FileSum(size_bytes=0, crc32=0)


def test_write_atomically_on_full_disk_keeps_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "record"
    write_atomically(path, "old")

    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="No space left"):
            write_atomically(path, "new")
    assert [each.name for each in tmp_path.iterdir()] == ["record"]
    assert path.read_text() == "old"
    write_atomically(path, b"\xff\0")
    assert path.read_bytes() == b"\xff\0"


@pytest.mark.parametrize(("number", "raised"), [(errno.EINVAL, False), (errno.EIO, True)])
def test_sync_folder_ignores_einval_and_raises_eio(
    number: int, raised: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    if raised:
        with pytest.raises(OSError, match="Input/output error"):
            sync_folder(tmp_path)
    else:
        sync_folder(tmp_path)
