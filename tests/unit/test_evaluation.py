"""What evaluation samples from, and training after it: the real trainer over a scripted engine."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from grpo.rollout.pool import EnginePool
from grpo.weights import delivery
from grpo.weights.sync import WeightSyncer
from tests.support.engines import Script
from tests.support.scripted_trainer import make_trainer, of_kind, use_scripted_engines


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    """Its story has ("sample", difference) of every batch: how far the trainer's weights are from what was synced."""
    script, sync, submit = use_scripted_engines(monkeypatch), WeightSyncer.sync, EnginePool.submit
    models: list[torch.nn.Module] = []
    synced: list[torch.Tensor] = []

    def weights() -> torch.Tensor:
        return models[0].get_input_embeddings().weight.detach().clone()

    def noted_sync(syncer: WeightSyncer, version: int, **settings: Any) -> Any:
        models[:] = [syncer.source.model]
        synced[:] = [weights()]
        return sync(syncer, version, **settings)

    def noted_submit(pool: EnginePool, requests: Any, **more: Any) -> Any:
        script.story.append(("sample", (weights() - synced[0]).abs().max().item()))
        return submit(pool, requests, **more)

    monkeypatch.setattr(delivery, "is_due", lambda sync: False)
    monkeypatch.setattr(WeightSyncer, "sync", noted_sync)
    monkeypatch.setattr(EnginePool, "submit", noted_submit)
    return script


class SwapsWeights(TrainerCallback):
    """Evaluates other weights than are trained, as averages of them are: in before an evaluation, out behind it."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        model.get_input_embeddings().weight.data.add_(1)

    def on_evaluate(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        model.get_input_embeddings().weight.data.sub_(1)


EVALUATES: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8}


@pytest.mark.parametrize("ahead", [0, 1])
def test_weights_swapped_by_callback_serve_evaluation_only(
    ahead: int, tiny_model: Path, tmp_path: Path, script: Script
) -> None:
    trainer = make_trainer(tiny_model, tmp_path / "run", script.story, generation_lookahead=ahead, **EVALUATES)
    trainer.add_callback(SwapsWeights())
    try:
        trainer.train()
    finally:
        trainer.close()
    assert len(of_kind(script.story, "evaluate")) == 3 * 2  # each time both groups of the evaluation's prompts
    assert set(of_kind(script.story, "sample")) == {0.0}
    lags = [line["rollout/policy_lag"] for line in trainer.state.log_history if "reward" in line]
    assert lags == [0, ahead, ahead]  # the same weights once more make no batch older


def test_evaluate_after_loading_best_model_syncs_its_weights(tiny_model: Path, tmp_path: Path, script: Script) -> None:
    saves = {"save_strategy": "steps", "save_steps": 1, "load_best_model_at_end": True, "learning_rate": 1e-2}
    trainer = make_trainer(
        tiny_model, tmp_path / "run", script.story, metric_for_best_model="eval_reward", **saves, **EVALUATES
    )
    rewards = iter([3.0, 1.0, 1.0, 1.0])
    evaluate = trainer.evaluate
    trainer.evaluate = lambda *args, **kwargs: evaluate(*args, **kwargs) | {"eval_reward": next(rewards)}
    try:
        trainer.train()
        assert trainer.state.best_global_step == 1
        script.story.clear()
        trainer.evaluate()
    finally:
        trainer.close()
    assert of_kind(script.story, "sync") == [3]
    assert set(of_kind(script.story, "sample")) == {0.0}


def test_eval_sets_without_named_dataset_raises(tiny_model: Path, tmp_path: Path, script: Script) -> None:
    with pytest.raises(ValueError, match="eval_sets speaks of math, but eval_dataset is no dict of sets by name"):
        make_trainer(tiny_model, tmp_path / "run", script.story, eval_sets={"math": {"temperature": 0}}, **EVALUATES)
