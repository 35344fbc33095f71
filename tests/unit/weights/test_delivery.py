"""A push group that does not open ends the job: the real trainer, with an engine that does not come to the group."""

import threading
from pathlib import Path
from typing import Any

import pytest

from grpo.faults.failure import JobFailed
from tests.support.engines import agree
from tests.support.scripted_trainer import make_trainer, use_scripted_engines


def test_an_engine_that_does_not_come_to_the_push_group(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = threading.Event()

    def absent(method: str, arguments: dict[str, Any]) -> Any:
        if method == "init_weight_transfer_engine":
            end.wait(3)
        return agree(method, arguments)

    script = use_scripted_engines(monkeypatch, control=absent)
    trainer = make_trainer(tiny_model, tmp_path / "run", script.story, vllm_sync_timeout=1.0)
    try:
        with pytest.raises(JobFailed, match=r"phase 'push group': .* 1 s \(vllm_sync_timeout\) \[GRPO-502\]"):
            trainer.train()
    finally:
        end.set()
        trainer.close()
