"""Without engines of ours, tools and environments are TRL's affair: our class does what TRL's does."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import trl

from examples.calculator_model import problems
from grpo import GRPOConfig, GRPOTrainer, scores_each
from tests.support.made_up_tools import Guessing, halves, plus, times
from tests.support.speaking_engine import calculates, right, speaks_in_generate

WAYS: dict[str, dict[str, Any]] = {
    "tools": {"tools": [times, plus], "reward_funcs": scores_each("completion")(right)},
    "environment": {"environment_factory": Guessing, "reward_funcs": None},
    "several": {"environment_factory": {"one": Guessing, "two": Guessing}, "reward_funcs": None},
}


@pytest.mark.parametrize("way", WAYS)
def test_train_without_engines_matches_trl(way: str, model: Path, tmp_path: Path) -> None:
    def trained(kind: Any, config: Any) -> list[dict[str, float]]:
        args = config(
            output_dir=str(tmp_path / kind.__module__),
            use_vllm=False,
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=200,
            max_steps=2,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            gradient_checkpointing=False,
            disable_tqdm=True,
        )
        rows = problems(4, seed=1)
        if way == "several":
            rows = rows.add_column("environment", ["one", "two"] * 2).add_column("number", [5, 3] * 2)
        trainer = kind(model=str(model), args=args, train_dataset=rows, **WAYS[way])
        with mock.patch.object(trainer.model, "generate", speaks_in_generate(calculates if way == "tools" else halves)):
            trainer.train()
        timed = ("train_", "step_time", "tokens_per_second", "wall_s")
        return [
            {name: value for name, value in line.items() if not name.startswith(timed)}
            for line in trainer.state.log_history
            if "reward" in line
        ]

    ours, trls = trained(GRPOTrainer, GRPOConfig), trained(trl.GRPOTrainer, trl.GRPOConfig)
    assert len(ours) == 2
    assert [{name: line[name] for name in expected} for line, expected in zip(ours, trls, strict=True)] == trls
    assert ours[0]["tools/call_frequency"] > 0
