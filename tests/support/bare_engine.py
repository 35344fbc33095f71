"""A bare engine of a tiny model, without a trainer."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo.engine.messages import EngineSpec
from grpo.weights.engine_args import transfer_args

START_S = 240  # 12 s alone
MAX_TOKENS = 3000


def engine_spec(model: Path, **engine_args: Any) -> EngineSpec:
    return EngineSpec(
        engine_args={
            "model": str(model),
            "dtype": "float32",
            "max_model_len": MAX_TOKENS + 100,
            "enforce_eager": True,
            "kv_cache_memory_bytes": 2**28,
            **transfer_args("shm"),
            **engine_args,
        },
        sampling={"max_tokens": MAX_TOKENS, "ignore_eos": True},
    )


def until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def has_loaded_torch(pid: int) -> bool:
    """A host loads it a few seconds before vLLM is imported."""
    return "libtorch_cpu" in Path(f"/proc/{pid}/maps").read_text()
