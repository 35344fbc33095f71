"""The real trainer over an engine that answers at once, whatever the weights."""

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from datasets import Dataset
from transformers import TrainerCallback

from grpo import GRPOConfig, GRPOTrainer
from grpo.engine.client import EngineDied, EngineError
from grpo.engine.messages import Ready, Sample, Sampled
from grpo.weights.wire_format import WireFormat


class ScriptedEngine:
    """Answers at once, and writes down what it is told."""

    story: list[tuple]
    tokens_of: dict[tuple[int, ...], str]
    deaths: ClassVar[list[tuple[str, int]]] = []
    """What some engine is asked for, and at which time that kills the engine that is asked."""

    started: list["ScriptedEngine"]
    asked: Counter[str]
    is_closed = False
    pid, private_folder = 0, Path("unused")

    def __init__(self, spec: Any, *, name: str, on_death: Any, **kwargs: Any) -> None:
        self.name = name
        self.on_death = on_death  # a real engine's thread holds it
        self.started.append(self)
        self._hear: Callable[[Sampled | EngineError], None] = lambda answer: None
        self._death: EngineDied | None = None

    def die(self) -> None:
        """As a real one: whoever waits hears of it, and then its supervisor, from another thread."""
        death = self._death = EngineDied(f"{self.name} was killed by signal 9; the last lines of its log:\nnothing")

        def tell() -> None:
            self._hear(death)
            self.on_death(death)

        threading.Thread(target=tell, daemon=True).start()

    @property
    def is_dead(self) -> bool:
        return self._death is not None

    def _is_asked(self, what: str) -> None:
        self.asked[what] += 1
        if (what, self.asked[what]) in self.deaths:
            self.die()
        if self._death is not None:
            raise self._death

    def wait_ready(self, timeout_s: float, check: Any) -> Ready:
        self._is_asked("wait_ready")
        return Ready(max_model_len=64, max_num_seqs=16, startup_s=1.0)

    def call(self, method: str, timeout_s: float, **kwargs: Any) -> Any:
        self._is_asked(method)
        if method == "prompt_logprobs":
            return [[0.0] * (len(prompt) - 1) for prompt in kwargs["prompts"]]
        if method == "finish_weight_update":
            self.story.append(("push", int(kwargs["weight_version"])))
        if method == "wire_format":
            return [WireFormat().dumps()]
        return True

    def listen(self, hear: Callable[[Sampled | EngineError], None]) -> None:
        self._hear = hear

    def submit(self, sample: Sample) -> None:
        try:
            self._is_asked("submit")
        except EngineDied:
            return
        for number, completion_id in enumerate(sample.ids):
            token_ids = np.random.default_rng(sample.seed + number).integers(5, 20, 3).astype(np.int32)
            logprobs = np.full(3, -2.5, np.float32)
            self._hear(Sampled(completion_id=completion_id, token_ids=token_ids, engine_logprobs=logprobs))

    def abort(self, ids: Any) -> None:
        self.story.append(("abort",))

    def close(self) -> None:
        self.is_closed = True


def use_scripted_engines(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """Trainers start these from now on. Returns what will have happened, in order."""
    story: list[tuple] = []
    for name, value in {"story": story, "started": [], "asked": Counter(), "deaths": []}.items():
        monkeypatch.setattr(ScriptedEngine, name, value, raising=False)
    monkeypatch.setattr(GRPOTrainer, "start_engine", ScriptedEngine)
    return story


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
    num_prompts: int = 40,
    stop_at: int = 0,
    prompts: list[str] | None = None,
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
    trainer = GRPOTrainer(
        model=str(tiny_model),
        reward_funcs=reward,
        args=args,
        train_dataset=rows,
        eval_dataset=rows.select(range(4)),
        callbacks=[Steps(story, stop_at, output_dir)],
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
