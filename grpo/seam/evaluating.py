"""Evaluation with sampling of its own, set by set, and pass@k of each.

What TRL 1.16 leaves open here: evaluation samples as training does, the metrics of several sets have one name, and rows
that fill up the last batch count twice.
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
    """How good the model is, of the weights that it holds now; in local mode with sampling of its own."""

    def __init__(self, view: TrainerView, run: JobRun, records: BatchRecords) -> None:
        self._view, self._run, self._records = view, run, records
        self._runs = False
        self._passes: Passes | None = None
        """Of the set that is evaluated now."""
        self._of_set: str | None = None
        """Its name, where there are several."""

    def evaluate(self, rows: Any, prefix: str, evaluate: Evaluate) -> dict[str, float]:
        """Evaluate, with two weight syncs.

        TRL goes by the step (1.16), but `load_best_model_at_end` and callbacks put other weights into the model at the
        same step: before an evaluation, or after it the old ones again. Of one that is not the loop's own nobody knows
        what it evaluates: nothing of training is sampled meanwhile.

        Args:
            rows: as TRL is given them: a set, or its name, or sets by their names; None for the trainer's.
            prefix: of the set's metrics.
            evaluate: TRL's; of several sets it comes here again for each.
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
        """Before TRL logs, which puts `eval_` before what was noted of an evaluation; of several sets the name
        follows."""
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
        """Rewards [completions, functions] of all ranks, of a batch."""
        if self._passes is not None and self._view.mode == "eval":
            self._passes.add(rewards.cpu().numpy())
