"""What the tests hold jobs to must not be a matter of luck."""

import multiprocessing
import os
import subprocess
import sys
from multiprocessing import shared_memory
from pathlib import Path

from tests.support.left_over import left_over, orphaned_shared_memory, processes_in


def test_orphaned_shared_memory_leaves_out_held_segments() -> None:
    lock = multiprocessing.get_context("spawn").Lock()  # vLLM's engine process holds one while its workers start
    memory = shared_memory.SharedMemory(create=True, size=4096)
    try:
        held = {f"/dev/shm/sem.{lock._semlock.name.lstrip('/')}", f"/dev/shm/{memory.name}"}
        assert not held & orphaned_shared_memory()
        memory.close()
        assert held & orphaned_shared_memory() == {f"/dev/shm/{memory.name}"}
    finally:
        memory.unlink()


LEAVES = """
import subprocess, sys, tempfile
tempfile.mkdtemp(prefix="left-")
child = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print(child.pid)
"""


def test_left_over_after_parent_exit_names_process_and_folder(tmp_path: Path) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    mine.mkdir()
    other.mkdir()
    before = orphaned_shared_memory()
    environment = {**os.environ, "TMPDIR": str(mine)}
    ended = subprocess.run(
        [sys.executable, "-c", LEAVES], env=environment, start_new_session=True, capture_output=True, check=True
    )
    pid = int(ended.stdout)
    try:
        assert list(processes_in(mine)) == [pid]
        assert processes_in(other) == {}
        found = left_over(mine, before, patience_s=0)
        assert {line.partition(":")[0] for line in found if line.startswith("process")} == {f"process {pid}"}
        assert [line for line in found if "left-" in line]
        assert left_over(other, before, patience_s=5) == set()
    finally:
        os.kill(pid, 9)


def test_left_over_ignores_cuda_nccl_and_triton_files(tmp_path: Path) -> None:
    for name in ("nccl-a1b2c3", "cuda.shm.0.1f.1", "cuda-memcheck", "tmpx_triton_cache", "tmpabc", "grpo-launch-1"):
        (tmp_path / name).touch()
    memory = [shared_memory.SharedMemory(name=f"{name}-{os.getpid()}", create=True, size=64) for name in ("nccl", "x")]
    try:
        for each in memory:
            each.close()
        found = left_over(tmp_path, set(), patience_s=0)
        assert {Path(line).name for line in found if line.startswith(str(tmp_path))} == {"tmpabc", "grpo-launch-1"}
        assert {f"/dev/shm/nccl-{os.getpid()}", f"/dev/shm/x-{os.getpid()}"} & found == {f"/dev/shm/x-{os.getpid()}"}
    finally:
        for each in memory:
            each.unlink()
