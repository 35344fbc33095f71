"""Log-probabilities that are no finite numbers: counted by engine, and the end of a job where one has too many."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from grpo.faults.failure import StepFailed
from grpo.rollout.accounts import FiniteCheck
from tests.support.scripted_trainer import make_trainer, use_scripted_engines

NAN = math.nan


def test_finite_check_names_worst_engine() -> None:
    check = FiniteCheck(node=3)
    assert check.take() == (0, None)
    for engine, bad in ((0, 0), (1, 2), (2, 5)):
        check.note(engine, np.array([-1.0] * (100 - bad) + [NAN] * bad, np.float32))
    check.note(2, np.array([-1.0, -math.inf, math.inf], np.float32))
    check.note(4, np.empty(0, np.float32))  # a refusal
    count, what = check.take()
    assert count == 2 + 5 + 2
    assert what is not None
    assert what.startswith("engine 2 of node 3 gave 7 of 103 tokens log-probabilities that are no finite numbers")
    assert what.endswith("[GRPO-417]")
    assert check.take() == (0, None)


@pytest.mark.parametrize(("bad", "is_reported"), [(10, False), (11, True)])
def test_finite_check_reports_only_above_one_percent(bad: int, is_reported: bool) -> None:
    check = FiniteCheck(node=0)
    check.note(0, np.array([NAN] * bad + [-1.0] * (1000 - bad), np.float32))
    count, what = check.take()
    assert (count, what is not None) == (bad, is_reported)


def test_train_with_nan_logprobs_fails_and_records_last_checkpoint(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = use_scripted_engines(monkeypatch)
    script.logprobs_of = lambda sample, tokens: [NAN] * len(tokens) if script.asked["submit"] > 2 else None
    trainer = make_trainer(tiny_model, tmp_path / "run", script.story, vllm_max_logprob_gap=1e9)
    try:
        with pytest.raises(StepFailed, match=r"engine 0 of node 0 gave 24 of 24 tokens .*\[GRPO-417\]"):
            trainer.train()
    finally:
        trainer.close()
    (line,) = [line for line in trainer.state.log_history if "reward" in line]
    assert line["engine/nonfinite_logprobs"] == 0
    state = json.loads((tmp_path / "run" / "run_state.json").read_text())
    assert (state["kind"], state["step"]) == ("engine", 1)
    assert state["checkpoint"].endswith("checkpoint-1")


def test_train_with_few_nan_logprobs_counts_them_and_goes_on(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpo.rollout.accounts.MAX_SHARE", 0.2)  # of so few tokens one is more than a hundredth
    script = use_scripted_engines(monkeypatch)
    script.logprobs_of = lambda sample, tokens: [NAN, -2.5, -2.5] if script.asked["submit"] == 3 else None
    trainer = make_trainer(tiny_model, tmp_path / "run", script.story, vllm_max_logprob_gap=1e9, max_steps=2)
    try:
        trainer.train()
    finally:
        trainer.close()
    lines = [line for line in trainer.state.log_history if "reward" in line]
    assert [line["engine/nonfinite_logprobs"] for line in lines] == [0, 4]
    assert all(math.isfinite(line["loss"]) for line in lines)
