"""Training with the arguments of `train.py`, or of the demo."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl import get_peft_config

from grpo import agents
from grpo.ops import first_and_last, windows
from grpo.ops.train.arguments import Arguments, quantisation_of
from grpo.ops.train.checks import rewards_of
from grpo.ops.train.data import load_data, load_evaluation, split_of
from grpo.ops.train.demo import MODEL, demo_dataset
from grpo.ops.train.refreshing import RefreshReport
from grpo.place.importing import importing

if TYPE_CHECKING:
    from grpo.trainer import GRPOTrainer

_log = logging.getLogger(__name__)
_DEMO = (
    "no model is named: the demo, two-digit addition. Its model of 0.6 M parameters gets 4 of 10 sums right; %d steps "
    "of GRPO have the rest to do"
)


def run(arguments: Arguments) -> "GRPOTrainer":
    """Train the named model on the named data, save it, and push it to the Hub if requested."""
    script, training = arguments.script, arguments.training
    dataset = load_data(arguments)
    trainer = build_trainer(
        arguments,
        model=arguments.model.model_name_or_path,
        reward_funcs=rewards_of(arguments),
        train_dataset=split_of(dataset, script.dataset_train_split, "dataset_train_split"),
        eval_dataset=load_evaluation(arguments, dataset),
        rollout_func=None if script.agent is None else agents(script.agent),
    )
    train(trainer, arguments)
    trainer.save_model(training.output_dir)
    trainer.accelerator.print(f"model saved to {training.output_dir}")
    if training.push_to_hub:
        trainer.push_to_hub(dataset_name=script.dataset_name)
        trainer.accelerator.print(f"model pushed to https://huggingface.co/{trainer.hub_model_id}")
    return trainer


def run_demo(arguments: Arguments) -> "GRPOTrainer":
    """Train the demo model on two-digit addition, and print one line with the result on rank 0."""
    training = arguments.training
    _log.info(_DEMO, training.max_steps)
    trainer = build_trainer(
        arguments,
        model=str(MODEL),
        reward_funcs=rewards_of(arguments),
        train_dataset=demo_dataset("train"),
        eval_dataset=demo_dataset("test") if training.eval_strategy != "no" else None,
    )
    train(trainer, arguments)
    _log.info(
        "next: `grpo report %s` makes a page of this run (no `grpo`? `source .venv/bin/activate`); `grpo init my-run` "
        "writes a script for a model, data and rewards of your own, with launcher files",
        training.output_dir,
    )
    trainer.accelerator.print(demo_summary(trainer.state.log_history, trainer.first_step))
    return trainer


def train(trainer: "GRPOTrainer", arguments: Arguments) -> None:
    """Train; with `report_every_s`, renew the run's page meanwhile."""
    training, every_s = arguments.training, arguments.script.report_every_s
    if not every_s or not trainer.is_world_process_zero():
        trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
        return
    pages, has_time = RefreshReport(every_s), False
    trainer.add_callback(pages)
    try:
        trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
        has_time = True
    finally:
        pages.finish(Path(training.output_dir), has_time=has_time)


def build_trainer(arguments: Arguments, **kwargs: Any) -> "GRPOTrainer":
    """Build a `GRPOTrainer` from the parsed arguments; `kwargs` are its `model`, `reward_funcs`, data sets and the
    like."""
    with importing():
        from grpo.trainer import GRPOTrainer

    model, training = arguments.model, arguments.training
    training.model_init_kwargs = {
        "revision": model.model_revision,
        "trust_remote_code": training.trust_remote_code,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
        **(training.model_init_kwargs or {}),
    }
    return GRPOTrainer(
        args=training,
        quantization_config=quantisation_of(model),
        peft_config=get_peft_config(model),
        **kwargs,
    )


def demo_summary(log_history: Sequence[Mapping[str, Any]], first_step: int = 0) -> str:
    """Summarize in one line: reward of the first 10 and the last 20 steps, steps and seconds.

    Args:
        first_step: steps of earlier attempts; seconds are counted from there.
    """
    logs = [log for log in log_history if log.get("reward") is not None]
    totals = next(log for log in reversed(log_history) if "train_runtime" in log)
    steps, seconds = totals["step"], totals["train_runtime"]
    if not logs:
        return f"demo: {steps} steps in {seconds:.0f} s, none of them logged (logging_steps)"
    at = [log["step"] for log in logs]
    rewards = [log["reward"] for log in logs]
    first, last = first_and_last(at, rewards, end=steps)
    num_first, num_last = windows(steps)
    reached = f"{steps} steps" if not first_step else f"{steps - first_step} steps to step {steps}"
    return (
        f"demo: reward {first:.3f} -> {last:.3f} "
        f"(means of the first {num_first} and the last {num_last} steps), {reached} in {seconds:.0f} s"
    )
