"""What a seed samples does not depend on how many of the prompts' tokens fit into one step."""

import os
from pathlib import Path

import numpy as np

from grpo.engine.client import EngineClient
from grpo.engine.environment import engine_environment
from grpo.rollout.packing import Request, to_lists
from grpo.rollout.pool import EnginePool
from tests.support.bare_engine import START_S, engine_spec


def sampled(model: Path, folder: Path, requests: list[Request], **engine_args: int) -> list[list[int]]:
    spec = engine_spec(model, **engine_args)
    spec.sampling["max_tokens"] = 6
    environment = engine_environment(os.environ, devices=(), tensor_parallel_size=1, engines_per_node=1)
    client = EngineClient(spec, name="the engine", environment=environment, log_path=folder / "engine.log")
    try:
        ready = client.wait_ready(START_S)
        pool = EnginePool([client], max_num_seqs=[ready.max_num_seqs], max_tokens=6)
        completions = pool.collect(pool.submit(requests), START_S)
        pool.close()
    finally:
        client.close()
    assert completions is not None, client.log_tail()
    return to_lists(completions)[0]


def test_seeded_sampling_with_chunked_prompts_matches_whole_prompts(tiny_model: Path, tmp_path: Path) -> None:
    """On CPUs vLLM's engine would die of the first part (0.31)."""
    rng = np.random.default_rng(0)
    requests = [Request(token_ids=rng.integers(5, 90, 150).astype(np.int32), n=2, seed=10 * row) for row in range(6)]
    in_parts = sampled(tiny_model, tmp_path, requests, max_num_batched_tokens=64)
    assert in_parts == sampled(tiny_model, tmp_path, requests, max_num_batched_tokens=4096)
    assert len({tuple(tokens) for tokens in in_parts}) == 12
