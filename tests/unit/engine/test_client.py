"""What the local main makes of an engine's log."""

import pytest

from grpo.engine.client import root_error

DEAD = "EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause."
CAUSE = "RuntimeError: Unsupported CPU attention configuration: head_dim=16"


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (f"(EngineCore pid=7) ERROR 11-26 core.py:9 {CAUSE}\nvllm.v1.engine.exceptions.{DEAD}", CAUSE),
        (f"vllm.v1.engine.exceptions.{DEAD}\n", ""),
        ("all is well\n", ""),
    ],
)
def test_root_error_of_log_skips_engine_dead_error(log: str, cause: str) -> None:
    assert root_error(log) == cause
