"""What the doctor says of one node that lacks something: files, room, addresses, caches, and what it cannot look at."""

import ctypes
import mmap
import os
import resource
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from grpo.doctor import installation, leftovers, report, storage
from grpo.doctor.expected import find_place, is_local_address
from grpo.doctor.network import address_of
from grpo.doctor.records import Finding, Status

PASS, WARN, FAIL = Status.PASS, Status.WARN, Status.FAIL
GIB = 1 << 30


@pytest.mark.parametrize(
    ("soft", "hard", "fix"),
    [
        (1024, 1 << 20, "ulimit -n 65536 before the launcher"),
        (1024, 16384, "ulimit -n 16384 before the launcher"),
        (1024, resource.RLIM_INFINITY, "ulimit -n 65536 before the launcher"),
        (1024, 4096, "raise nofile in /etc/security/limits.conf"),
    ],
)
def test_few_open_files(soft: int, hard: int, fix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    finding = storage.check_open_files()
    assert (finding.status, finding.message) == (WARN, f"1024, hard limit {hard}")
    assert finding.fix.startswith(fix)


def room(free_bytes: int, *, inodes: int = 10**6, all_inodes: int = 10**7) -> SimpleNamespace:
    return SimpleNamespace(f_bavail=free_bytes, f_frsize=1, f_blocks=10**13, f_favail=inodes, f_files=all_inodes)


@pytest.mark.parametrize(
    ("found", "status"),
    [
        (room(100 * GIB), PASS),
        (room(100 * GIB, inodes=0, all_inodes=0), PASS),  # a file system without a fixed number of them
        (room(10 * GIB), WARN),
        (room(100 * GIB, inodes=5000), WARN),
        (room(GIB // 2), FAIL),
        (room(100 * GIB, inodes=10), FAIL),
    ],
)
def test_room_for_checkpoints(
    found: SimpleNamespace, status: Status, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: found)
    assert storage.check_room(tmp_path).status is status


def test_an_output_path_that_cannot_be_written() -> None:
    finding = storage.check_room(Path("/proc/grpo"))  # no user may make a file there
    assert finding.status is FAIL
    assert finding.message.startswith("/proc: cannot be written: ")


def test_a_shared_file_in_a_folder_that_is_not_here(tmp_path: Path) -> None:
    assert not storage.sees_file(tmp_path / "gone" / "file", "text")
    (tmp_path / "file").write_text("text")
    assert storage.sees_file(tmp_path / "file", "text")


def test_a_local_model_and_a_local_dataset(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    finding = storage.check_model_cache(str(tmp_path), {}, tmp_path)
    assert (finding.status, finding.message) == (FAIL, f"{tmp_path} lacks a tokenizer, weights")
    finding = storage.check_dataset_cache(str(tmp_path), {"HF_HUB_OFFLINE": "1"}, tmp_path)
    assert (finding.status, finding.message) == (PASS, f"{tmp_path}: a local path")


@pytest.mark.parametrize(
    ("free_bytes", "has_gpus", "status"), [(GIB // 2, True, WARN), (64 << 20, True, FAIL), (64 << 20, False, WARN)]
)
def test_a_container_with_little_shared_memory(
    free_bytes: int, has_gpus: bool, status: Status, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: room(free_bytes))
    (finding,) = leftovers.check_shared_memory(has_gpus=has_gpus, folder=tmp_path)
    assert (finding.status, "--shm-size=16g" in finding.fix) == (status, True)


def test_a_segment_that_is_mapped_alone_is_held(tmp_path: Path) -> None:
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


def test_a_lock_that_is_released_while_it_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "extension_locks", lambda env, home: [tmp_path / "gone"])
    (finding,) = leftovers.check_extension_locks({}, tmp_path)
    assert (finding.status, finding.message) == (PASS, "none")


@pytest.mark.parametrize("error", [FileNotFoundError("git"), subprocess.TimeoutExpired("git", 1)])
def test_no_git_is_no_commit(error: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run(*args, **kwargs) -> None:
        raise error

    monkeypatch.setattr(subprocess, "run", run)
    assert installation.commit_of(tmp_path) == ""


def test_addresses_of_this_machine_and_of_others() -> None:
    assert is_local_address("127.0.0.1")
    assert not is_local_address("192.0.2.1")  # of a block that nobody has, RFC 5737
    assert not is_local_address("no such name")
    assert address_of("127.0.0.1") == "127.0.0.1"
    assert address_of("no such name") == ""


def test_nodes_named_twice_or_not_at_all(tmp_path: Path) -> None:
    def nodes(**given: object) -> tuple[str, ...]:
        words = {"nodes": None, "nodes_file": None, "node_name": None, "node_rank": None, "head": None} | given
        return find_place(**words, port=1, env={}, hostname="n2").nodes  # type: ignore[arg-type]

    file = tmp_path / "hosts"
    file.write_text("n1\nn2\n")
    assert nodes(nodes_file=file) == ("n1", "n2")
    with pytest.raises(ValueError, match="give one of them"):
        nodes(nodes="n1,n2", nodes_file=file)
    file.write_text("# nobody\n")
    with pytest.raises(ValueError, match=f"{file} names no node"):
        nodes(nodes_file=file)


def test_a_check_that_fails_by_itself_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(error: Exception) -> Finding:
        def check() -> report.Part:
            raise error

        ((finding,), facts) = report._with_deadline("disk", check)
        assert facts == {}
        return finding

    hanging, broken = told(TimeoutError("no answer within 20 s")), told(PermissionError("not yours"))
    assert (hanging.status, hanging.message) == (FAIL, "no answer within 20 s")
    assert (broken.status, broken.message) == (WARN, "could not be checked: PermissionError: not yours")


def test_a_mount_that_hangs_shows_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(path: Path, text: str) -> bool:
        raise TimeoutError

    monkeypatch.setattr(storage, "sees_file", hang)
    assert not report.find_shared_file(tmp_path / "file", "text")


def test_a_file_that_a_network_file_system_shows_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report.time, "sleep", lambda _: (tmp_path / "file").write_text("text"))
    assert report.find_shared_file(tmp_path / "file", "text")
