"""Weight syncs to engines that have completions under way: when they are paused, and that none that goes on stays
so."""

from pathlib import Path
from typing import Any

import pytest
import torch

from grpo.engine.client import EngineError
from grpo.rollout.pool import EnginePool
from grpo.weights.report import WeightSyncReport, slowest
from grpo.weights.source import GatheredSource
from grpo.weights.sync import WeightSyncer
from tests.support.engines import Script, ScriptedEngine, agree
from tests.support.scripted_trainer import make_trainer, of_kind, use_scripted_engines
from tests.support.tiny_models import tiny_model

PAUSES = ("pause", "resume")


def syncer_of(engines: list[ScriptedEngine], **more: Any) -> WeightSyncer:
    source = GatheredSource(tiny_model("qwen2-tied"), wire_dtype=torch.bfloat16, bucket_bytes=2**17)
    return WeightSyncer(source, engines, backend="shm", tensor_parallel_size=1, timeout_s=5.0, **more)


def methods_of(engine: ScriptedEngine) -> list[str]:
    return [method for method, _ in engine.calls]


def test_sync_in_flight_pauses_engines_and_keeps_prefix_caches() -> None:
    def count(method: str, kwargs: dict[str, Any]) -> Any:
        return {4: 17} if method == "pause" else agree(method, kwargs)

    engines = [ScriptedEngine(script=Script(control=count)) for _ in range(2)]
    paused: list[tuple[int, list[dict[int, int]]]] = []
    syncer = syncer_of(engines, in_flight=True, on_paused=lambda *said: paused.append(said))
    syncer.connect()
    fill = syncer.source.fill
    asked_at_first_fill: list[list[str]] = []

    def noted(bucket: Any, places: Any) -> None:
        asked_at_first_fill.append(methods_of(engines[0]))
        fill(bucket, places)

    syncer.source.fill = noted  # type: ignore[method-assign]
    report, error = syncer.sync(3, checks_bits=True)
    assert error is None
    assert paused == [(3, [{4: 17}] * 2)]
    assert asked_at_first_fill[0] == ["init_weight_transfer_engine"], "the first bucket is filled while they sample"
    for engine in engines:
        first, pause, start, *updates, finish, check, resume = methods_of(engine)
        assert (first, pause, start) == ("init_weight_transfer_engine", "pause", "start_weight_update")
        assert {*updates} == {"update_weights"}
        assert (finish, check, resume) == ("finish_weight_update", "check_bits", "resume")
    assert report.paused_s is not None
    assert 0 < report.paused_s < report.total_s
    assert "weight_sync/paused_s" in report.metrics()
    syncer.close()


def test_sync_at_rest_does_not_pause_engines() -> None:
    engine = ScriptedEngine()
    syncer = syncer_of([engine])
    with syncer.at_rest():
        syncer.connect()
    report, error = syncer.sync(1)
    assert error is None
    assert not {*PAUSES} & {*methods_of(engine)}
    assert methods_of(engine)[-1] == "reset_prefix_cache"
    assert report.paused_s is None
    assert "weight_sync/paused_s" not in report.metrics()
    syncer.close()


def test_sync_on_rank_without_engines_reports_no_pause() -> None:
    bystander = syncer_of([], in_flight=True)
    with bystander.at_rest():
        bystander.connect()
    report, error = bystander.sync(1)
    assert (report.paused_s, error) == (None, None)
    sent = WeightSyncReport(total_s=2.0, gather_s=1.0, send_s=1.0, num_bytes=8, paused_s=0.5)
    assert slowest([report, sent]).paused_s == 0.5


@pytest.mark.parametrize("refused", ["pause", "start_weight_update", "update_weights", "check_bits"])
def test_failed_sync_in_flight_returns_error_and_resumes_no_engine(refused: str) -> None:
    """With parts of two policies; those who called it end the engines."""

    def refuse(method: str, kwargs: dict[str, Any]) -> Any:
        if method == refused:
            raise EngineError(f"does not take {method}")
        return agree(method, kwargs)

    engines = [ScriptedEngine(), ScriptedEngine(script=Script(control=refuse))]
    syncer = syncer_of(engines, in_flight=True)
    syncer.connect()
    _, error = syncer.sync(1, checks_bits=True)
    assert str(error) == f"does not take {refused}"
    assert not any("resume" in methods_of(engine) for engine in engines)
    syncer.close()


def test_at_rest_pauses_engines_and_resumes_only_on_success() -> None:
    engines = [ScriptedEngine(), ScriptedEngine()]
    syncer = syncer_of(engines, in_flight=True)
    with syncer.at_rest():
        syncer.connect()
    with pytest.raises(RuntimeError), syncer.at_rest():
        raise RuntimeError
    for engine in engines:
        assert methods_of(engine) == ["pause", "init_weight_transfer_engine", "resume", "pause"]
    syncer.close()


# Two engines are paused and go on when their group opens, then in each of two weight syncs.
DEATHS = {
    "at a pause": [("pause", 5)],
    "amid an update": [("update_weights", 3)],
    "at a resume": [("resume", 6)],
    "while the group opens": [("init_weight_transfer_engine", 2)],
    "amid an update, and while the next group opens": [("update_weights", 3), ("init_weight_transfer_engine", 4)],
}


@pytest.mark.parametrize("where", DEATHS)
def test_engine_death_during_sync_leaves_no_live_engine_paused(
    where: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And none samples with parts of two policies: between a weight sync that began and one that ended none goes on."""
    versions: list[int] = []
    note = EnginePool.note_paused

    def noted(pool: EnginePool, step: int, of_engines: Any) -> None:
        versions.append(step)
        note(pool, step, of_engines)

    monkeypatch.setattr(EnginePool, "note_paused", noted)
    script = use_scripted_engines(monkeypatch, deaths=DEATHS[where])
    config = {"vllm_engines_per_node": 2, "vllm_max_logprob_gap": 1e9, "max_steps": 2, "generation_lookahead": 2}
    trainer = make_trainer(tiny_model, tmp_path / "run", script.story, **config)
    try:
        trainer.train()
        live = [*trainer._local.engines.clients]
    finally:
        trainer.close()
    assert of_kind(script.story, "step") == [1, 2]
    assert len(live) == 2
    assert len(script.started) >= 3
    for engine in script.started:
        calls = [method for method in methods_of(engine) if method in (*PAUSES, "update_weights", "prompt_logprobs")]
        state = "resume"
        for method in calls:
            if method in PAUSES:
                assert method != state, calls
                state = method
            else:
                assert (state == "pause") == (method == "update_weights"), calls
        assert state == "resume" or engine not in live, calls
        assert "reset_prefix_cache" not in methods_of(engine)
    assert {*versions} == {0, 1}
