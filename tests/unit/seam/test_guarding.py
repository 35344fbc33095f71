"""Engines whose weights stay behind are noticed by the tokens that are trained on.

The real trainer over a scripted engine that samples from a copy of its model.
"""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from grpo import GRPOTrainer
from grpo.faults.failure import StepFailed
from grpo.groups.node_groups import NodeGroups
from grpo.rollout.facts import sampled_by
from grpo.rollout.packing import REFUSED, engine_id, pack_completions
from grpo.seam import guarding
from grpo.weights import delivery
from grpo.weights.guard import IN_A_ROW, REFERENCE_BATCHES
from tests.support.copied_model import CopiedModel
from tests.support.scripted_trainer import make_trainer, use_scripted_engines

STALE_FROM = 10
# As the demo has them (configs/train/demo.yaml).
AS_THE_DEMO = {"learning_rate": 4e-4, "lr_scheduler_type": "cosine_with_min_lr", "warmup_steps": 10}
AS_THE_DEMO |= {"lr_scheduler_kwargs": {"min_lr_rate": 0.1}}
UNCORRECTED: dict[str, Any] = {"vllm_importance_sampling_correction": False}
PATHS: dict[str, dict[str, Any]] = {
    "corrected": {},
    "uncorrected": UNCORRECTED,
    "uncorrected_two_steps_a_batch": {**UNCORRECTED, "steps_per_generation": 2},
    "uncorrected_two_batches_a_step": {**UNCORRECTED, "steps_per_generation": 1, "gradient_accumulation_steps": 2},
    "uncorrected_in_two_parts": {**UNCORRECTED, "steps_per_generation": 2, "gradient_accumulation_steps": 2},
    "clipped_on_engines": {"old_logprobs": "engine"},
    "clipped_on_engines_in_two_parts": {
        **{"old_logprobs": "engine", "steps_per_generation": 2},
        "gradient_accumulation_steps": 2,
    },
}


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    reported: list[str] = []
    monkeypatch.setattr(guarding._log, "warning", lambda text, *values: reported.append(text % values))
    return reported


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> CopiedModel:
    monkeypatch.setattr(delivery, "is_due", lambda sync: False)  # nothing is verified but what the guard requires
    return CopiedModel(use_scripted_engines(monkeypatch))


Train = Callable[..., GRPOTrainer]


@pytest.fixture
def train(tiny_model: Path, tmp_path: Path, engine: CopiedModel) -> Train:
    def train(name: str = "run", **settings: Any) -> GRPOTrainer:
        trainer = engine.trainer = make_trainer(tiny_model, tmp_path / name, [], **{**AS_THE_DEMO, **settings})
        try:
            trainer.train()
        finally:
            trainer.close()
        return trainer

    return train


def logged(trainer: GRPOTrainer) -> list[dict[str, Any]]:
    """Of the steps in which a batch was judged."""
    return [line for line in trainer.state.log_history if "sampling/logprob_gap" in line]


@pytest.mark.parametrize("path", ["corrected", "uncorrected"])
def test_guard_with_stale_layer_warns_within_20_batches(
    path: str, train: Train, engine: CopiedModel, warnings: list[str]
) -> None:
    """And brought by the weight sync behind the warning, which is verified; then all is well."""
    engine.stays = lambda name: ".layers.1." in name and engine.trainer.state.global_step > STALE_FROM and not warnings
    steps = logged(train(max_steps=STALE_FROM + 40, **PATHS[path]))
    assert len(steps) == STALE_FROM + 40
    (warning,) = warnings
    assert "node 0" in warning
    assert "GRPO-413" in warning
    noticed = next(line["step"] for line in steps if line["sampling/gap_alarms"])
    assert STALE_FROM < noticed <= STALE_FROM + 20
    assert engine.verified == [noticed]
    gaps = [line["sampling/logprob_gap"] for line in steps]
    assert max(gaps[:STALE_FROM]) < 1e-4
    assert gaps[noticed - 1] > 0.01
    assert max(gaps[noticed:]) < 1e-4


def test_guard_with_drifted_node_names_it(
    train: Train, engine: CopiedModel, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a second rank, on a node of its own, whose engine is beyond all measure from the 21st batch on."""
    exchange, batches = NodeGroups.exchange, itertools.count(1)

    def with_another(groups: NodeGroups, watch: Any, failure: Any, value: Any = None, kind: Any = None) -> list[Any]:
        answers = exchange(groups, watch, failure, value, kind)
        if kind is guarding._RankGap:
            answers.append(
                kind(node=1, host="other", sums={1: (6.0 if next(batches) > REFERENCE_BATCHES else 0.06, 6)})
            )
        return answers

    monkeypatch.setattr(NodeGroups, "exchange", with_another)
    steps = logged(train(max_steps=REFERENCE_BATCHES + IN_A_ROW + 3))
    (warning,) = warnings
    assert "node 1 (other)" in warning
    assert "differ by 1 nats" in warning
    assert engine.verified == [REFERENCE_BATCHES + IN_A_ROW]
    assert [line["sampling/logprob_gap_max"] for line in steps[-4:]] == pytest.approx([1.0] * 4)


@pytest.mark.parametrize("path", PATHS)
def test_logprob_gap_is_mean_over_tokens_on_every_path(
    path: str, train: Train, engine: CopiedModel, tmp_path: Path
) -> None:
    """From what TRL scores before it trains, or from the forward passes of training."""
    engine.lengths = lambda seed: int(np.random.default_rng(seed).integers(1, 5))
    engine.off = lambda num_tokens: 0.1 * np.arange(num_tokens)
    steps = logged(train(max_steps=4, learning_rate=0.0, **PATHS[path]))
    assert len(set(engine.sampled)) > 2
    assert len(engine.sampled) % len(steps) == 0
    of_steps = np.array(engine.sampled).reshape(len(steps), -1)
    expected = [np.concatenate([engine.off(length) for length in lengths]).mean() for lengths in of_steps]
    assert [line["sampling/logprob_gap"] for line in steps] == pytest.approx(expected, abs=1e-5)
    assert len(set(np.round(expected, 5))) > 1
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    of_node = [line["by_node"]["sampling/logprob_gap"] for line in lines if "sampling/logprob_gap" in line]
    assert of_node == [pytest.approx([value], abs=1e-5) for value in expected]


def test_guard_with_older_policy_judges_nothing(train: Train, engine: CopiedModel, warnings: list[str]) -> None:
    engine.off = np.ones
    trainer = train(max_steps=3, generation_lookahead=1, vllm_max_logprob_gap=1e-3)
    assert not logged(trainer)


def test_gap_of_rows_skips_tool_padding_and_unscored_tokens() -> None:
    batch = {
        "sampling_per_token_logps": torch.tensor([[-1.0, -2.0, -3.0], [float("nan"), -1.0, 0.0]]),
        "completion_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
        "tool_mask": torch.tensor([[1, 0, 1], [1, 1, 1]]),
    }
    own = torch.tensor([[-1.5, -9.0, -2.0], [-1.0, -1.25, -7.0]])
    assert guarding.gap_of_rows(batch, own).tolist() == [[1.5, 2.0], [0.25, 1.0]]


def test_sampled_by_names_node_only_for_present_weights() -> None:
    engines = [engine_id(0, 3), engine_id(2, 0), engine_id(2, 1), REFUSED]
    completions = pack_completions([[5]] * 3 + [[]], [[-1.0]] * 3 + [[]], [7, 6, 7, REFUSED], engines)
    assert sampled_by(completions, 7).tolist() == [0, REFUSED, 2, REFUSED]


def test_max_logprob_gap_with_top_p_is_not_applied(train: Train, engine: CopiedModel) -> None:
    """Top-p takes a share of every token's probability away from the trainer's side."""
    engine.off = np.ones
    assert len(logged(train(max_steps=2, vllm_max_logprob_gap=0.5, top_p=0.9))) == 2
    with pytest.raises(StepFailed, match="GRPO-414"):
        train("again", max_steps=2, vllm_max_logprob_gap=0.5)


def test_max_logprob_gap_exceeded_ends_job_after_checkpoint(train: Train, engine: CopiedModel, tmp_path: Path) -> None:
    engine.stays = lambda name: ".layers.1." in name and engine.trainer.state.global_step > STALE_FROM
    with pytest.raises(StepFailed, match=r"node 0 .*GRPO-414.*vllm_max_logprob_gap is 0\.001"):
        train(max_steps=STALE_FROM + 40, vllm_max_logprob_gap=1e-3)
    state = json.loads((tmp_path / "run" / "run_state.json").read_text())
    assert (state["step"], state["kind"]) == (STALE_FROM + 2, "engine")
    assert state["checkpoint"].endswith(f"checkpoint-{STALE_FROM + 2}")
