"""What earlier jobs left: shared memory, engines' folders, build locks."""

import ctypes
import mmap
import os
import subprocess
import time
from pathlib import Path

import pytest

from grpo.ops.doctor import leftovers
from grpo.ops.doctor.records import Status
from tests.support.doctored import GIB, space

PASS, WARN, FAIL = Status.PASS, Status.WARN, Status.FAIL


def aged(path: Path, age_s: float) -> Path:
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def test_extension_locks_with_stale_lock_fails(tmp_path: Path) -> None:
    lock = tmp_path / ".cache" / "torch_extensions" / "py311_cpu" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    assert [finding.status for finding in leftovers.check_extension_locks({}, tmp_path)] == [PASS]
    lock.touch()
    assert [finding.status for finding in leftovers.check_extension_locks({}, tmp_path)] == [WARN]
    aged(lock, 3600)
    (stale,) = leftovers.check_extension_locks({}, tmp_path)
    assert stale.status is FAIL
    assert f"rm {lock}" in stale.fix
    with lock.open():  # as torch holds it while it builds
        (running,) = leftovers.check_extension_locks({}, tmp_path)
    assert running.status is PASS
    own = {"TORCH_EXTENSIONS_DIR": str(lock.parent.parent)}  # then without the folder per Python version
    assert leftovers.extension_locks(own, Path("/nonexistent")) == [lock]


def test_extension_locks_with_lock_released_meanwhile_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "extension_locks", lambda env, home: [tmp_path / "gone"])
    (finding,) = leftovers.check_extension_locks({}, tmp_path)
    assert (finding.status, finding.message) == (PASS, "none")


def test_orphaned_segments_finds_only_old_unheld_segments(tmp_path: Path) -> None:
    orphan, held, young, foreign = (tmp_path / name for name in ("psm_1", "psm_2", "psm_3", "other"))
    for path in (orphan, held, young, foreign):
        path.write_bytes(bytes(4096))
    for path in (orphan, held, foreign):
        aged(path, 3600)
    with held.open():
        assert leftovers.orphaned_segments(tmp_path) == [orphan]
        findings = leftovers.check_shared_memory(has_gpus=False, folder=tmp_path)
    assert f"rm {orphan}" in findings[-1].fix
    since = time.strftime("%d %b, %H:%M", time.localtime(orphan.stat().st_mtime))
    assert f"{orphan} (of {since})" in findings[-1].message
    assert orphan.exists()


def test_orphaned_segments_spares_mapped_segment(tmp_path: Path) -> None:
    """Its descriptor is closed; Python's own mmap would keep one."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    segment = tmp_path / "psm_1"
    segment.write_bytes(bytes(mmap.PAGESIZE))
    os.utime(segment, (time.time() - 3600,) * 2)
    with segment.open() as file:
        length, offset = ctypes.c_size_t(mmap.PAGESIZE), ctypes.c_long(0)
        mapped = libc.mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), offset)
    assert leftovers.orphaned_segments(tmp_path) == []
    libc.munmap(ctypes.c_void_p(mapped), length)
    assert leftovers.orphaned_segments(tmp_path) == [segment]


@pytest.mark.parametrize(
    ("free_bytes", "has_gpus", "status"), [(GIB // 2, True, WARN), (64 << 20, True, FAIL), (64 << 20, False, WARN)]
)
def test_check_shared_memory_with_little_space_suggests_shm_size(
    free_bytes: int, has_gpus: bool, status: Status, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: space(free_bytes))
    (finding,) = leftovers.check_shared_memory(has_gpus=has_gpus, folder=tmp_path)
    assert (finding.status, "--shm-size=16g" in finding.fix) == (status, True)


def test_abandoned_engine_folders_finds_only_unused_folders(tmp_path: Path) -> None:
    abandoned, alive = tmp_path / "grpo-engine-gone", tmp_path / "grpo-engine-alive"
    for folder in (abandoned, alive):
        folder.mkdir()
        aged(folder, 3600)
    with subprocess.Popen(["cat"], env={"TMPDIR": str(alive)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as engine:
        assert engine.stdin
        assert engine.stdout
        engine.stdin.write(b"\n")
        engine.stdin.flush()
        engine.stdout.read(1)  # Popen can return while the kernel still lays out the new program's environment
        assert leftovers.abandoned_engine_folders(tmp_path) == [abandoned]
        engine.kill()
    assert leftovers.check_engine_folders(tmp_path).status is WARN
    assert leftovers.check_engine_folders(tmp_path / "empty").status is PASS
