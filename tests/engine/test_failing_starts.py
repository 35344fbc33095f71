"""An engine whose processes fail while it starts: it is reported within seconds, and the next start works."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from grpo.engine.client import EngineClient, EngineError
from grpo.engine.environment import engine_environment
from grpo.faults.sessions import session_members
from tests.support.bare_engine import START_S, engine_spec, until
from tests.support.contract import inner_process, worker_process
from tests.support.launching import kill, known_models, wait_gone

REPORTED_S = 10.0  # from a process's failure on


@contextlib.contextmanager
def starting(model: Path, folder: Path, **engine_args: object) -> Iterator[EngineClient]:
    """An engine with caches of its own, which the next one in this folder shares."""
    known_models(folder / "vllm")
    variables = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "kernels"), "VLLM_CACHE_ROOT": str(folder / "vllm")}
    environment = engine_environment(
        {**os.environ, **variables}, devices=(), tensor_parallel_size=1, engines_per_node=1
    )
    log = folder / f"engine{len(list(folder.glob('*.log')))}.log"
    client = EngineClient(engine_spec(model, **engine_args), name="it", environment=environment, log_path=log)
    try:
        yield client
    finally:
        client.close()
    assert not session_members(client.pid)
    assert not [*Path("/dev/shm").glob(f"*{client.private_folder.name}*")]


def has(found: Callable[[int], psutil.Process], host: int) -> bool:
    try:
        return found(host).is_running()
    except (StopIteration, psutil.NoSuchProcess):
        return False


def compiles(host: int) -> bool:
    """A compiler writes into the cache."""
    for pid in session_members(host):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "cc1plus" in psutil.Process(pid).name():
                return True
    return False


def libraries(folder: Path) -> list[Path]:
    return [*folder.glob("kernels/slots/*/*/*.so")]


def written(library: Path) -> int:
    return library.stat().st_mtime_ns


@pytest.mark.long
@pytest.mark.timeout(900)
def test_engine_start_after_killed_compilation_succeeds(tiny_model: Path, tmp_path: Path) -> None:
    with starting(tiny_model, tmp_path, enforce_eager=False) as client:
        until(lambda: compiles(client.pid), START_S, "nothing is compiled")
        processes = [psutil.Process(pid) for pid in session_members(client.pid)]
        for process in processes:
            with contextlib.suppress(ProcessLookupError):  # it has followed another one
                kill(process.pid)
        assert not wait_gone(processes, REPORTED_S)
    sources = [*tmp_path.glob("kernels/slots/*/*/*.cpp")]
    assert sources
    for source in sources:  # as a linker leaves it that is killed
        source.with_suffix(".so").touch()
    with starting(tiny_model, tmp_path, enforce_eager=False) as client:
        client.wait_ready(START_S)
    compiled = [path for path in libraries(tmp_path) if path.stat().st_size]
    assert compiled
    with starting(tiny_model, tmp_path, enforce_eager=False) as client:
        client.wait_ready(START_S)
    assert {*compiled} == {path for path in libraries(tmp_path) if path.stat().st_size}, "what was compiled serves"

    # Libraries that are spoilt in whatever other way: reported at once, and set aside.
    for path in compiled:
        path.write_bytes(b"")
    with starting(tiny_model, tmp_path, enforce_eager=False) as client:
        until(lambda: "Error: " in client.log_tail(), START_S, "no worker fails")
        failed = time.monotonic()
        with pytest.raises(EngineError, match=r"file too short|CppCompileError"):
            client.wait_ready(START_S)
        assert time.monotonic() - failed < REPORTED_S
    with starting(tiny_model, tmp_path, enforce_eager=False) as client:
        client.wait_ready(START_S)


@pytest.mark.long
def test_engine_start_after_timeout_reuses_compiled_libraries(tiny_model: Path, tmp_path: Path) -> None:
    with starting(tiny_model, tmp_path, enforce_eager=False) as client:
        until(lambda: len(libraries(tmp_path)) > 1 and compiles(client.pid), START_S, "nothing is compiled")
        with pytest.raises(EngineError, match="GRPO-401"):
            client.wait_ready(0.0)
    first = min(libraries(tmp_path), key=written)  # a later one may be half of a file
    compiled = written(first)
    with starting(tiny_model, tmp_path, enforce_eager=False) as client:
        client.wait_ready(START_S)
    assert written(first) == compiled, "it was compiled again"


def test_engine_start_with_truncated_weights_raises_within_10_s(tiny_model: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for path in tiny_model.iterdir():
        whole = path.read_bytes()
        (model / path.name).write_bytes(whole[: len(whole) // 2] if path.suffix == ".safetensors" else whole)
    with starting(model, tmp_path) as client:
        until(lambda: "Error: " in client.log_tail(), START_S, "no worker fails")
        failed = time.monotonic()
        with pytest.raises(EngineError, match="SafetensorError"):
            client.wait_ready(START_S)
        assert time.monotonic() - failed < REPORTED_S


@pytest.mark.parametrize("process", [inner_process, pytest.param(worker_process, marks=pytest.mark.long)])
def test_engine_start_with_killed_vllm_process_raises_within_10_s(
    process: Callable[[int], psutil.Process], tiny_model: Path, tmp_path: Path
) -> None:
    with starting(tiny_model, tmp_path) as client:
        until(lambda: has(process, client.pid), START_S, "the engine does not come so far")
        kill(process(client.pid).pid)
        killed = time.monotonic()
        with pytest.raises(EngineError, match=r"exit code 1 \[GRPO-404\]: .*GRPO-403.*was killed"):
            client.wait_ready(START_S)
        assert time.monotonic() - killed < REPORTED_S
