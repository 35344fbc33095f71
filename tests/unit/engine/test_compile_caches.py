"""What an engine leaves to the next one: when it ends well, is killed while it starts, shares a folder with others."""

import contextlib
import errno
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from grpo.engine.compile_caches import CacheSlot, end_late, note_slots, take_slot, take_slots
from grpo.faults.sessions import end_session, session_members
from grpo.place.patches.torch import keep_headers, write_libraries_whole
from grpo.record.screen import show_log
from tests.support.launching import ROOT


class Engines:
    """Starts of engines, whose hosts give up their locks when they end, in whatever way."""

    def __init__(self, base: Path) -> None:
        self._base = base
        self._running: list[CacheSlot] = []

    def start(self) -> CacheSlot:
        self._running.append(take_slot(self._base))
        return self._running[-1]

    def end(self, slot: CacheSlot) -> None:
        self._running.remove(slot)
        os.close(slot.lock)

    def end_all(self) -> None:
        for slot in [*self._running]:
            self.end(slot)


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Engines]:
    engines = Engines(tmp_path)
    yield engines
    engines.end_all()


def test_cache_slot_after_ready_start_is_kept_for_next(engines: Engines) -> None:
    first = engines.start()
    (first.folder / "kernel.so").write_text("whole")
    first.is_ready()
    engines.end(first)
    second = engines.start()
    assert second.folder == first.folder
    assert (second.folder / "kernel.so").read_text() == "whole"


def test_cache_slots_of_concurrent_engines_are_distinct_and_reused(engines: Engines) -> None:
    with ThreadPoolExecutor(16) as threads:
        slots = [future.result() for future in [threads.submit(engines.start) for _ in range(64)]]
    folders = {slot.folder for slot in slots}
    assert len(folders) == 64
    for slot in slots:
        slot.is_ready()
        engines.end(slot)
    assert {engines.start().folder for _ in range(64)} == folders


STARTING = """
import os, sys
from pathlib import Path
from grpo.engine.compile_caches import take_slot
slot = take_slot(Path(sys.argv[1]))
(slot.folder / "kernel.so").touch()
if os.fork():
    print(slot.folder, flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def start_of(code: str, *folders: Path) -> Iterator[tuple[subprocess.Popen, Path]]:
    """A host's process that runs this, in a session of its own, and the slot that it has taken."""
    with subprocess.Popen(
        [sys.executable, "-c", code, *map(str, folders)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as host:
        assert host.stdout is not None
        yield host, Path(host.stdout.readline().strip())


def test_cache_slot_of_killed_start_is_emptied_for_next(engines: Engines, tmp_path: Path) -> None:
    with start_of(STARTING, tmp_path) as (host, spoilt):
        beside = engines.start()
        assert beside.folder != spoilt
        (beside.folder / "kernel.so").write_text("whole")
        os.kill(host.pid, 9)
        assert engines.start().folder not in (spoilt, beside.folder), "its forked process may still write"
        os.killpg(host.pid, 9)
        while session_members(host.pid):  # what was forked off ends in its own time
            time.sleep(0.02)
    following = engines.start()
    assert following.folder == spoilt
    assert not [*following.folder.iterdir()]
    assert (beside.folder / "kernel.so").exists()


def test_cache_slot_of_failed_start_is_emptied_for_next(engines: Engines) -> None:
    failed = engines.start()
    (failed.folder / "kernel.so").touch()
    engines.end(failed)
    assert not [*engines.start().folder.iterdir()]


LATE = """
import sys
from pathlib import Path
from grpo.engine.compile_caches import note_slots, take_slot
slot = take_slot(Path(sys.argv[1]))
note_slots([slot], Path(sys.argv[2]))
(slot.folder / "whole.so").write_text("whole")
half = (slot.folder / "half.so").open("w")
half.write("ha")
half.flush()
print(slot.folder, flush=True)
sys.stdin.read()
"""


def a_late_start(base: Path, private_folder: Path) -> Path:
    """The slot that it had."""
    private_folder.mkdir(exist_ok=True)
    with start_of(LATE, base, private_folder) as (host, folder):

        def end() -> None:
            end_session(host.pid, private_folder)
            host.wait()

        end_late(lambda: session_members(host.pid), private_folder, end)
        assert host.returncode == -9
    return folder


def test_end_late_keeps_whole_files_once(engines: Engines, tmp_path: Path) -> None:
    private_folder = tmp_path / "private"
    folder = a_late_start(tmp_path, private_folder)
    assert not private_folder.exists()
    assert [path.name for path in folder.iterdir()] == ["whole.so"]
    following = engines.start()
    assert following.folder == folder
    assert (folder / "whole.so").read_text() == "whole"
    following.is_ready()
    engines.end(following)
    engines.end(engines.start())  # killed
    assert a_late_start(tmp_path, private_folder) == folder
    assert a_late_start(tmp_path, private_folder) == folder, "on what the one before has left"
    assert not [*engines.start().folder.iterdir()]


def test_end_late_with_slot_taken_by_other_engine_leaves_it_alone(engines: Engines, tmp_path: Path) -> None:
    slot = engines.start()
    note_slots([slot], tmp_path)
    taken: list[CacheSlot] = []

    def end() -> None:
        engines.end(slot)
        taken.append(engines.start())
        (taken[0].folder / "new.so").touch()

    with (slot.folder / "new.so").open("w"):
        end_late(lambda: [], tmp_path, end)
    assert taken[0].folder == slot.folder
    assert (slot.folder / "new.so").exists()
    engines.end(taken[0])
    assert not [*engines.start().folder.iterdir()], "it was not ready either"


def test_take_slots_covers_all_cache_variables(tmp_path: Path) -> None:
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "kernels"), "VLLM_CACHE_ROOT": str(tmp_path / "vllm")}
    variables, slots = take_slots(environment, tmp_path / "private")
    assert variables.keys() == environment.keys()
    for name, folder in variables.items():
        assert Path(folder).is_relative_to(environment[name])
        assert Path(folder).is_dir()
    for each in slots:
        os.close(each.lock)
    assert take_slots({"PATH": "/bin"}, tmp_path) == ({}, [])


def test_take_slots_without_locks_uses_private_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    show_log()
    private = tmp_path / "private"
    (tmp_path / "file").touch()
    for name, reason in (("file", "Not a directory"), ("cache", "No locks available")):
        if name == "cache":
            monkeypatch.setattr(fcntl, "flock", refuse)
        environment = {"VLLM_CACHE_ROOT": str(tmp_path / name)}
        assert take_slots(environment, private) == ({"VLLM_CACHE_ROOT": str(private / "vllm_cache_root")}, [])
        said = capsys.readouterr().out
        assert "[GRPO-402]" in said
        assert reason in said


def test_write_libraries_whole_after_kill_leaves_no_partial_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpp_builder = pytest.importorskip("torch._inductor.cpp_builder")
    monkeypatch.setattr(cpp_builder.CppBuilder, "build", cpp_builder.CppBuilder.build)  # as it was, afterwards
    write_libraries_whole()
    source = tmp_path / "kernel.cpp"
    source.write_text('extern "C" int answer() { return 42; }\n')
    library = cpp_builder.CppBuilder(
        name="kernel", sources=str(source), BuildOption=cpp_builder.CppOptions(), output_dir=str(tmp_path)
    )
    target = Path(library.get_target_file_path())
    compile_whole = cpp_builder.run_compile_cmd

    def be_killed(command: str, cwd: str) -> None:
        compile_whole(command, cwd)
        assert [path for path in tmp_path.glob("kernel*.so*") if path != target]
        raise KeyboardInterrupt

    monkeypatch.setattr(cpp_builder, "run_compile_cmd", be_killed)
    with pytest.raises(KeyboardInterrupt):
        library.build()
    assert not target.exists()
    monkeypatch.setattr(cpp_builder, "run_compile_cmd", compile_whole)
    library.build()
    assert target.stat().st_size


def test_keep_headers_stores_compiled_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codecache = pytest.importorskip("torch._inductor.codecache")
    for name in ("_HEADER_DIR", "_HEADER_LOCK_DIR"):
        monkeypatch.setattr(codecache, name, getattr(codecache, name))  # as it was, afterwards
    keep_headers(tmp_path)
    codecache._precompile_header.cache_clear()
    header = Path(codecache._precompile_header("cstddef", "", device_type="cpu"))
    assert header.parent == tmp_path
    assert Path(f"{header}.gch").stat().st_size
