"""An engine that is alive and ends no step: it is distinguished from a slow one, shows where it is, and is ended."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from grpo.engine.client import EngineClient, EngineError
from grpo.engine.environment import engine_environment
from grpo.faults.sessions import session_members
from grpo.rollout.packing import Request
from grpo.rollout.pool import EnginePool
from tests.support.bare_engine import START_S, engine_spec, until
from tests.support.contract import CONTRACT_S, inner_process
from tests.support.stuck_engine import FOR_EVER, NextStep

LIMIT_S = 3.0
SLOW_S = 1.5  # of the history, which no step without a wish comes near


@pytest.mark.parametrize("tensor_parallel_size", [1, pytest.param(2, marks=pytest.mark.long)])
def test_stall_detection_spares_slow_step_and_ends_stuck_engine(
    tensor_parallel_size: int, tiny_model: Path, tmp_path: Path
) -> None:
    next_step = NextStep(tmp_path)
    environment = engine_environment(
        {**os.environ, **next_step.variables},
        devices=(),
        tensor_parallel_size=tensor_parallel_size,
        engines_per_node=1,
    )
    deaths: list[EngineError] = []
    spec = engine_spec(tiny_model, tensor_parallel_size=tensor_parallel_size)
    spec.sampling["max_tokens"] = 4
    client = EngineClient(
        spec,
        name="the engine",
        environment=environment,
        log_path=tmp_path / "engine.log",
        on_death=deaths.append,
        stall_timeout_s=LIMIT_S,
    )
    try:
        ready = client.wait_ready(START_S)
        pool = EnginePool([client], max_num_seqs=[ready.max_num_seqs], max_tokens=4)
        requests = [Request(token_ids=np.array([5, 6, 7], np.int32), n=4, seed=1)]
        for seconds in (SLOW_S, 4 * LIMIT_S):
            next_step.takes(seconds)
            began = time.monotonic()
            completions = pool.collect(pool.submit(requests), START_S)
            assert completions is not None
            assert time.monotonic() - began > seconds
        assert not deaths
        steps, slowest_s = client._host.progress.read()
        assert steps >= 2 * 4, "of four tokens"
        assert slowest_s >= 4 * LIMIT_S

        client._stalls.limit_s = lambda **_: LIMIT_S  # type: ignore[method-assign]  ten times that is too long to wait
        core = inner_process(client.pid)
        next_step.takes(FOR_EVER)
        batch = pool.submit(requests)
        until(lambda: next_step.has_begun, CONTRACT_S, "nothing is scheduled")
        with pytest.raises(EngineError, match="did not answer weight_version within 8 s"):
            client.call("weight_version", 8.0)  # as every call of a weight sync it has a limit of its own
        assert not deaths
        with ThreadPoolExecutor(1) as thread:
            pause = thread.submit(client.call, "pause", START_S)  # which waits for the step, and has no other limit
            with pytest.raises(EngineError, match="the engine is stuck"):
                client.call("prompt_logprobs", START_S, prompts=[[5, 6, 7]])  # for which it runs steps, too
            assert "the engine is stuck" in str(pause.exception())
        assert pool.collect(batch, CONTRACT_S) is None, "it is lost, as one that died"
        until(lambda: bool(deaths), CONTRACT_S, "no death was reported")
        (death,) = deaths
        first, *stacks = death.what.splitlines()
        assert "the engine is stuck: it has ended no step for " in first
        assert "with 6 requests under way" in first
        assert "[GRPO-415]" in first
        begins = [line for line in stacks if line.startswith("process ")]
        assert len(begins) >= 2 + (tensor_parallel_size > 1) * tensor_parallel_size
        assert begins[0].startswith(f"process {core.pid} (")
        assert begins[-1].startswith(f"process {client.pid} (")
        assert any("slow_steps.py" in line and "take_long" in line for line in stacks[2:6]), death.what
        assert death.what in client.log_path.read_text()
        assert not session_members(client.pid)
        pool.close()
    finally:
        client.close()
