"""The real trainer over an engine that answers at once, whatever the weights."""

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import TrainerCallback

from grpo import GRPOConfig, GRPOTrainer
from tests.support.engines import Script


def use_scripted_engines(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Script:
    """Trainers start engines by this script from now on.

    Args:
        settings: of the script.
    """
    script = Script(**settings)
    monkeypatch.setattr(GRPOTrainer, "start_engine", script.start)
    return script


class Steps(TrainerCallback):
    def __init__(self, story: list[tuple], stop_at: int, output_dir: Path) -> None:
        self.story, self.stop_at, self.output_dir = story, stop_at, output_dir

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.story.append(("step", state.global_step))
        if state.global_step == self.stop_at:
            (self.output_dir / "stop").touch()


def make_trainer(
    tiny_model: Path,
    output_dir: Path,
    story: list[tuple],
    *,
    kind: type[GRPOTrainer] = GRPOTrainer,
    num_prompts: int = 40,
    stop_at: int = 0,
    prompts: list[str] | None = None,
    is_stream: bool = False,
    peft_config: Any = None,
    **config: Any,
) -> GRPOTrainer:
    def reward(prompts: list[str], completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        story.append(("score" if trainer.model.training else "evaluate", tuple(dict.fromkeys(prompts))))
        return [float(sum(ids) % 7) for ids in completion_ids]

    output_dir.mkdir(exist_ok=True)
    prompts = prompts or [f"{10 + row}+{10 + row}=" for row in range(num_prompts)]
    rows = Dataset.from_dict({"prompt": prompts})
    settings = {
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 4,
        "vllm_max_model_length": 64,
        "max_steps": 3,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "check_rewards": False,  # it tells the story, and asks the trainer
    }
    args = GRPOConfig(output_dir=str(output_dir), use_cpu=True, bf16=False, **{**settings, **config})
    as_given = dict(vars(args))
    trainer = kind(
        model=str(tiny_model),
        reward_funcs=reward,
        args=args,
        train_dataset=rows.to_iterable_dataset() if is_stream else rows,
        eval_dataset=rows.select(range(4)),
        callbacks=[Steps(story, stop_at, output_dir)],
        peft_config=peft_config,
    )
    assert vars(args) == as_given  # the user's object
    return trainer


def train(tiny_model: Path, output_dir: Path, story: list[tuple], **settings: Any) -> GRPOTrainer:
    trainer = make_trainer(tiny_model, output_dir, story, **settings)
    try:
        trainer.train()
    finally:
        trainer.close()
    return trainer


def of_kind(story: list[tuple], *kinds: str) -> list[tuple]:
    return [event[1] for event in story if event[0] in kinds]
