"""Between TRL's trainer and ours: evaluation with sampling of its own, set by set, and pass@k of each.

What TRL 1.16 leaves open here: evaluation samples as training does, the metrics of several sets have one name, and rows
that fill up the last batch count twice.
"""

import contextlib
from collections.abc import Iterator, Sized
from typing import Any

import torch

from grpo.config.options import evaluation_sampling, passes_at
from grpo.rewards.passes import Passes
from grpo.seam.sparing import SparingTrainer

_PREFIX = "eval"


class EvaluatingTrainer(SparingTrainer):
    """A trainer that says how good its model is; in local mode with sampling of its own."""

    eval_dataset: Any
    reward_func_names: list[str]
    _passes: Passes | None = None
    """Of the set that is evaluated now."""
    _of_set: str | None = None
    """Its name, where there are several."""
    _is_evaluating = False

    @contextlib.contextmanager
    def _guarded(self, phase: str) -> Iterator[None]:
        if self._local is None:
            yield
            return
        with self._watch.guard(), self._watch.during(phase):
            yield

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = _PREFIX
    ) -> dict[str, float]:
        """As TRL's, of the weights that the model holds now; fails as `train` does.

        Costs two weight syncs. TRL goes by the step (1.16), but `load_best_model_at_end` and callbacks put other
        weights into the model at the same step: before an evaluation, or after it the old ones again. Of one that is
        not the loop's own nobody knows what it evaluates: nothing of training is sampled meanwhile.
        """
        if self._is_evaluating:  # one of several sets
            return self._evaluate_set(eval_dataset, ignore_keys, metric_key_prefix)
        with self._guarded("evaluate"):
            self._last_loaded_step = -1
            if self._local is not None and not self.control.should_evaluate:
                self._local.wait_for_batches()
            self._is_evaluating = True
            try:
                return self._evaluate_set(eval_dataset, ignore_keys, metric_key_prefix)
            finally:
                self._is_evaluating, self._last_loaded_step = False, -1

    def _evaluate_set(self, eval_dataset: Any, ignore_keys: list[str] | None, prefix: str) -> dict[str, float]:
        rows = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(rows, dict):
            return super().evaluate(eval_dataset, ignore_keys, prefix)
        if isinstance(rows, str):
            rows = self.eval_dataset[rows]
        if self._local is None:
            return super().evaluate(eval_dataset, ignore_keys, prefix)
        self._of_set = prefix.removeprefix(_PREFIX).lstrip("_") or None
        self._passes = Passes(
            names=self.reward_func_names,
            weights=self.reward_weights.double().cpu().numpy(),
            num_generations=self.num_generations_eval,
            at=passes_at(self.args),
            pass_reward=self.args.eval_pass_reward,
            num_rows=len(rows) * self.num_generations_eval if isinstance(rows, Sized) else None,
        )
        self._local.eval_sampling = evaluation_sampling(self.args, self._of_set)
        try:
            metrics = super().evaluate(eval_dataset, ignore_keys, prefix)
            self.write_evaluated(self._of_set)
            return metrics
        finally:
            self._passes = self._of_set = None
            self._local.eval_sampling = {}

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """TRL's, which puts `eval_` before what was noted of an evaluation; of several sets the name follows."""
        if self._passes is not None and self._mode == "eval":
            self.note_metrics(self._passes.metrics())
            noted = self._metrics["eval"]
            if (
                self._local is not None and self._local.eval_sampling
            ):  # TRL scores at the temperature of training (1.16)
                for name in [name for name in noted if name.startswith("sampling/")]:
                    del noted[name]
            if self._of_set is not None:
                for name in [*noted]:
                    noted[f"{self._of_set}_{name}"] = noted.pop(name)
        super().log(logs, *args, **kwargs)

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        rewards = super()._calculate_rewards(*args, **kwargs)
        if self._passes is not None and self._mode == "eval":
            self._passes.add(rewards.cpu().numpy())
        return rewards
