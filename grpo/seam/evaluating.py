"""Evaluation with its own sampling settings, set by set, and pass@k of each set.

TRL 1.16 evaluates with training's sampling settings, gives the metrics of several sets one name, and counts the rows
that pad the last batch twice.
"""

from collections.abc import Callable, Sized
from functools import partial
from typing import Any

import torch

from grpo.config.options import evaluation_sampling, passes_at
from grpo.rewards.passes import Passes
from grpo.seam.observing import BatchRecords
from grpo.seam.run import JobRun
from grpo.seam.view import TrainerView

PREFIX = "eval"
Evaluate = Callable[[], dict[str, float]]


class Evaluation:
    """Evaluation of the model's present weights; in local mode with its own sampling settings."""

    def __init__(self, view: TrainerView, run: JobRun, records: BatchRecords) -> None:
        self._view, self._run, self._records = view, run, records
        self._runs = False
        self._passes: Passes | None = None
        """Pass rates of the set being evaluated."""
        self._of_set: str | None = None
        """Name of that set; None if there is only one."""

    def evaluate(self, rows: Any, prefix: str, evaluate: Evaluate) -> dict[str, float]:
        """Evaluate, with a weight sync before and one after. Collective.

        TRL syncs once per step (1.16), but `load_best_model_at_end` and callbacks may change the weights within a step,
        before or after an evaluation. Before an evaluation outside the training loop, batches under way are waited for,
        since its weights may be others.

        Args:
            rows: TRL's argument: a set, the name of a set, or sets by name; None for the trainer's own.
            prefix: prefix of the set's metrics.
            evaluate: TRL's `evaluate`; with several sets it calls this method again for each.
        """
        view = self._view
        evaluate = partial(self._evaluate_set, rows, prefix, evaluate) if view.args.local_mode else evaluate
        if self._runs:  # one of several sets
            return evaluate()
        with self._run.guarded("evaluate"):
            view.synced_at = -1
            if view.args.local_mode and not view.control.should_evaluate:
                view.engines.wait_for_batches()
            self._runs = True
            try:
                return evaluate()
            finally:
                self._runs, view.synced_at = False, -1

    def _evaluate_set(self, rows: Any, prefix: str, evaluate: Evaluate) -> dict[str, float]:
        view = self._view
        rows = view.eval_dataset if rows is None else rows
        if isinstance(rows, dict):
            return evaluate()
        rows = view.eval_dataset[rows] if isinstance(rows, str) else rows
        self._of_set = prefix.removeprefix(PREFIX).lstrip("_") or None
        self._passes = Passes(
            names=view.reward_func_names,
            weights=view.reward_weights.double().cpu().numpy(),
            num_generations=(size := view.args.num_generations_eval or view.args.num_generations),
            at=passes_at(view.args),
            pass_reward=view.args.eval_pass_reward,
            num_rows=len(rows) * size if isinstance(rows, Sized) else None,
        )
        view.engines.eval_sampling = evaluation_sampling(view.args, self._of_set)
        try:
            metrics = evaluate()
            self._records.write_evaluated(self._of_set)
            return metrics
        finally:
            self._passes = self._of_set = None
            view.engines.eval_sampling = {}

    def note(self) -> None:
        """Note the pass rates before TRL logs. With several sets, metrics get the set's name behind TRL's `eval_`."""
        view = self._view
        if self._passes is None or view.mode == "train":
            return
        view.note_metrics(self._passes.metrics())
        noted = view.figures["eval"]
        if view.engines.eval_sampling:  # TRL scores at the temperature of training (1.16)
            for name in [name for name in noted if name.startswith("sampling/")]:
                del noted[name]
        if self._of_set is not None:
            for name in [*noted]:
                noted[f"{self._of_set}_{name}"] = noted.pop(name)

    def add(self, rewards: torch.Tensor) -> None:
        """Add a batch's rewards of all ranks, [completions, functions]."""
        if self._passes is not None and self._view.mode == "eval":
            self._passes.add(rewards.cpu().numpy())
