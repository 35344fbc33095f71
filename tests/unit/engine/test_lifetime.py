"""An engine's private folder goes with it, whoever still writes into it."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo.faults.sessions import end_session, remove_traces


def test_remove_traces_with_concurrent_writes_deletes_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, rmtree, late = tmp_path / "engine", shutil.rmtree, []
    folder.mkdir()

    def interrupted(path: Path, **settings: Any) -> None:
        rmtree(path, **settings)
        if len(late) < 2:  # by a process that is about to die
            late.append(path)
            path.mkdir()
            (path / "socket").touch()

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    remove_traces(folder)
    assert len(late) == 2
    assert not folder.exists()


SHARING = """
import multiprocessing, os, signal, sys
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from grpo.place.patches.stdlib import name_shared_memory
name_shared_memory(Path(sys.argv[1]).name)
def share(reported):
    lock = multiprocessing.get_context("spawn").Lock()
    memory = SharedMemory(create=True, size=100)
    reported.send_bytes(b"shared")
    signal.pause()
here, there = multiprocessing.Pipe()
multiprocessing.get_context("fork").Process(target=share, args=(there,)).start()
here.recv_bytes()
print("shared", flush=True)
signal.pause()
"""


def test_end_session_after_kill_of_all_processes_frees_shared_memory(tmp_path: Path) -> None:
    folder = tmp_path / f"grpo-engine-{os.getpid()}"
    folder.mkdir()
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-c", SHARING, str(folder)]
    with subprocess.Popen(command, env=environment, start_new_session=True, stdout=subprocess.PIPE) as leader:
        assert leader.stdout is not None
        assert leader.stdout.readline() == b"shared\n"
        os.killpg(leader.pid, signal.SIGKILL)  # resource trackers too
    assert len([*Path("/dev/shm").glob(f"*{folder.name}-*")]) == 2, "a segment and a semaphore"
    end_session(leader.pid, folder)
    assert not [*Path("/dev/shm").glob(f"*{folder.name}*")]


LATE = """
import os, sys
from pathlib import Path
from grpo.engine.lifetime import end_session_with
end_session_with(os.getpid(), private_folder=Path(sys.argv[1]))  # alive, but not the parent
"""


def test_end_session_with_dead_parent_deletes_folder_and_ends_host(tmp_path: Path) -> None:
    folder = tmp_path / "engine"
    folder.mkdir()
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    ended = subprocess.run(
        [sys.executable, "-c", LATE, str(folder)], env=environment, start_new_session=True, timeout=60
    )
    assert ended.returncode == -signal.SIGKILL
    assert not folder.exists()
