"""What an engine leaves to the next one: when it ends well, is killed while it starts, shares a folder with others."""

import errno
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from grpo.engine.compile_caches import CacheUse, use_cache, use_caches
from grpo.faults.sessions import session_members
from grpo.place.patches.torch import keep_headers, write_libraries_whole
from grpo.record.screen import show_log
from tests.support.launching import ROOT

Use = Callable[[], CacheUse]


@pytest.fixture
def use(tmp_path: Path) -> Iterator[Use]:
    """A start of an engine; a host that ends, in whatever way, gives up its lock (`end`)."""
    uses: list[CacheUse] = []

    def begin() -> CacheUse:
        uses.append(use_cache(tmp_path))
        return uses[-1]

    yield begin
    for each in uses:
        end(each)


def end(use: CacheUse) -> None:
    if use.lock >= 0:
        os.close(use.lock)
        use.lock = -1


def test_what_an_engine_has_compiled_is_kept(use: Use, tmp_path: Path) -> None:
    first = use()
    (first.folder / "kernel.so").write_text("whole")
    first.is_ready()
    end(first)
    second = use()
    assert second.folder == first.folder
    assert (second.folder / "kernel.so").exists()
    second.is_ready()
    end(second)
    use()
    assert len([*(first.folder / "users").iterdir()]) == 1, "records of those that ended are removed"


STARTING = """
import os, sys
from pathlib import Path
from grpo.engine.compile_caches import use_cache
use = use_cache(Path(sys.argv[1]))
(use.folder / "kernel.so").touch()
if os.fork():
    print(use.folder, flush=True)
sys.stdin.read()
"""


def test_a_start_that_is_killed_spoils_none_that_follows(use: Use, tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STARTING, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as host:
        assert host.stdout is not None
        spoilt = Path(host.stdout.readline().strip())
        beside = use()
        assert beside.folder == spoilt, "both start at once: nothing is wrong with that"
        os.killpg(host.pid, 9)
        while session_members(host.pid):  # what was forked off ends in its own time
            time.sleep(0.02)
    following, another = use(), use()
    assert following.folder == another.folder != spoilt
    assert not (following.folder / "kernel.so").exists()
    assert (spoilt / "kernel.so").exists(), "an engine works in it"
    for each in (following, another, beside):
        each.is_ready()
        end(each)
    assert use().folder == following.folder
    assert not spoilt.exists(), "nobody works in it any more"


def test_a_start_that_fails_by_itself_is_a_start_that_was_not_ready(use: Use) -> None:
    failed = use()
    end(failed)
    assert use().folder != failed.folder


def test_starts_at_once_after_a_killed_one_agree(use: Use) -> None:
    end(use())
    with ThreadPoolExecutor(16) as threads:
        uses = [future.result() for future in [threads.submit(use) for _ in range(64)]]
    for each in uses:
        each.is_ready()
        end(each)
    last = use()
    assert last.folder in {each.folder for each in uses}
    assert [*last.folder.parent.iterdir()] == [last.folder]


def test_all_caches_of_an_engine(tmp_path: Path) -> None:
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "kernels"), "VLLM_CACHE_ROOT": str(tmp_path / "vllm")}
    variables, uses = use_caches(environment, tmp_path / "private")
    assert variables.keys() == environment.keys()
    for name, folder in variables.items():
        assert Path(folder).is_relative_to(environment[name])
        assert Path(folder).is_dir()
    for each in uses:
        end(each)
    assert use_caches({"PATH": "/bin"}, tmp_path) == ({}, [])


def test_a_folder_that_cannot_be_shared_is_not_used(
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
        assert use_caches(environment, private) == ({"VLLM_CACHE_ROOT": str(private / "vllm_cache_root")}, [])
        said = capsys.readouterr().out
        assert "[GRPO-402]" in said
        assert reason in said


def test_a_library_stands_in_its_place_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_compiled_headers_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codecache = pytest.importorskip("torch._inductor.codecache")
    for name in ("_HEADER_DIR", "_HEADER_LOCK_DIR"):
        monkeypatch.setattr(codecache, name, getattr(codecache, name))  # as it was, afterwards
    keep_headers(tmp_path)
    codecache._precompile_header.cache_clear()
    header = Path(codecache._precompile_header("cstddef", "", device_type="cpu"))
    assert header.parent == tmp_path
    assert Path(f"{header}.gch").stat().st_size
