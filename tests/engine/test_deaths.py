"""A bare engine that dies, is late or cannot start: whoever waits for it hears why, and nothing of it stays."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import psutil
import pytest

from grpo.engine.client import EngineClient, EngineDied, EngineError
from grpo.engine.environment import engine_environment
from grpo.engine.messages import EngineSpec
from grpo.faults.sessions import session_members
from grpo.rollout.packing import Request
from grpo.rollout.pool import EnginePool
from tests.support.bare_engine import MAX_TOKENS, START_S, engine_spec, has_loaded_torch, until
from tests.support.contract import CONTRACT_S, inner_process
from tests.support.launching import ROOT, kill, wait_gone
from tests.support.left_over import orphaned_shared_memory
from tests.support.stuck_engine import NextStep


@contextlib.contextmanager
def started(
    spec: EngineSpec,
    folder: Path,
    on_death: Callable[[EngineError], None] | None = None,
    *,
    variables: Mapping[str, str] = MappingProxyType({}),
    **more: Any,
) -> Iterator[EngineClient]:
    """Nothing of it is there afterwards."""
    inherited = {**os.environ, **variables}
    environment = engine_environment(inherited, devices=(), tensor_parallel_size=1, engines_per_node=1)
    before = orphaned_shared_memory()
    client = EngineClient(
        spec, name="the engine", environment=environment, log_path=folder / "engine.log", on_death=on_death, **more
    )
    try:
        yield client
    finally:
        client.close()
    assert not session_members(client.pid)
    assert not client.private_folder.exists()
    until(lambda: not orphaned_shared_memory() - before, CONTRACT_S, "shared memory is left")


def has_inner_process(pid: int) -> bool:
    try:
        return inner_process(pid).is_running()
    except StopIteration:
        return False


def test_engine_death_during_sampling_fails_open_calls_and_reports_once(tiny_model: Path, tmp_path: Path) -> None:
    deaths: list[EngineError] = []
    prompts = [Request(token_ids=np.array([5, 6, 7], np.int32), n=4, seed=seed) for seed in (1, 11)]
    with started(engine_spec(tiny_model), tmp_path, deaths.append) as client:
        ready = client.wait_ready(START_S)
        pool = EnginePool([client], max_num_seqs=[ready.max_num_seqs], max_tokens=MAX_TOKENS)
        inner = inner_process(client.pid)
        inner.suspend()  # so that nothing is answered before it dies
        with pytest.raises(EngineError, match=r"8 of 8 completions after 0.2 s .*GRPO-411"):
            pool.collect(pool.submit(prompts), 0.2)

        batch = pool.submit(prompts)
        with ThreadPoolExecutor(1) as thread:
            call = thread.submit(client.call, "reset_prefix_cache", CONTRACT_S)
            until(lambda: bool(client._calls), CONTRACT_S, "nothing was asked")
            assert not deaths
            kill(inner.pid)
            assert pool.collect(batch, CONTRACT_S) is None
            with pytest.raises(EngineError, match="GRPO-405"):
                call.result(CONTRACT_S)
        with pytest.raises(EngineError, match="GRPO-405"):
            client.call("weight_version", CONTRACT_S)  # and whoever asks later
        until(lambda: bool(deaths), CONTRACT_S, "no death was reported")
        assert len(deaths) == 1
        pool.close()


@pytest.mark.long
def test_pool_with_prompt_fatal_to_engine_isolates_and_refuses_it(tiny_model: Path, tmp_path: Path) -> None:
    variables = NextStep(tmp_path, dies_of=103).variables
    prompts = [Request(token_ids=np.arange(5, 8 + n, dtype=np.int32), n=2, seed=10 * n) for n in (0, 1, 100, 2)]
    with contextlib.ExitStack() as engines:

        def start() -> EngineClient:
            spec = engine_spec(tiny_model)
            spec.sampling["max_tokens"] = 4
            client = engines.enter_context(started(spec, tmp_path, variables=variables))
            client.wait_ready(START_S)
            return client

        pool = EnginePool([start()], max_num_seqs=[16], max_tokens=4)
        batch, num_deaths = pool.submit(prompts), 0
        while (completions := pool.collect(batch, START_S)) is None:
            num_deaths += 1
            pool.take_up([start()], policy_version=0)
        pool.close()
        assert num_deaths in (3, 4), "and one more, perhaps, at which all else was answered already"
        assert [len(part) for part in np.split(completions.token_ids, np.cumsum(completions.lengths)[:-1])] == [
            4, 4, 4, 4, 0, 0, 4, 4
        ]  # fmt: skip
        assert len(batch.refusals) == 2
        assert "a prompt of 103 tokens, which is not sampled again [GRPO-416]" in batch.refusals[0]


def test_wait_ready_of_host_killed_during_import_raises(tiny_model: Path, tmp_path: Path) -> None:
    with started(engine_spec(tiny_model), tmp_path) as client:
        until(lambda: has_loaded_torch(client.pid), START_S, "it does not import")
        with pytest.raises(EngineError, match=r"after 0 s .*GRPO-401"):
            client.wait_ready(0.1)
        kill(client.pid)
        with pytest.raises(EngineError, match=r"the engine .* signal 9 \[GRPO-406\]"):
            client.wait_ready(CONTRACT_S)


def test_engine_with_stopped_process_ends_only_after_stopped_timeout(tiny_model: Path, tmp_path: Path) -> None:
    deaths: list[EngineError] = []
    with started(engine_spec(tiny_model), tmp_path, deaths.append, stopped_timeout_s=6.0) as client:
        until(lambda: has_loaded_torch(client.pid), START_S, "it does not import")
        process = psutil.Process(client.pid)
        process.suspend()
        time.sleep(3.0)
        process.resume()
        client.wait_ready(START_S)
        assert not deaths
        inner = inner_process(client.pid)
        inner.suspend()
        began = time.monotonic()
        with pytest.raises(EngineDied, match=rf"its process {inner.pid} was stopped \(SIGSTOP\?\) for 6 s"):
            client.call("weight_version", CONTRACT_S)
        assert time.monotonic() - began < CONTRACT_S
        until(lambda: len(deaths) == 1, CONTRACT_S, "no death was reported")
        assert not session_members(client.pid)


def test_death_of_host_with_deleted_log_is_reported(tiny_model: Path, tmp_path: Path) -> None:
    deaths: list[EngineError] = []
    (tmp_path / "logs").mkdir()
    with started(engine_spec(tiny_model), tmp_path / "logs", on_death=deaths.append) as client:
        until(lambda: has_loaded_torch(client.pid), START_S, "it does not import")
        shutil.rmtree(tmp_path / "logs")
        kill(client.pid)
        with pytest.raises(EngineError, match=r"the engine .* signal 9 \[GRPO-406\]"):
            client.wait_ready(CONTRACT_S)
        until(lambda: len(deaths) == 1, CONTRACT_S, "no death was reported")


def test_wait_ready_of_engine_with_bad_argument_raises_its_reason(tiny_model: Path, tmp_path: Path) -> None:
    with (
        started(engine_spec(tiny_model, kv_cache_dtype="no-such-type"), tmp_path) as client,
        pytest.raises(EngineError, match="no-such-type"),
    ):
        client.wait_ready(START_S)


LOCAL_MAIN = f"""
import json, os, sys
from pathlib import Path
from grpo.engine.client import EngineClient
from grpo.engine.environment import engine_environment
from grpo.engine.messages import EngineSpec
spec, folder = EngineSpec(**json.loads(sys.argv[1])), Path(sys.argv[2])
environment = engine_environment(os.environ, devices=(), tensor_parallel_size=1, engines_per_node=1)
client = EngineClient(spec, name="it", environment=environment, log_path=folder / "engine.log")
print(client.pid, client.private_folder, flush=True)
client.wait_ready({START_S})
"""


@pytest.mark.parametrize("moment", [has_loaded_torch, has_inner_process])
def test_kill_of_local_main_during_engine_start_leaves_no_process(
    moment: Callable[[int], bool], tiny_model: Path, tmp_path: Path
) -> None:

    spec = engine_spec(tiny_model)
    arguments = [json.dumps({"engine_args": spec.engine_args, "sampling": spec.sampling}), str(tmp_path)]
    before = orphaned_shared_memory()
    main = subprocess.Popen(
        [sys.executable, "-c", LOCAL_MAIN, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        assert main.stdout is not None
        host, private_folder = main.stdout.readline().split()
        until(lambda: moment(int(host)), START_S, "the engine does not come so far")
        engine = [psutil.Process(pid) for pid in session_members(int(host))]
        assert engine
    finally:
        main.kill()
        main.wait()
    assert not wait_gone(engine, CONTRACT_S)
    until(lambda: not session_members(int(host)), CONTRACT_S, "a process of the engine is left")
    assert not Path(private_folder).exists()
    until(lambda: not orphaned_shared_memory() - before, CONTRACT_S, "shared memory is left")
