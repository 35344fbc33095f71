"""A host that imports vLLM before its engine is known: it serves then, and is gone where no engine is needed."""

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from grpo.engine import early
from grpo.engine.client import EngineClient, EngineError
from grpo.engine.environment import engine_environment
from grpo.faults.sessions import session_members
from grpo.rollout.packing import Request
from grpo.rollout.pool import EnginePool
from tests.support.bare_engine import START_S, engine_spec, has_loaded_torch, until
from tests.support.contract import CONTRACT_S, worker_process
from tests.support.launching import ROOT, known_models


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process is a local main without GPUs."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    yield
    early.drop_host()


def engine(model: Path, folder: Path, **variables: str) -> EngineClient:
    environment = engine_environment(
        {**os.environ, **variables}, devices=(), tensor_parallel_size=1, engines_per_node=1
    )
    spec = dataclasses.replace(engine_spec(model), sampling={"max_tokens": 4, "ignore_eos": True})
    return EngineClient(spec, name="the engine", environment=environment, log_path=folder / "engine.log")


@pytest.mark.usefixtures("launched")
def test_early_host_receives_spec_and_environment_and_serves(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = tmp_path / "kernels"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(kernels))
    early.start_host()
    host = early._waiting
    assert host is not None
    until(lambda: has_loaded_torch(host.pid), START_S, "it does not import before it is asked")
    known_models(tmp_path / "cache")
    client = engine(tiny_model, tmp_path, VLLM_CACHE_ROOT=str(tmp_path / "cache"))
    try:
        assert client.pid == host.pid
        ready = client.wait_ready(START_S)
        assert client.call("weight_version", CONTRACT_S) is not None
        pool = EnginePool([client], max_num_seqs=[ready.max_num_seqs], max_tokens=4)
        sampled = pool.collect(pool.submit([Request(token_ids=np.array([5, 6, 7], np.int32), n=1, seed=1)]), START_S)
        assert sampled is not None
        pool.close()
        worker = worker_process(client.pid)
        before_s = sum(worker.cpu_times()[:2])
        time.sleep(1)
        spun_s = sum(worker.cpu_times()[:2]) - before_s
        assert spun_s < 0.3, "the ranks need the core on which it waits for the next message"
    finally:
        client.close()
    assert 0 < ready.startup_s < START_S
    assert (tmp_path / "cache" / "slots" / "0").is_dir()  # its environment has come, too
    assert not list(kernels.rglob("*.so")), "an eager engine compiles nothing, its sampler included"
    assert "Triton" in (tmp_path / "engine.log").read_text()  # what was written before there was a log
    assert not session_members(host.pid)
    assert not host.private_folder.exists()


@pytest.mark.usefixtures("launched")
def test_early_host_with_failed_import_raises_its_reason(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm.py").write_text("raise ImportError('no such kernel')\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    early.start_host()
    assert early._waiting is not None
    until(lambda: not early._waiting.is_running(), START_S, "it goes on without vLLM")  # and nobody hears of it
    client = engine(tiny_model, tmp_path)
    try:
        with pytest.raises(EngineError, match="no such kernel"):
            client.wait_ready(START_S)
    finally:
        client.close()


WAITING = """
import os, sys
from grpo.engine import early
from grpo.engine.early import start_host
start_host()
host = early._waiting
print(host.pid, host.private_folder, flush=True)
sys.stdin.readline()
"""


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("end", ["killed", "done"])
def test_early_host_of_process_without_engine_ends_with_it(end: str) -> None:
    main = subprocess.Popen(
        [sys.executable, "-c", WAITING],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        assert main.stdout is not None
        pid, private_folder = main.stdout.readline().split()
        until(lambda: has_loaded_torch(int(pid)), START_S, "it does not import")
        if end == "killed":
            main.kill()
        _, said = main.communicate("\n", timeout=START_S)
    finally:
        main.kill()
        main.wait()
    assert not said
    until(lambda: not session_members(int(pid)), CONTRACT_S, "the host is left")
    until(lambda: not Path(private_folder).exists(), CONTRACT_S, "its folder is left")
