"""Weight syncs that are verified: the real trainer over an engine whose log-probabilities are off by a given amount."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import TrainerCallback

from grpo import GRPOTrainer
from grpo.checkpoints.checkpoints import newest_complete
from grpo.faults.failure import JobFailed, StepFailed
from grpo.weights.probe import trainer_logprobs
from tests.support.engines import Script, agree
from tests.support.scripted_trainer import make_trainer, use_scripted_engines
from tests.support.tiny_models import save_tiny_model, tiny_tokenizer


class OffBy:
    """Answers of an engine that computes what the trainer does, but for what a test adds to a verification."""

    def __init__(self, script: Script) -> None:
        self.trainer: GRPOTrainer
        self.off: Callable[[int], np.ndarray | float] = lambda verification: 0.0
        """Of the n-th verification, counted from 1; [P, L-1] or one number for all."""
        self.num_verifications = 0
        script.control = self

    def __call__(self, method: str, kwargs: dict[str, Any]) -> Any:
        if method != "prompt_logprobs":
            return agree(method, kwargs)
        self.num_verifications += 1
        probe = {"input_ids": torch.tensor(kwargs["prompts"])}
        own = trainer_logprobs(self.trainer.model, probe, contextlib.nullcontext())
        return (own + self.off(self.num_verifications)).tolist()


class AfterStep(TrainerCallback):
    def __init__(self, step: int, act: Callable[[], None]) -> None:
        self.step, self.act = step, act

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.act()


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    return use_scripted_engines(monkeypatch)


@pytest.fixture
def engine(script: Script) -> OffBy:
    return OffBy(script)


def make(tiny_model: Path, folder: Path, script: Script, engine: OffBy, **settings: Any) -> GRPOTrainer:
    trainer = engine.trainer = make_trainer(tiny_model, folder, script.story, num_prompts=4, **settings)
    return trainer


def freeze_a_layer(trainer: GRPOTrainer) -> set[str]:
    """Names of what stays behind in all but full weight syncs."""
    layer = trainer.model.model.layers[0].requires_grad_(False)
    return {f"model.layers.0.{name}" for name, _ in layer.named_parameters()}


def names_sent(script: Script, sync: int) -> set[str]:
    """Of the `sync`-th weight sync, counted from 1, to the first engine."""
    syncs: list[set[str]] = []
    for method, kwargs in script.started[0].calls:
        if method == "start_weight_update":
            syncs.append(set())
        elif method == "update_weights":
            syncs[-1].update(kwargs["update_info"]["names"])
    return syncs[sync - 1]


def test_require_full_sync_sends_and_verifies_all_weights(
    tiny_model: Path, tmp_path: Path, script: Script, engine: OffBy
) -> None:
    trainer = make(tiny_model, tmp_path, script, engine, max_steps=12)
    frozen = freeze_a_layer(trainer)
    delivery = lambda: trainer._local._serving.delivery  # noqa: E731
    trainer.add_callback(AfterStep(11, lambda: delivery().require_full_sync()))
    try:
        trainer.train()
        found = delivery().verification
    finally:
        trainer.close()
    assert frozen <= names_sent(script, 1)
    assert not frozen & names_sent(script, 11)
    assert frozen <= names_sent(script, 12)
    assert engine.num_verifications == 11, "the first ten, and the one that was required"
    assert (found.number, found.policy_version, found.gap.mean) == (12, 11, 0.0)


def off_in_some(tokens: int, nats: float) -> np.ndarray:
    """[4, 31]: in that many of the 124 scored tokens."""
    off = np.zeros(4 * 31)
    off[:: 124 // tokens][:tokens] = nats
    return off.reshape(4, 31)


LOOSE = 10.0  # nats, beyond what a scripted engine says of the tokens that it samples
BF16: dict[str, Any] = {"model_init_kwargs": {"dtype": "bfloat16"}, "max_steps": 2}


@pytest.fixture
def moe(tmp_path: Path) -> Path:
    """A model with routers."""
    return save_tiny_model("qwen3-moe", tmp_path / "moe")


def run_verified(model: Path, folder: Path, script: Script, engine: OffBy, **settings: Any) -> dict[str, Any]:
    """Train; what the run's state says at the end."""
    trainer = make(model, folder, script, engine, **settings)
    try:
        trainer.train()
    finally:
        trainer.close()
    return state_of(folder)


def state_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "run_state.json").read_text())


def test_verification_with_flipped_experts_passes(moe: Path, tmp_path: Path, script: Script, engine: OffBy) -> None:
    engine.off = lambda verification: off_in_some(8, 3.5)
    assert run_verified(moe, tmp_path / "run", script, engine, **BF16)["state"] == "finished"
    assert engine.num_verifications == 2


@pytest.mark.parametrize("off", [0.2, -0.2])
def test_verification_with_every_token_off_ends_job_at_once(
    moe: Path, tmp_path: Path, script: Script, engine: OffBy, off: float
) -> None:
    engine.off = lambda verification: off
    with pytest.raises(JobFailed, match=r"after weight sync 1 \[GRPO-504\]: .* 0.2 nats in the mean .* limit is 0.15"):
        run_verified(moe, tmp_path / "run", script, engine, **BF16)
    state = state_of(tmp_path / "run")
    assert (state["state"], state["kind"]) == ("failed", "user"), "another start would meet it again"
    assert engine.num_verifications == 1


def test_verification_of_dense_model_judges_by_mean(
    tiny_model: Path, tmp_path: Path, script: Script, engine: OffBy
) -> None:
    engine.off = lambda verification: off_in_some(8, 3.5)
    with pytest.raises(JobFailed, match=r"GRPO-504.* 0.226 nats in the mean and 3.5 at most, the limit is 0.15"):
        run_verified(tiny_model, tmp_path, script, engine, **BF16)


def test_later_verification_failure_leaves_checkpoint_of_last_step(
    tiny_model: Path, tmp_path: Path, script: Script, engine: OffBy
) -> None:
    trainer = make(tiny_model, tmp_path, script, engine, max_steps=14)
    frozen = freeze_a_layer(trainer)
    engine.off = lambda verification: 0.0 if verification <= 10 else 0.01
    trainer.add_callback(AfterStep(11, lambda: trainer._local._serving.delivery.require_full_sync()))
    try:
        with pytest.raises(StepFailed, match=r"engine 0.* weight sync 13, which .*\[GRPO-508\]: .* 0.01 nats"):
            trainer.train()
    finally:
        trainer.close()
    state = state_of(tmp_path)
    assert (state["state"], state["step"], state["kind"]) == ("failed", 11, "engine")
    assert "node 0" in state["why"]
    assert newest_complete(tmp_path) == tmp_path / "checkpoint-11"
    assert frozen <= names_sent(script, 13), "the whole model was sent once more"
    engine.off = lambda verification: 0.0
    trainer = make(tiny_model, tmp_path, script, engine, max_steps=12, resume_from_checkpoint="auto")
    freeze_a_layer(trainer)
    try:
        trainer.train()
    finally:
        trainer.close()
    state = state_of(tmp_path)
    assert (state["state"], trainer.first_step, state["step"]) == ("finished", 11, 12)


def test_verification_gap_once_is_mended_by_full_sync(
    tiny_model: Path, tmp_path: Path, script: Script, engine: OffBy, caplog: pytest.LogCaptureFixture
) -> None:
    engine.off = lambda verification: 3.0 if verification == 3 else 0.0
    assert run_verified(tiny_model, tmp_path, script, engine, max_steps=4)["state"] == "finished"
    assert engine.num_verifications == 5
    (warning,) = warnings_of(caplog)
    assert "differed by 3 nats" in warning
    assert "something had not reached the engines" in warning


def test_verification_beyond_tightened_limit_warns_and_continues(
    tiny_model: Path, tmp_path: Path, script: Script, engine: OffBy, caplog: pytest.LogCaptureFixture
) -> None:
    """With the user's limit of 10 nats a first gap of 0.01 holds later ones to 1."""
    gaps = [0.01, 0.5, *[2.0] * 4, *[5.0] * 2]
    engine.off = lambda verification: gaps[verification - 1]
    trainer = make(tiny_model, tmp_path, script, engine, max_steps=5, vllm_max_logprob_gap=LOOSE)
    try:
        trainer.train()
    finally:
        trainer.close()
    assert engine.num_verifications == len(gaps), "two for each of the last three weight syncs"
    first, second = warnings_of(caplog)
    assert "weight sync 4, which sent the whole model once more [GRPO-509]" in first
    assert "by 2 nats in the mean and 2 at most, the limit is 1 " in first
    assert "by 5 nats" in second, "more than twice what the last one said"
    lines = [line for line in trainer.state.log_history if "weight_sync/logprob_gap_mean" in line]
    assert [line["weight_sync/logprob_gap_judged"] for line in lines] == pytest.approx([0.01, 0.5, 2, 2, 5], rel=1e-3)
    assert {line["weight_sync/logprob_gap_limit"] for line in lines} == {1.0}


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == "grpo.weights.delivery" and record.levelname == "WARNING"
    ]


def test_verification_beyond_user_limit_ends_job(
    tiny_model: Path, tmp_path: Path, script: Script, engine: OffBy
) -> None:
    engine.off = lambda verification: 0.01 if verification == 1 else 11.0
    with pytest.raises(StepFailed, match=r"GRPO-508.* 11 nats .* limit is 1 .* from 10 on the job ends"):
        run_verified(tiny_model, tmp_path, script, engine, vllm_max_logprob_gap=LOOSE)
    assert newest_complete(tmp_path) == tmp_path / "checkpoint-1"
    assert engine.num_verifications == 3


def test_probe_half_holds_first_training_prompt(
    tiny_model: Path, tmp_path: Path, script: Script, engine: OffBy
) -> None:
    run_verified(tiny_model, tmp_path, script, engine, max_steps=1)
    probe = next(kwargs["prompts"] for method, kwargs in script.started[0].calls if method == "prompt_logprobs")
    prompt = tiny_tokenizer()("10+10=")["input_ids"]
    text = [*prompt * 11][:64]
    assert probe[:2] == [text[:32], text[32:]]
